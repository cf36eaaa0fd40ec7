"""The frozen, public description of a run; sampler and accounting are both derived from it.

Symbols, defined once here and used as in the paper:

    D  records (or persons) to train on       B  expected records (or persons) a step
    M  micro-batches a step                   C  clipping norm
    E  epochs                                 p  = B / (M D), chance to be in a micro-batch
    T  = floor(E D / B), steps                n  = T M, micro-batches drawn in all

With `user_column` the unit is a person: D counts persons, who are drawn and bounded as one.

Secrets (seeds, data) are never in a plan: they are arguments of the functions that need them.

Its fields are in the order of the flow, with the help that the command line shows.
"""

import dataclasses
import functools
import hashlib
import json
import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dpfp_ray.plan.checks import check
from dpfp_ray.plan.method_spec import (
    DEFAULT_METHOD,
    FIRST_MODE,
    LORA_FIELDS,
    METHODS,
    MODES,
    TEACHERS,
    TEACHING,
    MethodSpec,
    all_specs,
    find_spec,
    modes_of,
    reads_records,
)
from dpfp_ray.system.errors import UserError, unknown

CLIPPINGS = ("ghost", "hooks")
CLIP_STYLES = ("abadi", "automatic")
GRAD_SAMPLE_MODES = ("hooks", "ghost", "functorch")
CARRIERS = ("weight", "history")
SAMPLINGS = ("poisson", "allocation")
ACCOUNTANTS = ("gdp", "rdp", "pld")
LORA_RANK, LORA_ALPHA = 8, 16.0  # where Hu et al. 2022 and peft start
# Records of a person where nobody says: a person always fits into one pass, and few have more.
MAX_PER_USER = 64


def option(
    default: Any, help: str, choices: Sequence[str] | None = None, *, decides: str = "training"
) -> Any:
    """A plan field with the help text and choices that the command line shows for it.

    decides   what follows from the field first: the records that are read ("data"), the tokens and
              the model that trials may share ("inputs"), or only how they are trained
    """
    return field(default=default, metadata={"help": help, "choices": choices, "decides": decides})


DATA: Any = {"decides": "data"}
INPUTS: Any = {"decides": "inputs"}
MOST_RECORDS = 10**10  # more than there are people; accountants take minutes for absurd numbers
# Fields younger than the first hashes are hashed only where they say something: plans that do not
# use them keep the hash that they have in stores.
UNSAID = {
    **dict.fromkeys((*LORA_FIELDS, *TEACHING, "user_column", "max_per_user")),
    "clip_style": "abadi",
    "grad_sample_mode": "hooks",
    "header": "first_line",
    "centring": "none",
    "start": "zero",
    "label_words": None,
    "sampling": "poisson",
}
# Filled in when a plan is bound to its data.
FROM_DATA = ("records", "classes", "public_records", "teacher_representation")
# Where the data lie and how a step is split for memory do not change what is computed.
NOT_HASHED = frozenset(
    {
        "data_dir",
        "max_physical_batch",
        "gradient_checkpointing",
        "cache_gb",
        "classes",
    }  # classes follow from data
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. `None` means "the method's own default"; `bind` fills what depends on the data.

    >>> plan = Plan(task="sst2", method="dpfp").bind(records=67_349)
    >>> plan.steps, plan.draws
    (6313, 202016)
    """

    task: str = option("demo", "demo, a GLUE task (sst2, qnli, qqp, mnli, …), or custom", **DATA)
    data_dir: str | None = option(None, "folder of GLUE-layout TSV files; default: the hub", **DATA)
    train_file: str | None = option(
        None,
        "your own CSV, TSV, Parquet or JSONL training file, or a pattern: 'part-*.parquet'",
        **DATA,
    )
    dev_file: str | None = option(None, "your own dev file; default: a tenth is held out", **DATA)
    text_column: str | None = option(None, "column of the text in your own files", **DATA)
    pair_column: str | None = option(None, "column of the second text, for sentence pairs", **DATA)
    label_column: str | None = option(None, "column of the label in your own files", **DATA)
    labels: tuple[str, ...] | None = option(None, "class names in order, comma-separated", **DATA)
    user_column: str | None = option(
        None, "column that says whose a record is; the unit of privacy is then the person", **DATA
    )
    max_per_user: int | None = option(
        None, f"with user_column: at most K records of a person (default: {MAX_PER_USER})", **DATA
    )
    max_train: int | None = option(
        None, "use a fixed subset of N training records, or persons (D = N)", **DATA
    )
    max_dev: int | None = option(None, "use a fixed subset of N dev records", **DATA)
    bad_rows: str = option("error", "what to do with malformed rows", ("error", "skip"), **DATA)
    header: str = option(
        "first_line",
        "none: your own TSV and CSV files have no names in line 1; columns are then 1, 2, …",
        ("first_line", "none"),
        **DATA,
    )

    model: str = option("minilm", "minilm, mpnet, smollm2, a local folder or a hub id", **INPUTS)
    representation: str = option(
        "auto",
        "the vector of a text: pooler, cls, mean, or last (of the last token, for decoders); with "
        "scope head also layers (means of all layers joined), layers:3,4,5,6 (of some), pair (of "
        "two texts: u, v, |u-v|, u*v); auto: pair for pairs on a frozen encoder, else by the "
        "encoder, D and the noise",
        **INPUTS,
    )
    centring: str = option(
        "none",
        "scope head: dev takes the mean of the dev texts, which must then be public, off every "
        "representation",
        ("none", "dev"),
        **INPUTS,
    )
    max_length: int = option(128, "tokens of a record; what is longer is truncated", **INPUTS)
    dropout: float = option(
        0.0, "non_private only: its masks depend on how rows are split", **INPUTS
    )

    method: str = option(DEFAULT_METHOD, "how to train", METHODS)
    mode: str = option(FIRST_MODE, "which variant of the method", MODES)
    scope: str = option(
        "auto",
        "what is trained: all weights, or the head and nothing else (head), all biases and "
        "LayerNorms (bias), low-rank changes of attention (lora), the last K layers (top:K, as in "
        "top:2); auto: what the mode needs, else all",
        **INPUTS,
    )
    lora_rank: int | None = option(
        None, f"scope lora: rank of the change (default: {LORA_RANK})", **INPUTS
    )
    lora_alpha: float | None = option(
        None, f"scope lora: the change is scaled by alpha/rank (default: {LORA_ALPHA:g})", **INPUTS
    )
    lora_targets: tuple[str, ...] | None = option(
        None,
        "scope lora: linear layers to change, by the ends of their names; default: attention's "
        "query and value",
        **INPUTS,
    )
    lora_freeze_a: bool | None = option(
        None, "scope lora: yes trains B only, on a fixed random A (default: no)", **INPUTS
    )
    scaling: str = option(
        "auto",
        "how a representation is bounded: clipped to C, or scaled to norm 1",
        ("auto", "clip", "unit"),
    )
    ridge: float | str | None = option(
        None,
        "ridge, in units of the noise's known size; auto chooses it from the release, at no "
        "further cost",
    )
    shrinkage: float | None = option(None, "ridge, in units of the mean variance")
    prior: str = option(
        "none",
        "dev lets the unlabelled dev texts, which must then be public, "
        "say in which directions classes are likely to differ",
        ("none", "dev"),
    )
    start: str = option(
        "zero",
        "the head that training starts from, or is drawn to: zero (or random), or one that is made "
        "from words for the classes, without any record",
        ("zero", "words"),
        **INPUTS,
    )
    label_words: tuple[str, ...] | None = option(
        None,
        "words for each class, in the order of the classes, comma-separated; several phrases of a "
        "class with | between them (default: the class names)",
        **INPUTS,
    )
    teacher: str | None = option(
        None,
        "the method of the teacher, a head on a frozen encoder (default: objpert); public: a "
        "teacher that has seen no private record",
        TEACHERS,
        **INPUTS,
    )
    teacher_model: str | None = option(None, "the teacher's encoder (default: mpnet)", **INPUTS)
    public_file: str | None = option(
        None,
        "public texts for the teacher to label, a text a line or in a column; default for films "
        "(sst2, demo): sentences of IMDB reviews from PyPI",
        **INPUTS,
    )
    max_public: int | None = option(None, "use a fixed subset of N public texts", **INPUTS)
    clipping: str = option("ghost", "how per-example gradients are clipped", CLIPPINGS)
    clip_style: str = option(
        "abadi",
        "what a row's gradient g is multiplied by: min(1, C/‖g‖), or C/(‖g‖ + 0.01)",
        CLIP_STYLES,
    )
    grad_sample_mode: str = option(
        "hooks", "how Opacus gets per-example gradients, in its own words", GRAD_SAMPLE_MODES
    )
    rank: int = option(1, "rank r of the gradient carriers")
    power_iterations: int = option(1, "power iterations K that find the carriers")
    carriers: str = option("weight", "what the carriers decompose", CARRIERS)
    sampling: str = option(
        "poisson",
        "how records get into batches: by a coin for each step (poisson), or each into exactly one "
        "batch of an epoch, chosen at random (allocation)",
        SAMPLINGS,
    )
    batch_size: int | None = option(None, "B: expected records (or persons) a step")
    micro_batches: int | None = option(None, "M: independent draws that make up a step")
    clip: float | None = option(None, "C: norm to which each record (or person) is clipped")
    learning_rate: float | None = option(None, "AdamW's peak learning rate")
    schedule: str | None = option(None, "learning rate over time", ("linear", "constant"))
    weight_decay: float | None = option(None, "AdamW's weight decay")
    epochs: float | None = option(None, "E: expected passes over the data")

    epsilon: float | None = option(None, "privacy budget; default 3 for private methods")
    delta: float | None = option(None, "default 1/(2D), the paper's; stricter: 1/D^1.1")
    label_epsilon: float | None = option(
        None, "share of epsilon spent on randomising labels; default: labels public"
    )
    accountant: str = option("pld", "which accountant the noise is calibrated by", ACCOUNTANTS)
    adjacency: str | None = option(
        None,
        "what neighbouring data sets differ in; default: the method's",
        ("zero_out", "add_remove", "replace_one"),
    )

    precision: str = option(
        "auto",
        "bf16 autocasts the encoder; auto: bf16 where one is trained on a GPU that has it, else "
        "fp32; clipping, norms and noise are in fp32",
        ("auto", "fp32", "bf16"),
        **INPUTS,
    )
    max_physical_batch: int | None = option(
        None,
        "rows in memory at once (default: 256 on a CPU; on a GPU as many tokens as its memory "
        "holds); does not change the result",
    )
    gradient_checkpointing: bool = option(
        False,
        "yes computes each layer again on the way back, in place of keeping what it gave: less "
        "memory, a third more work; does not change the result",
    )
    cache_gb: float = option(
        8.0,
        "scope top:K: disk space for what its frozen layers give, computed once; 0, or too little "
        "of it, computes it at every step; does not change the result",
    )
    records: int | None = option(None, "D; taken from the data, given only for calibrate")
    classes: int | None = option(None, "K; taken from the data, given only for calibrate")
    public_records: int | None = option(None, "public texts; taken from the data")
    teacher_representation: str | None = option(None, "chosen as representation auto is")

    def __post_init__(self) -> None:
        spec = self.spec
        for name, value in (("scope", spec.scopes[0]), ("scaling", spec.defaults.scaling)):
            if getattr(self, name) == "auto":
                object.__setattr__(self, name, value)
        if self.scope == "lora":
            self._fill("lora_rank", LORA_RANK)
            self._fill("lora_alpha", LORA_ALPHA)
            self._fill("lora_freeze_a", False)
        if "teacher" in spec.uses:
            self._fill("teacher", "objpert")
            self._fill("teacher_model", "mpnet")
        defaults = spec.defaults_for(self.scope)
        self._fill("adjacency", spec.adjacencies[0])
        for name in ("learning_rate", "clip", "schedule", "weight_decay", "ridge", "shrinkage"):
            self._fill(name, getattr(defaults, name))
        if not defaults.scales_batch:
            self._fill("batch_size", defaults.batch_size)
        if not defaults.scales_batch or self.one_release:
            self._fill("epochs", defaults.epochs)
        # A smaller B than the paper's keeps M valid: at most one expected row a micro-batch.
        self._fill("micro_batches", min(defaults.micro_batches, self.batch_size or 1))
        if self.user_column is not None:
            self._fill("max_per_user", MAX_PER_USER)
        if self.private:
            self._fill("epsilon", 3.0)
        if self.train_file and self.task == "demo":
            object.__setattr__(self, "task", "custom")
        if self.records is not None:
            if not 1 <= self.records <= MOST_RECORDS:
                raise UserError(
                    f"records is {self.records}; give a whole number from 1 to {MOST_RECORDS:,}"
                )
            self._fill("batch_size", defaults.batch_size_at(self.records))
            self._fill("epochs", defaults.epochs_at(self.records))
            if self.private:
                self._fill("delta", 1 / (2 * self.records))
        for name, wanted in TYPES.items():  # 3 and 3.0 are one plan, and must have one hash
            if float in kinds_of(wanted) and isinstance(value := getattr(self, name), int):
                object.__setattr__(self, name, float(value))
        check(self)

    def _fill(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def bind(
        self,
        *,
        records: int,
        representation: str | None = None,
        classes: int | None = None,
        public_records: int | None = None,
        teacher_representation: str | None = None,
    ) -> "Plan":
        """The same plan with D and K, and all that follows from them, filled in."""
        if self.records not in (None, records):
            raise UserError(
                f"the plan says D = {self.records} {self.unit}s, the data have {records}"
            )
        # Not in `check`: earlier versions allowed it, and their records must load.
        if self.private and self.dropout:
            raise UserError(
                f"dropout is {self.dropout:g}, but its masks depend on how a step is split for "
                f"memory and over workers, and equal noise on different sums is no privacy; use "
                f"dropout 0 with {self.spec.title}"
            )
        return dataclasses.replace(
            self,
            records=records,
            representation=representation or self.representation,
            classes=classes or self.classes,
            public_records=public_records or self.public_records,
            teacher_representation=teacher_representation or self.teacher_representation,
            # A GPU's own choice is made before (`prepare.with_precision`).
            precision="fp32" if self.precision == "auto" else self.precision,
        )

    @functools.cached_property
    def private_part(self) -> "Plan":
        """The plan of all that is done with private records: a teacher's, else this one."""
        if self.teacher is None:
            return self
        spec = all_specs()[self.teacher]
        steps = ("batch_size", "epochs", "learning_rate", "schedule", "weight_decay")
        others = (*steps, *LORA_FIELDS, *TEACHING, "clip", "ridge", "shrinkage")
        unset: dict[str, Any] = dict.fromkeys(others)
        return dataclasses.replace(
            self,
            method=spec.method,
            mode=spec.mode,
            model=str(self.teacher_model),
            representation=self.teacher_representation or "auto",
            scope="head",
            scaling="auto",
            adjacency=self.adjacency if self.adjacency in spec.adjacencies else None,
            **unset,
        )

    @functools.cached_property
    def trained_part(self) -> "Plan":
        """The plan of the training loop: a student's, without privacy on public text, else this."""
        if self.teacher is None:
            return self
        private = ("epsilon", "delta", "adjacency", "user_column", "max_per_user")
        unset: dict[str, Any] = dict.fromkeys((*private, *TEACHING, "label_words"))
        return dataclasses.replace(
            self,
            method="non_private",
            records=self.public_records,
            start="zero",
            **unset,
        )

    @property
    def spec(self) -> MethodSpec:
        """What is known of the method in this mode."""
        found = find_spec(self.method, self.mode)
        if found is None:
            if self.method not in METHODS:
                raise UserError(unknown("method", self.method, METHODS))
            if self.mode not in MODES:
                raise UserError(unknown("mode", self.mode, MODES))
            own = ", ".join(modes_of(self.method))
            raise UserError(f"{self.method} has no mode {self.mode}; use {own}")
        return found

    @property
    def one_release(self) -> bool:
        """Whether the private data are used once, for a release from which all else follows."""
        return self.spec.one_release is not None

    @property
    def unit(self) -> str:
        """Whom ε protects, and what D counts: one record, or one person with all of theirs."""
        return "record" if self.user_column is None else "person"

    @property
    def adjacencies(self) -> tuple[str, ...]:
        """Those that this method and mode can promise, the default first."""
        return self.spec.adjacencies

    @property
    def private(self) -> bool:
        return self.spec.private and reads_records(self.method, self.teacher)

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
        """The chance to be in a micro-batch; of a library's sampler, its own."""
        if self.spec.by_library:
            return self.spec.by_library.rate(self)
        return 1 / self.batches if self.allocates else self.B / (self.M * self.D)

    @property
    def allocates(self) -> bool:
        """Is each record in exactly one batch of an epoch?"""
        return self.sampling == "allocation"

    @property
    def batches(self) -> int:
        """t: batches of an epoch under random allocation, whose mean size is then D/t."""
        return max(1, round(self.D / self.B))

    @property
    def steps(self) -> int:
        """T."""
        if self.teacher is not None:
            return self.trained_part.steps
        if self.allocates:  # no rounding: a pass that is begun is charged as a whole one
            return math.floor(self._bound("epochs") * self.batches + 1e-9)
        return math.floor(self._bound("epochs") * self.D / self.B)

    @property
    def draws(self) -> int:
        """n = T M."""
        return self.draws_after(self.steps)

    def draws_after(self, steps: int) -> int:
        if self.spec.by_library:
            return self.spec.by_library.releases(self, steps)
        return steps * self.M

    def learning_rate_at(self, step: int) -> float:
        """Of step `step`, counted from 0."""
        left = 1 - step / self.steps if self.schedule == "linear" else 1.0
        return (self.learning_rate or 0.0) * left

    def epoch_ends(self) -> list[int]:
        """Step counts after which an epoch's worth of records has been drawn; the last is T."""
        if self.teacher is not None:
            return self.trained_part.epoch_ends()
        whole = [
            math.floor(e * self.batches if self.allocates else e * self.D / self.B)
            for e in range(1, math.ceil(self._bound("epochs")))
        ]
        return sorted({end for end in whole if 0 < end < self.steps} | {self.steps})

    def _bound(self, name: str) -> Any:
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"{name} is not known before the plan is bound to its data")
        return value

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIELDS}  # `asdict` copies, which takes long

    @property
    def hash(self) -> str:
        """16 hex digits; equal for equal runs on any machine."""
        facts = {
            key: value
            for key, value in self.to_dict().items()
            if key not in NOT_HASHED and not (key in UNSAID and value == UNSAID[key])
        }
        if self.precision == "auto":  # until it is bound, it is what it is on every CPU
            facts["precision"] = "fp32"
        text = json.dumps(facts, sort_keys=True, ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


FIELDS = {spec.name: spec for spec in dataclasses.fields(Plan)}
# Plans that agree on these read the same records.
DATA_FIELDS = tuple(name for name, spec in FIELDS.items() if spec.metadata["decides"] == "data")
# Plans that agree on these too start from the same tokens and the same initial model.
INPUT_FIELDS = (
    *DATA_FIELDS,
    *(name for name, spec in FIELDS.items() if spec.metadata["decides"] == "inputs"),
)
TYPES = typing.get_type_hints(Plan)


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """`int | None` → (int, NoneType); `int` → (int,)."""
    return typing.get_args(annotation) or (annotation,)
