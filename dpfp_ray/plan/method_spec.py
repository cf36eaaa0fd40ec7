"""What there is to know of a method before it runs, and where methods are found.

A method is one file of `dpfp_ray/methods/` with a `SPEC`. Everything else (plans and their checks,
statements, audits, comparisons, reports, help texts) reads the spec and names no method, so adding
a file adds a method: `docs/new_method.md` shows one.

Hyperparameters that a method starts from: those of its own paper, so that no baseline is weak.

A plan takes these wherever the user gives no value. Settings that were tuned at one data set's size
are scaled to other sizes the way their authors scaled them.
"""

import functools
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpfp_ray.system.errors import UserError

if TYPE_CHECKING:
    from dpfp_ray.plan.plan import Plan

SST2_RECORDS = 67_349
# A batch that follows D stays this large on small sets, or takes all of them: at SST-2's sampling
# rate, B of 64 records would be one record, which no noise that protects it leaves readable.
LEAST_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Hyperparameters of one method, as found good on SST-2 (D = 67,349)."""

    batch_size: int
    learning_rate: float
    epochs: float
    micro_batches: int = 1
    clip: float = 1.0
    schedule: str = "linear"
    weight_decay: float = 0.0
    scaling: str = "clip"
    ridge: float | None = None
    shrinkage: float | None = None
    scales_batch: bool = False
    scales_epochs: bool = False

    def batch_size_at(self, records: int) -> int:
        """B for D = `records`: fixed, or at the same sampling rate B / D as on SST-2."""
        scaled = max(LEAST_BATCH, round(self.batch_size * records / SST2_RECORDS))
        return max(1, min(records, scaled if self.scales_batch else self.batch_size))

    def epochs_at(self, records: int) -> float:
        """E for D = `records`: fixed, or more passes over larger sets and no fewer over smaller."""
        factor = max(1, round(records / SST2_RECORDS)) if self.scales_epochs else 1
        return self.epochs * factor


def closed_form(*, ridge: float | None, shrinkage: float | None) -> Defaults:
    """For one release of all records (B = D, E = 1) and a head that is solved for.

    Nothing is trained in steps, so learning rate, schedule and weight decay have no effect. Every
    plan holds them, however, and they are part of its hash: they stay what they always were.
    """
    return Defaults(
        batch_size=SST2_RECORDS,
        scales_batch=True,
        epochs=1,
        learning_rate=1e-3,
        weight_decay=0.01,
        scaling="unit",
        ridge=ridge,
        shrinkage=shrinkage,
    )


METHODS_ROOM = "dpfp_ray.methods"
DEFAULT_METHOD = "dpfp"  # of a plan that names none: what this project is about
FIRST_MODE = "paper"  # the mode of a plan that names none, and of methods that have only one
GUARANTEES = ("none", "nominal", "claimed", "proved")
# What stands behind an ε that is no proved guarantee.
MARKS = {"nominal": "†", "claimed": "§"}
# What training may change: all weights, or the head with nothing, little or the last K layers of
# the encoder (`models/scopes.py`).
SCOPES = ("all", "head", "bias", "lora", "top:K")
LORA_FIELDS = ("lora_rank", "lora_alpha", "lora_targets", "lora_freeze_a")
# Of a student: who teaches it, on which public text. The last two follow from the data.
TEACHING = (
    "teacher",
    "teacher_model",
    "public_file",
    "max_public",
    "teacher_representation",
    "public_records",
)
# Plan fields that some methods have no use for, with the value they hold where nobody uses them.
# A spec's `uses` names those that it uses; giving another method one of them is an error.
USED_BY_SOME: dict[str, Any] = {
    "micro_batches": 1,
    "scaling": "clip",
    "ridge": None,
    "shrinkage": None,
    "prior": "none",
    "start": "zero",
    "label_words": None,
    "label_epsilon": None,
    "gradient_checkpointing": False,
    "clip_style": "abadi",
    "sampling": "poisson",
    "grad_sample_mode": "hooks",
    **dict.fromkeys(TEACHING),
}
# Without a meaning where all is released at once, or where nothing is promised.
STEP_FIELDS = ("batch_size", "epochs", "learning_rate", "schedule", "weight_decay")
BUDGET_FIELDS = ("epsilon", "delta", "accountant", "adjacency")


@dataclass(frozen=True, kw_only=True)
class Nominal:
    """Why the ε of a method is no guarantee, and what is left: said for one scope."""

    reasons: tuple[str, ...]
    proved: str = ""  # the theorem that gives an ε if draws are known; empty: there is none
    not_proved: str = ""  # why there is none
    not_protected: tuple[str, ...] = ()


@dataclass(frozen=True)
class OneRelease:
    """Functions of a method that reads its private records once.

    `release(plan, noise_multiplier, table, classes, seed)` gives noisy class statistics,
    `coordinates(width, classes)` how many numbers of it get noise, and `score(seen)` how much the
    release looks as if each canary of an audit had been in; its name stands in the audit's record.
    `head(released)` is given where what is released is no class statistics but says the head.
    """

    release: Callable[..., Any]
    coordinates: Callable[[int, int], int]
    score: Callable[..., Any]
    head: Callable[..., Any] | None = None


def one_a_step(plan: "Plan", steps: int) -> int:
    return steps


@dataclass(frozen=True, kw_only=True)
class ByLibrary:
    """Of a method whose sampler, gradients and noise are another library's.

    `make(start)` gives a `methods/parts/contestant.py: Contestant`. The mechanism that the library
    is claimed to run is n Gaussian releases on Poisson samples, each of `rate(plan)`: after t steps
    n is `releases(plan, t)`. `claim` says in a line what the library must do for that to hold.
    """

    library: str  # its name on PyPI
    make: Callable[..., Any]
    rate: Callable[["Plan"], float]
    claim: str
    releases: Callable[["Plan", int], int] = one_a_step


@dataclass(frozen=True)
class OwnProfile:
    """Of a method that releases something else than Gaussian sums, and so has a theorem of its own.

    `calibrate(epsilon, delta, classes)` gives a `privacy.accounting.Profile` that meets the budget
    (with `persons=True` for a unit of several rows, if the method bounds persons),
    `rests_on` says in a line what its ε rests on: what takes the place of the accountant `pld`.
    """

    calibrate: Callable[..., Any]
    rests_on: str


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """One method, or one mode of a method that has several."""

    method: str
    label: str  # in tables and figures
    guarantee: str
    adjacencies: tuple[str, ...]  # those that it can promise, the default first
    defaults: Defaults
    # How it works: a class that trains in steps, the functions of one release, or other code.
    steps: Callable[..., Any] | None = None
    one_release: OneRelease | None = None
    by_library: ByLibrary | None = None
    own_profile: OwnProfile | None = None  # None: n Gaussian releases on Poisson samples

    mode: str = FIRST_MODE
    order: int = 100  # place in lists and figures; equal ones by name
    compared: bool = True  # by a comparison that names no methods?
    scopes: tuple[str, ...] = ("all", "head")  # of `SCOPES`, the default first
    uses: tuple[str, ...] = ()  # plan fields that are not everyone's
    reads_records: bool = True  # private ones; `public` is made without any
    bounds_persons: bool = False  # are all rows of a person bounded as one (`user_column`)?
    # By scope: what differs from `defaults`.
    scope_changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    # `noise_to_signal(plan, noise_multiplier, width, classes)` of rows of that width, by formulas
    # alone: up to 1 `representation: auto` takes the means of all layers. None: never.
    noise_to_signal: Callable[["Plan", float, int, int], float] | None = None

    # The privacy statement
    released: str = "the trained weights, and those after every step"
    trust: str = "central: whoever holds the data and runs this is trusted"
    draws_hidden: bool = True  # can nobody see from a release who was drawn?
    labels_protected: bool = True
    noise_generator: str = "Philox"  # numpy's, `privacy/sampling.py`
    nominal: Mapping[str, Nominal] = field(default_factory=dict)  # by scope

    # White-box audits: the score (`auditing/scores.py`) for canaries that have a row of the word
    # embeddings to themselves. None: such rows are not trained, or nothing is known to be better
    # than how far all weights moved along a canary's gradient.
    token_score: str | None = None

    def __post_init__(self) -> None:
        if self.guarantee not in GUARANTEES:
            raise ValueError(f"guarantee {self.guarantee!r} is none of {', '.join(GUARANTEES)}")
        if [self.steps, self.one_release, self.by_library].count(None) != 2:
            raise ValueError(f"{self.method} needs one of steps, one_release and by_library")
        if (self.guarantee == "claimed") != (self.by_library is not None):
            raise ValueError(
                f"{self.method}: an ε is claimed where a library trains, and only there"
            )
        if (self.guarantee == "nominal") != bool(self.nominal):
            raise ValueError(f"{self.method} must say in `nominal` why its ε is nominal, if it is")
        if self.nominal and set(self.nominal) != set(self.scopes):
            raise ValueError(f"{self.method} must say in `nominal` why, for each of its scopes")

    @property
    def private(self) -> bool:
        """Does it spend a budget?"""
        return self.guarantee != "none" and self.reads_records

    @property
    def title(self) -> str:
        """The method's name; with the mode, where there are several."""
        return f"{self.method} {self.mode}" if len(modes_of(self.method)) > 1 else self.method

    @property
    def unused(self) -> tuple[str, ...]:
        """Plan fields that mean nothing to it."""
        missing = [name for name in USED_BY_SOME if name not in self.uses]
        if len(modes_of(self.method)) == 1:
            missing.append("mode")
        if self.one_release:
            missing += STEP_FIELDS
        if not self.private:
            missing += BUDGET_FIELDS
        return tuple(missing)

    def defaults_for(self, scope: str) -> Defaults:
        """What a plan takes where the user gives no value."""
        return replace(self.defaults, **self.scope_changes.get(scope_kind(scope), {}))

    def nominal_for(self, scope: str) -> Nominal | None:
        return self.nominal.get(scope_kind(scope))


def scope_kind(scope: str | None) -> str:
    """Its name in `SCOPES`: `top:2` is one of `top:K`; what is in none of them stays as it is."""
    return "top:K" if re.fullmatch(r"top:[1-9]\d{0,3}", str(scope)) else str(scope)


# The registry. Imports point from methods to plan; this lookup by name is the one deliberate way
# back, and it happens when a plan is made, never while modules are being imported.


def all_specs() -> Mapping[str, MethodSpec]:
    """Every spec under the name of its file, in the order of lists."""
    return _specs_in(tuple(import_module(METHODS_ROOM).__path__))


@functools.cache
def _specs_in(folders: tuple[str, ...]) -> Mapping[str, MethodSpec]:
    found: dict[str, MethodSpec] = {}
    for module in pkgutil.iter_modules(folders):
        if not module.ispkg:  # `parts`, which methods share
            loaded = import_module(f"{METHODS_ROOM}.{module.name}")
            if not isinstance(spec := getattr(loaded, "SPEC", None), MethodSpec):
                raise UserError(f"{loaded.__file__} has no SPEC; see docs/new_method.md")
            found[module.name] = spec
    return dict(sorted(found.items(), key=lambda item: (item[1].order, item[0])))


def find_spec(method: str | None, mode: str | None = None) -> MethodSpec | None:
    """The spec of a method's mode, if there is one; records may come from where there was."""
    for spec in all_specs().values():
        if (spec.method, spec.mode) == (method, mode or FIRST_MODE):
            return spec
    return None


def spec_file(method: str, mode: str | None = None) -> str:
    """The name of the file that has the spec; its search space is called the same."""
    found = find_spec(method, mode)
    return next((name for name, spec in all_specs().items() if spec is found), method)


def modes_of(method: str | None) -> tuple[str, ...]:
    return tuple(spec.mode for spec in all_specs().values() if spec.method == method)


def scopes_of(method: str | None) -> tuple[str, ...]:
    """What its first mode can train, the default first."""
    spec = find_spec(method)
    return spec.scopes if spec else ()


def reads_records(method: str | None, teacher: str | None = None) -> bool:
    """Are private records read: by the method, or by the teacher of a student?"""
    spec = all_specs().get(teacher) if teacher else find_spec(method)
    return spec is None or spec.reads_records


def is_private(method: str | None, teacher: str | None = None) -> bool:
    """Does the method of a record spend a budget? One that is not known here is taken to."""
    spec = find_spec(method)
    return spec is None or (spec.private and reads_records(method, teacher))


def users_of(field_name: str) -> dict[str, MethodSpec]:
    """Those that use a plan field which is not everyone's, by the names of their files."""
    return {name: spec for name, spec in all_specs().items() if field_name in spec.uses}


def uses(method: str | None, field_name: str) -> bool:
    return any(spec.method == method for spec in users_of(field_name).values())


def labels() -> dict[str, str]:
    """Methods' names for people."""
    return {s.method: s.label for s in all_specs().values() if s.mode == FIRST_MODE}


class Names(Sequence[str]):
    """A tuple of names that is looked up when it is read: at import, specs cannot be read yet."""

    def __init__(self, look_up: Callable[[], Iterator[str]]) -> None:
        self.look_up = look_up

    @property
    def now(self) -> list[str]:
        return list(dict.fromkeys(self.look_up()))

    def __len__(self) -> int:
        return len(self.now)

    def __getitem__(self, index: Any) -> Any:
        return self.now[index]

    def __repr__(self) -> str:
        return repr(self.now)


# Their neighbours are a student's, or they read no record.
TEACHERS = Names(
    lambda: (
        name
        for name, spec in all_specs().items()
        if spec.one_release and (not spec.reads_records or "add_remove" in spec.adjacencies)
    )
)
METHODS = Names(lambda: (spec.method for spec in all_specs().values()))
MODES = Names(lambda: (spec.mode for spec in all_specs().values()))
