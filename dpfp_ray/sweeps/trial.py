"""A trial as data, and all that a store keeps of it.

STORE/records/ID.json   the trial's record: its `status` is the only truth about how far it is
STORE/states/ID.pt      weights and optimizer of a running trial; deleted with its final record
STORE/states/ID.step    how many steps that state has done
STORE/states/ID.drawn   the trial has drawn its first batch; deleted with its final record
STORE/sweep.secret      the seed that all trials' noise follows from; owner-only; deleted at the end
                        (for a seed that the user gave: only a mark of it)
STORE/search-KEY.json   what a searcher has proposed, in order; it stays

Every file is whole or absent whenever a machine dies, and ends with a checksum. The sweep keeps
these files itself, because Tune's experiment state is older than the trials that it describes.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dpfp_ray.plan.plan import INPUT_FIELDS, Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy.sampling import derived_seed, fresh_seed, keyed_integer
from dpfp_ray.results.store import Store, file_name
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import open_files
from dpfp_ray.system.whole_files import PRIVATE, is_copy, to_json, with_checksum, without_checksum
from dpfp_ray.training import run_folder
from dpfp_ray.training.loop import State
from dpfp_ray.training.prepare import (
    Inputs,
    TaskFacts,
    choose_representation,
    load_inputs,
    prepare,
    with_precision,
)
from dpfp_ray.training.record import Record, make_record

SETTLED = ("finished", "stopped", "refused", "failed")  # trials that need not be run again
# How often a trial is restarted when its process or node dies, without a newer saved state between;
# its own errors are not retried.
RETRIES = 5
SECRET = "sweep.secret"
UNFINISHED = ("states", "tune", "train")  # folders; the last two are Ray's own
Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Trial:
    """A bound, calibrated plan and the number of its repetition (`seed_index`).

    `name` is for draws of a selection: equal draws differ in nothing else. `entry` is the ledger's
    entry, once the trial is charged for.
    """

    plan: Plan
    noise_multiplier: float
    seed_index: int = 0
    group: str = ""
    name: str = ""
    entry: str = ""

    @property
    def id(self) -> str:
        """The same for the same trial of the same sweep, whenever and wherever it runs."""
        prefix = f"{self.group}-" if self.group else ""
        return self.name or f"{prefix}{self.plan.hash}-{self.seed_index}"

    def seed(self, sweep_seed: int) -> int:
        """Secret like the sweep's; independent of the order in which trials happen to run.

        Trials on one release share a seed, so that it is the same release and is paid once; its
        key (`release_id`) keeps other releases apart. Trials with a name are always independent.
        """
        if self.plan.private_part.one_release and not self.name:
            return derived_seed(sweep_seed, f"release {self.seed_index}")
        return derived_seed(sweep_seed, f"trial {self.id}")

    def to_config(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "plan": self.plan.to_dict()}

    @staticmethod
    def from_config(config: dict[str, Any]) -> "Trial":
        values = dict(config["plan"])
        for name in ("labels", "label_words", "lora_targets"):  # JSON and YAML know no tuples
            values[name] = None if values[name] is None else tuple(values[name])
        return Trial(**{**config, "plan": Plan(**values)})


def bind_trial(
    values: dict[str, Any],
    inputs_of: Callable[[Plan], Inputs],
    seed_index: int = 0,
    group: str = "",
) -> Trial:
    """A trial that meets its budget, or a UserError that says why it cannot."""
    plan = with_precision(make_plan(values))
    prepared = prepare(plan, inputs_of(plan))
    return Trial(prepared.plan, prepared.noise_multiplier, seed_index, group)


def input_key(plan: Plan) -> tuple[object, ...]:
    """Trials with the same key share their data and initial weights."""
    return (plan.spec.reads_records, *(getattr(plan, name) for name in INPUT_FIELDS))


class InputsOnce:
    """Loads each distinct task and model once, for binding plans on the driver."""

    def __init__(self, load: Callable[[Plan], Inputs] = load_inputs) -> None:
        self._load = load
        self._inputs: dict[tuple[object, ...], Inputs] = {}
        self._facts: dict[tuple[object, ...], TaskFacts] = {}

    def __call__(self, plan: Plan) -> Inputs:
        plan = with_precision(plan)
        asked = input_key(plan)
        if asked in self._inputs and plan.representation != "auto":
            return self._inputs[asked]  # checked when it was loaded; a thousand trials ask for it
        if asked in self._facts:  # "auto" may be another representation for another budget
            chosen = choose_representation(plan, self._facts[asked])
            plan = replace(plan, representation=chosen)
        key = input_key(plan)
        if key not in self._inputs:
            loaded = self._load(plan)
            paired, classes = loaded.paired, len(loaded.label_names)
            self._facts[asked] = TaskFacts(loaded.units, classes, paired)
            key = input_key(replace(plan, representation=loaded.representation))
            self._inputs.setdefault(key, loaded)
        return self._inputs[key]


class SweepState:
    """The files of one unfinished sweep, in a folder or behind a URI."""

    def __init__(self, storage: str) -> None:
        self.files = open_files(storage)

    def save_trial(self, identity: str, state: State, seed: int) -> None:
        run_folder.save_trial(self.files, _state_name(identity), state, seed)
        self.files.write(
            _state_name(identity, "step"), str(state["progress"]["step"]).encode(), PRIVATE
        )

    def load_trial(self, identity: str, seed: int, plan: Plan) -> State | None:
        return run_folder.load_trial(self.files, _state_name(identity), seed, plan)

    def drop_trial(self, identity: str) -> None:
        for kind in ("pt", "step", "drawn"):
            self.files.delete(_state_name(identity, kind))

    def saved_step(self, identity: str) -> int:
        """How far the trial's saved state is, without reading it; 0 if there is none."""
        with suppress(FileNotFoundError, ValueError):
            return int(self.files.read_name(_state_name(identity, "step")))
        return 0

    def mark_drawn(self, identity: str) -> None:
        self.files.write(_state_name(identity, "drawn"), b"drawn")

    def has_drawn(self, identity: str) -> bool:
        """Whether any process of the trial may have drawn a batch."""
        with suppress(FileNotFoundError):
            self.files.read_name(_state_name(identity, "drawn"))
            return True
        return False

    def load_search(self, key: str) -> list[dict[str, Any]]:
        return self._read(f"search-{key}.json", json.loads) or []

    def save_search(self, key: str, proposals: list[dict[str, Any]]) -> None:
        self.files.write(f"search-{key}.json", with_checksum(to_json(proposals).encode()))

    def seed(self, given: int | None) -> int:
        """The sweep's secret seed: given, or made once and kept until `forget`.

        For a given seed the file has only a mark, which tells another seed: trials that have begun
        must not continue with other noise. In an object store, everyone who may read the unfinished
        sweep may read its seed.
        """
        text = self._read(SECRET, _secret_text)
        if text is None:
            seed = fresh_seed() if given is None else given
            content = with_checksum((str(seed) if given is None else _mark(seed)).encode())
            if self.files.create(SECRET, content, PRIVATE):
                return seed
            return self.seed(given)  # another driver was faster
        if given is None and text.isdigit():
            return int(text)
        if given is not None and text in (str(given), _mark(given)):
            return given
        asked = "was begun with a --seed" if given is None else "has another seed"
        fix = "drop --seed" if text.isdigit() else "give the --seed that it began with"
        raise UserError(
            f"{self.files.name} holds an unfinished sweep that {asked}; {fix} to continue it, "
            f"or use another --storage"
        )

    def _read(self, name: str, parse: Callable[[bytes], Parsed]) -> Parsed | None:
        """What a file says; None if there is no such file."""
        try:
            return parse(without_checksum(self.files.read_name(name)))
        except FileNotFoundError:
            return None
        except ValueError:  # JSON's and Unicode's errors, too
            raise UserError(
                f"{self.files.name}/{name} is damaged; restore it from a backup, or use another "
                f"--storage (the ledger keeps what was spent)"
            ) from None

    def forget(self) -> None:
        """The sweep is finished: delete its seed and all that was needed only to continue."""
        for name in self.files.names():
            if is_copy(name, SECRET):
                self.files.delete(name)
        for name in UNFINISHED:
            self.files.delete_folder(name)


def _secret_text(content: bytes) -> str:
    text = content.decode()
    int(text.removeprefix("mark "))  # raises a ValueError if it is damaged
    return text


def _mark(seed: int) -> str:
    return f"mark {keyed_integer(seed, 'sweep mark')}"


def _state_name(identity: str, kind: str = "pt") -> str:
    return f"states/{file_name(identity)}.{kind}"


def resolve_storage(storage: str) -> str:
    """Absolute path or URI: Ray would fail on a relative path, and only when it is too late."""
    return storage if "://" in storage else str(Path(storage).expanduser().resolve())


def settled_record(store: Store, identity: str) -> Record | None:
    """The trial's last record, once it has one."""
    record = store.get(identity)
    return record if record and record["trial"].get("status") in SETTLED else None


def settle(
    storage: str, trial: Trial, status: str, reason: str, facts: dict[str, Any] | None = None
) -> Record:
    """Give a trial that has no result its last record, unless it has one by now.

    The epochs that it did before, and what they spent, stay on record. A trial that failed before
    any process of it drew a batch has spent no step; else, without a count in `facts`, it is
    charged for all that was planned.
    """
    store, states = Store(storage), SweepState(storage)
    if (settled := settled_record(store, trial.id)) is not None:
        return settled
    record = store.get(trial.id)
    drawn = status != "failed" or record is not None or states.has_drawn(trial.id)
    facts = {**({} if drawn else {"steps_drawn": 0}), **(facts or {})}
    if record is None:
        start = {"id": trial.id, "seed_index": trial.seed_index, "group": trial.group}
        entry = {"ledger_entry": trial.entry} if trial.entry else {}
        record = make_record(
            plan=trial.plan.to_dict(), plan_hash=trial.plan.hash, trial={**start, **entry}
        )
    last: Any = {**record["trial"], **facts, "status": status, "error": reason}
    record["trial"] = last
    store.put(record)
    states.drop_trial(trial.id)
    return record


def unfinished(trials: list[Trial], storage: str) -> list[Trial]:
    """Those of `trials` that have no final record yet."""
    facts = [record["trial"] for record in Store(storage).records()]
    settled = {trial["id"] for trial in facts if trial.get("status") in SETTLED}
    return [trial for trial in trials if trial.id not in settled]


def mark_interrupted(storage: str) -> None:
    """Nothing runs any more: trials that ran are "interrupted" until the same command continues."""
    store = Store(storage)
    for record in store.records():
        if record["trial"].get("status") == "running":
            record["trial"]["status"] = "interrupted"
            store.put(record)


def has_restarts_left(trial: Any) -> bool:
    """Whether Tune ended a trial before its restarts were used; the driver then runs it again.

    Tune does so if the process dies while the trial before hands it over.
    """
    return bool(trial.num_failures <= trial.max_failures)


def last_error(trial: Any) -> str:
    """What ended the process of one of Tune's trials, on one line."""
    text = str(trial.get_error() or "").strip()
    if not text or "actor died" in text:
        return "its process died (killed, or out of memory)"
    return text.splitlines()[-1][-300:]


def error_reason(error: Exception) -> str:
    """An error on one line, with its type unless it is meant for users."""
    if "Traceback" in str(error):
        return cause_of(error)
    text, kind = " ".join(str(error).split())[:500], type(error).__name__
    if isinstance(error, UserError):
        return text
    return f"{kind}: {text}" if text else kind


COLOURS = re.compile(r"\x1b\[[0-9;]*m")
RAISED = re.compile(r"(?!nccl)(\w+\.)*\w*(Error|Exception|Timeout)\b")


def cause_of(error: BaseException) -> str:
    """What was raised first, in a line, of an error that has tracebacks as its text.

    Ray wraps what a worker raised in tracebacks with colour codes, the worker's own last; NCCL says
    its reason in the lines below.
    """
    lines = [line.strip() for line in COLOURS.sub("", str(error)).splitlines()]
    starts = [number for number, line in enumerate(lines) if RAISED.match(line)]
    start = starts[-1] if starts else len(lines) - 1
    ends = (number for number in range(start + 1, len(lines)) if not lines[number])
    said = " ".join(lines[start : next(ends, len(lines))])[:500] or type(error).__name__
    return said.removeprefix(f"{UserError.__module__}.{UserError.__name__}: ")
