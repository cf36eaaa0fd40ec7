"""The frozen, public description of a run; sampler and accounting are both derived from it.

Symbols, defined once here and used as in the paper:

    D  records in the training set            B  expected rows a step
    M  micro-batches a step                   C  clipping norm
    E  epochs                                 p  = B / (M D), chance to be in a micro-batch
    T  = floor(E D / B), steps                n  = T M, micro-batches drawn in all

Secrets (seeds, data) are never in a plan: they are arguments of the functions that need them.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfp_ray.defaults import METHOD_DEFAULTS, default_learning_rate
from dpfp_ray.errors import UserError

METHODS = tuple(METHOD_DEFAULTS)
MODES = ("paper", "release_once", "moments")
# Modes that look at the private data once, with a frozen encoder; all else is post-processing.
ONE_RELEASE = ("release_once", "moments")
# Measured on SST-2 and the demo, which are public (benchmarks/frozen.md); the optimum is flat.
RIDGE = {"release_once": 2.0, "moments": 0.5}
CLIPPINGS = ("ghost", "hooks")
CARRIERS = ("weight", "history")
ACCOUNTANTS = ("gdp", "rdp", "pld")
ADJACENCIES = {
    "non_private": ("none",),
    "dpfp": ("zero_out", "replace_one"),
    "dpsgd": ("add_remove",),
    "rgp": ("add_remove",),
    # A release of sums over records; the other modes of dpfp release rows.
    "moments": ("add_remove",),
}
ALIASES = {
    "B": "batch_size",
    "M": "micro_batches",
    "C": "clip",
    "E": "epochs",
    "lr": "learning_rate",
}
_COUNTS = (
    "batch_size",
    "micro_batches",
    "max_train",
    "max_dev",
    "max_physical_batch",
    "rank",
    "power_iterations",
)
# Where the data lie and how a step is cut for memory do not change what is computed.
NOT_HASHED = frozenset({"data_dir", "max_physical_batch"})


def option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A plan field with the help text and choices that the command line shows for it."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. `None` means "the method's own default"; `bind` fills what depends on the data.

    >>> plan = Plan(task="sst2", method="dpfp").bind(records=67_349)
    >>> plan.steps, plan.draws
    (6313, 202016)
    """

    task: str = option("demo", "demo, a GLUE task (sst2, qnli, qqp, mnli, …), or custom")
    data_dir: str | None = option(None, "folder of GLUE-layout TSV files; default: the hub")
    train_file: str | None = option(None, "your own CSV, TSV, Parquet or JSONL training file")
    dev_file: str | None = option(None, "your own dev file; default: a tenth is held out")
    text_column: str | None = option(None, "column of the text in your own files")
    pair_column: str | None = option(None, "column of the second text, for sentence pairs")
    label_column: str | None = option(None, "column of the label in your own files")
    labels: tuple[str, ...] | None = option(None, "class names in order, comma-separated")
    max_train: int | None = option(None, "use a fixed subset of N training records (D = N)")
    max_dev: int | None = option(None, "use a fixed subset of N dev records")
    bad_rows: str = option("error", "what to do with malformed rows", ("error", "skip"))

    model: str = option("minilm", "minilm, mpnet, a local folder or a hub id")
    representation: str = option(
        "auto", "what is clipped and noised", ("auto", "pooler", "cls", "mean")
    )
    max_length: int = option(128, "tokens a record is cut to")
    dropout: float = option(0.0, "0 makes a run independent of how its rows are split")

    method: str = option("dpfp", "how to train", METHODS)
    mode: str = option("paper", "dpfp: which variant", MODES)
    scope: str = option(
        "auto",
        "train all weights, or the head on a frozen encoder; auto: what the mode needs, else all",
        ("auto", "all", "head"),
    )
    scaling: str = option(
        "auto",
        "how a representation is bounded: clipped to C; release_once, moments: scaled to norm 1",
        ("auto", "clip", "unit"),
    )
    ridge: float | None = option(
        None, "release_once, moments: ridge, in units of the noise's known size (default: 2, 0.5)"
    )
    shrinkage: float | None = option(
        None, "release_once, moments: ridge, in units of the mean variance (default: 0.01)"
    )
    prior: str = option(
        "none",
        "release_once, moments: dev lets the unlabelled dev texts, which must then be public, "
        "say in which directions classes are likely to differ",
        ("none", "dev"),
    )
    clipping: str = option("ghost", "dpsgd: how per-example gradients are clipped", CLIPPINGS)
    rank: int = option(1, "rgp: rank r of the gradient carriers")
    power_iterations: int = option(1, "rgp: power iterations K that find the carriers")
    carriers: str = option("weight", "rgp: what the carriers decompose", CARRIERS)
    batch_size: int | None = option(None, "B: expected rows a step")
    micro_batches: int | None = option(None, "M: independent draws that make up a step")
    clip: float | None = option(None, "C: norm to which each record is clipped")
    learning_rate: float | None = option(None, "AdamW's peak learning rate")
    schedule: str | None = option(None, "learning rate over time", ("linear", "constant"))
    weight_decay: float | None = option(None, "AdamW's weight decay")
    epochs: float | None = option(None, "E: expected passes over the data")

    epsilon: float | None = option(None, "privacy budget; default 3 for private methods")
    delta: float | None = option(None, "default 1/(2D)")
    label_epsilon: float | None = option(
        None, "release_once: share of epsilon spent on randomising labels; default: labels public"
    )
    accountant: str = option("pld", "which accountant the noise is calibrated by", ACCOUNTANTS)
    adjacency: str | None = option(
        None,
        "what neighbouring data sets differ in; default: the method's",
        ("zero_out", "add_remove", "replace_one"),
    )

    precision: str = option("fp32", "bf16 autocasts the encoder", ("fp32", "bf16"))
    max_physical_batch: int = option(256, "rows in memory at once; does not change the result")
    records: int | None = option(None, "D; taken from the data, given only for calibrate")

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(unknown("method", self.method, METHODS))
        defaults = METHOD_DEFAULTS[self.method]
        self._follow_mode()
        self._fill("learning_rate", default_learning_rate(self.method, self.scope))
        for name in ("clip", "schedule", "weight_decay", "adjacency"):
            self._fill(name, getattr(defaults, name))
        if not defaults.scales_with_data and not self.one_release:
            self._fill("batch_size", defaults.batch_size)
            self._fill("epochs", defaults.epochs)
        # A smaller B than the paper's keeps M valid: at most one expected row a micro-batch.
        self._fill("micro_batches", min(defaults.micro_batches, self.batch_size or 1))
        if self.private:
            self._fill("epsilon", 3.0)
        if self.train_file and self.task == "demo":
            object.__setattr__(self, "task", "custom")
        if self.records is not None:
            if self.records < 1:
                raise UserError(f"records is {self.records}; give a whole number of 1 or more")
            self._fill("batch_size", defaults.batch_size_at(self.records))
            self._fill("epochs", defaults.epochs_at(self.records))
            if self.private:
                self._fill("delta", 1 / (2 * self.records))
        for name, wanted in _TYPES.items():  # 3 and 3.0 are one plan, and must have one hash
            if float in _kinds(wanted) and isinstance(value := getattr(self, name), int):
                object.__setattr__(self, name, float(value))
        self._validate()

    def _follow_mode(self) -> None:
        """What a mode decides. One release of all records is B = D, M = 1, E = 1: p = n = 1."""
        if self.scope == "auto":
            object.__setattr__(self, "scope", "head" if self.one_release else "all")
        if self.scaling == "auto":
            object.__setattr__(self, "scaling", "unit" if self.one_release else "clip")
        if self.one_release:
            self._fill("adjacency", self._adjacencies[0])
            self._fill("batch_size", self.records)
            self._fill("micro_batches", 1)
            self._fill("epochs", 1.0)
            self._fill("ridge", RIDGE[self.mode])
            self._fill("shrinkage", 0.01)

    def _fill(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _validate(self) -> None:
        for spec in dataclasses.fields(self):
            choices = spec.metadata["choices"]
            value = getattr(self, spec.name)
            if choices and value is not None and spec.name != "adjacency" and value not in choices:
                raise UserError(unknown(spec.name, value, choices))
        if self.adjacency not in self._adjacencies:
            mode = f" mode {self.mode}" if self.one_release else ""
            raise UserError(
                f"adjacency {self.adjacency!r} is not one that {self.method}{mode} can promise; "
                f"use {' or '.join(self._adjacencies)}"
            )
        for name in _COUNTS:
            _require(
                getattr(self, name),
                name,
                lambda v: isinstance(v, int) and v >= 1,
                "a whole number of 1 or more",
            )
        _require(self.epsilon, "epsilon", lambda v: 0 < v <= 1000, "a number above 0, at most 1000")
        for name in ("clip", "learning_rate", "epochs"):
            _require(getattr(self, name), name, lambda v: 0 < v < math.inf, "a number above 0")
        _require(self.delta, "delta", lambda v: 0 < v < 1, "a number between 0 and 1")
        _require(self.max_length, "max_length", lambda v: v >= 3, "3 or more")
        _require(self.weight_decay, "weight_decay", lambda v: 0 <= v < math.inf, "0 or more")
        _require(self.dropout, "dropout", lambda v: 0 <= v < 1, "from 0 to below 1")
        for name in ("ridge", "shrinkage"):
            _require(getattr(self, name), name, lambda v: 0 <= v < math.inf, "0 or more")
        self._validate_mode()
        if not self.private and (self.epsilon is not None or self.delta is not None):
            raise UserError("non_private spends no budget; drop epsilon and delta")
        if self.method != "dpfp" and self.M != 1:
            raise UserError(f"micro_batches is {self.M}, but {self.method} has none; drop it")
        if self.task == "custom" and not self.train_file:
            raise UserError("task custom needs train_file; give --train-file FILE")
        if self.batch_size is None:
            return
        if self.batch_size < self.M:
            raise UserError(
                f"micro_batches M = {self.M} is more than batch_size B = {self.batch_size}; "
                f"each micro-batch needs an expected size of 1 or more, so use M <= B"
            )
        if self.records is not None:
            if self.p > 1:
                raise UserError(
                    f"sampling probability p = B/(M D) = {self.p:.4g} is above 1 with "
                    f"B = {self.batch_size}, M = {self.M}, D = {self.records}; "
                    f"use a batch_size of {self.M * self.records} or less"
                )
            if self.steps < 1:
                raise UserError(
                    f"epochs E = {self.epochs} of D = {self.records} records make no whole step "
                    f"of B = {self.batch_size}; use a smaller batch_size or more epochs"
                )

    def _validate_mode(self) -> None:
        if self.method != "dpfp" and self.mode != "paper":
            raise UserError(f"mode {self.mode} belongs to method dpfp, not to {self.method}")
        if self.scope == "head" and self.dropout:
            raise UserError("dropout acts in the encoder, which scope head freezes; drop it")
        if self.label_epsilon is not None:
            if self.mode != "release_once":
                raise UserError(
                    "label_epsilon belongs to mode release_once; dpsgd, rgp and mode moments "
                    "protect labels without it, mode paper does not protect them"
                )
            _require(
                self.label_epsilon,
                "label_epsilon",
                lambda v: 0 < v < (self.epsilon or math.inf),
                f"a number above 0 and below epsilon = {self.epsilon}, of which it is a share",
            )
            if self.accountant == "rdp":
                raise UserError("accountant rdp has no bound with label_epsilon; use pld or gdp")
        if not self.one_release:
            for name in ("ridge", "shrinkage"):
                if getattr(self, name) is not None:
                    raise UserError(f"{name} belongs to modes {' and '.join(ONE_RELEASE)}; drop it")
            for name, usual in {"scaling": "clip", "prior": "none"}.items():
                if getattr(self, name) != usual:
                    raise UserError(
                        f"{name} {getattr(self, name)} belongs to modes {' and '.join(ONE_RELEASE)}"
                    )
            return
        if self.scope != "head":
            raise UserError(f"mode {self.mode} freezes the encoder; use scope head, or drop scope")
        if self.scaling == "unit" and self.clip != 1:
            raise UserError(
                f"clip is {self.clip:g}, but scaling unit gives every representation norm 1; "
                f"drop clip, or use scaling clip"
            )
        defaults = METHOD_DEFAULTS[self.method]
        only = {
            "micro_batches": 1,
            "epochs": 1,
            "batch_size": self.records,
            "learning_rate": default_learning_rate(self.method, self.scope),
            "schedule": defaults.schedule,
            "weight_decay": defaults.weight_decay,
        }
        for name, value in only.items():
            if getattr(self, name) != value:
                raise UserError(
                    f"mode {self.mode} makes one release of all records and solves its head in "
                    f"closed form; drop {name}"
                )

    def bind(self, *, records: int, representation: str | None = None) -> "Plan":
        """The same plan with D, and all that follows from it, filled in."""
        if self.records not in (None, records):
            raise UserError(f"the plan says D = {self.records} records, the data have {records}")
        return dataclasses.replace(
            self, records=records, representation=representation or self.representation
        )

    @property
    def one_release(self) -> bool:
        """Whether the private data are used once, for a release from which all else follows."""
        return self.method == "dpfp" and self.mode in ONE_RELEASE

    @property
    def _adjacencies(self) -> tuple[str, ...]:
        """Those that this method and mode can promise, the default first."""
        return ADJACENCIES[self.mode if self.mode in ADJACENCIES else self.method]

    @property
    def private(self) -> bool:
        return self.method != "non_private"

    @property
    def D(self) -> int:
        return self._bound("records")

    @property
    def B(self) -> int:
        return self._bound("batch_size")

    @property
    def M(self) -> int:
        return typing.cast(int, self.micro_batches)

    @property
    def C(self) -> float:
        return typing.cast(float, self.clip)

    @property
    def p(self) -> float:
        return self.B / (self.M * self.D)

    @property
    def steps(self) -> int:
        """T."""
        return math.floor(self._bound("epochs") * self.D / self.B)

    @property
    def draws(self) -> int:
        """n = T M."""
        return self.steps * self.M

    def epoch_ends(self) -> list[int]:
        """Step counts after which an epoch's worth of records has been drawn; the last is T."""
        whole = [
            math.floor(e * self.D / self.B) for e in range(1, math.ceil(self._bound("epochs")))
        ]
        return sorted({end for end in whole if 0 < end < self.steps} | {self.steps})

    def _bound(self, name: str) -> Any:
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"{name} is not known before the plan is bound to its data")
        return value

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def hash(self) -> str:
        """16 hex digits; equal for equal runs on any machine."""
        facts = {key: value for key, value in self.to_dict().items() if key not in NOT_HASHED}
        text = json.dumps(facts, sort_keys=True, ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


FIELDS = {spec.name: spec for spec in dataclasses.fields(Plan)}
_TYPES = typing.get_type_hints(Plan)


def make_plan(values: Mapping[str, Any]) -> Plan:
    """A plan from untrusted values (YAML, flags): keys checked, numbers in strings accepted.

    YAML 1.1 reads `5e-6` as a string; it is a number here. A key without a value is not given.
    """
    clean: dict[str, Any] = {}
    for key, value in values.items():
        name = field_name(key)
        if name not in FIELDS:
            raise UserError(unknown("key", str(key), tuple(FIELDS)))
        if name in clean:
            raise UserError(f"{name} is given twice (also as {key!r})")
        clean[name] = _coerce(name, value)
    return Plan(**{name: value for name, value in clean.items() if value is not None})


def field_name(key: Any) -> str:
    """The field that a key of a plan file means: `B`, `batch-size` and `batch_size` are one."""
    return ALIASES.get(key, str(key).replace("-", "_"))


def read_plan_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML plan file."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read plan {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold `key: value` lines, not a {type(content).__name__}")
    return content


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """`int | None` → (int, NoneType); `int` → (int,)."""
    return typing.get_args(annotation) or (annotation,)


def _coerce(name: str, value: Any) -> Any:
    if value is None:
        return None
    wanted = next(kind for kind in _kinds(_TYPES[name]) if kind is not type(None))
    if typing.get_origin(wanted) is tuple or wanted is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not items:
            raise UserError(f"{name} is {value!r}; give a list such as negative,positive")
        return tuple(_text(name, item).strip() for item in items)
    if wanted is str:
        return _text(name, value)
    try:
        number = float(value)
        if isinstance(value, bool) or (wanted is int and number != int(number)):
            raise ValueError
        return int(number) if wanted is int else number
    except (TypeError, ValueError, OverflowError):
        kind = "a whole number" if wanted is int else "a number"
        raise UserError(f"{name} is {value!r}; give {kind}") from None


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):  # YAML 1.1 reads yes, no, on and off so: the word is lost
        raise UserError(f"{name} is the boolean {value} in YAML; put the word in quotes")
    if not isinstance(value, (str, int, float)):
        raise UserError(f"{name} is {value!r}; give one word or path")
    return str(value)


def _require(value: Any, name: str, holds: typing.Callable[[Any], bool], need: str) -> None:
    if value is not None and not (isinstance(value, (int, float)) and holds(value)):
        raise UserError(f"{name} is {value}; give {need}")


def unknown(kind: str, value: str, valid: tuple[str, ...]) -> str:
    longer = [name for name in valid if str(value) and name.startswith(str(value))]
    nearest = longer or difflib.get_close_matches(str(value), valid, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"use one of {', '.join(valid)}"
    return f"unknown {kind} {value!r}; {hint}"
