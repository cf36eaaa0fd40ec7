"""A contestant: another library that trains the same model on the same rows at the same budget.

Its sampler, its gradients and its noise are its own. What it is given, what it gives back, and what
a reader of the result must know of it are here; `docs/new_contestant.md` adds one on one page.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from dpfp_ray.privacy.sampling import keyed_integer
from dpfp_ray.system.errors import UserError

if TYPE_CHECKING:
    from dpfp_ray.data import Table
    from dpfp_ray.models.classifier import Classifier
    from dpfp_ray.plan.plan import Plan


@dataclass(frozen=True)
class Start:
    """What a contestant is given.

    It trains `model` in place on the rows of `table`, which are private, for `plan.steps` steps.
    Noise of deviation `noise_multiplier` × C meets the budget, if records are drawn as the method's
    spec says. `seed` is secret; all that is random must follow from it.
    """

    plan: Plan
    model: Classifier
    table: Table
    noise_multiplier: float
    seed: int

    def random_seed(self, purpose: str) -> int:
        """63 bits for a generator of the library's: another one for each purpose."""
        return keyed_integer(self.seed, purpose)


@dataclass(frozen=True)
class Drawn:
    """One step is done: so many rows were in it, with this sum of losses (None if unknown)."""

    rows: int
    loss: Any = None


class Contestant(ABC):
    """Subclasses write `train`; one whose `state` is not None can be resumed."""

    def __init__(self, start: Start) -> None:
        self.start, self.plan, self.model = start, start.plan, start.model
        self.table = start.table

    @abstractmethod
    def train(self) -> Iterator[Drawn]:
        """Train, and yield after each step, with the step's weights in `model`.

        The generator is closed after the last step of the plan: what must be undone stands in a
        `finally`.
        """

    def state(self) -> dict[str, Any] | None:
        """What continues the training, besides the weights; None: it cannot be continued."""
        return None

    def resume(self, state: dict[str, Any]) -> None:
        """Called before `train`, with what `state` gave and the weights of then."""
        raise UserError(
            f"{self.plan.spec.title} cannot continue an unfinished run: its library keeps no state "
            f"of it; --overwrite starts again (the ledger keeps what was spent)"
        )

    def ledger(self) -> list[tuple[float, float, int]]:
        """(σ/C, rate, steps) as the library's own accountant counted them; empty: it has none."""
        return []

    def epsilons(self) -> dict[str, float]:
        """ε of all steps so far by the library's own accountants."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Settings and counts of the library's that a reader needs to do the same again."""
        return {}

    def notes(self) -> list[str]:
        """Known faults of the library that concern this run, and what was done about them."""
        return []


@functools.cache
def installed(library: str) -> dict[str, Any]:
    """The library's version, and those of its files that are not as they were published."""
    found = metadata.distribution(library)
    changed = []
    for file in found.files or ():
        if file.hash is None or file.hash.mode != "sha256" or file.suffix != ".py":
            continue
        path = file.locate()
        content = path.read_bytes() if path.exists() else b""  # type: ignore[attr-defined]
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        if digest != file.hash.value:
            changed.append(str(file))
    return {"library": library, "version": found.version, "changed_files": sorted(changed)}
