"""Steps that another library takes, for the same loop as our own (`training/step.py`).

The loop charges, evaluates and saves as ever. Held against what the method's spec declares: that
every step was one, the rate and the noise that the library itself has counted, and how many rows
it drew in all.
"""

import math
import warnings
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor

from dpfp_ray.data import Table
from dpfp_ray.methods.parts.contestant import Contestant, Drawn, Start, installed
from dpfp_ray.models.classifier import Classifier, count_parameters
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.machine import Comm
from dpfp_ray.training.step import Taken

# Deviations of the number of rows drawn that refuse a run: by chance once in 10^11 runs.
MOST_DEVIATIONS = 7.0


class Contest:
    """The steps of a library's training, one at a time."""

    def __init__(
        self,
        plan: Plan,
        noise_multiplier: float,
        model: Classifier,
        table: Table,
        comm: Comm,
        seed: int,
    ) -> None:
        assert plan.spec.by_library is not None, "our own methods have steps of their own"
        title = plan.spec.title
        if comm.world_size > 1:
            raise UserError(f"{title} trains in one process; drop --workers")
        if plan.precision == "bf16":
            raise UserError(f"precision is {plan.precision}, but {title} trains in fp32; drop it")
        found = installed(plan.spec.by_library.library)
        if changed := found["changed_files"]:
            text = f"{found['library']} {found['version']} is not as it was published"
            warnings.warn(f"{text}: {', '.join(changed[:5])}", stacklevel=2)
        self.plan, self.model, self.noise_multiplier = plan, model, noise_multiplier
        self.records = len(table)
        self.contestant: Contestant = plan.spec.by_library.make(
            Start(plan, model, table, noise_multiplier, seed)
        )
        self.training: Iterator[Drawn] = self.contestant.train()
        self.done = self.rows = 0

    @property
    def learner(self) -> "Contest":
        """For `check_all_learn`: what has a model, and says what it makes of rows."""
        return self

    def represent(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.model.represent(inputs).float()

    @property
    def noise_coordinates(self) -> int:
        return count_parameters(self.model, trainable_only=True)

    def fits(self) -> dict[str, int]:
        return {}  # how a library splits its steps for memory is its own affair

    def keep_to(self, fits: dict[str, int]) -> None: ...

    def state(self) -> dict[str, Any]:
        state = self.contestant.state()
        return {} if state is None else {**state, "rows": self.rows, "done": self.done}

    def load_state(self, state: dict[str, Any]) -> None:
        self.contestant.resume(state)
        self.rows, self.done = state["rows"], state["done"]

    def take(self, step: int) -> Taken:
        assert step == self.done, "a library takes its steps in their order"
        drawn = next(self.training, None)
        if drawn is None:
            raise UserError(
                f"{self.plan.spec.title} ended after {step} of {self.plan.steps} steps, which its "
                f"ε counts; nothing can be said of such a run"
            )
        self.done, self.rows = self.done + 1, self.rows + drawn.rows
        self.check_ledger()
        device = next(self.model.parameters()).device
        loss = torch.zeros((), dtype=torch.float64, device=device)
        if drawn.loss is not None:
            loss += drawn.loss
        return Taken(loss, drawn.rows, drawn.rows)

    def check_ledger(self) -> None:
        """What the library has counted must be the mechanism that ε was computed for."""
        counted = self.contestant.ledger()
        declared = [(self.noise_multiplier, self.plan.p, self.done)]
        if counted and not same_steps(counted, declared):
            raise UserError(
                f"{self.plan.spec.title} counts (σ/C, rate, steps) {counted}, but the ε of this "
                f"plan was computed for {declared}; nothing can be said of such a run"
            )

    def check_draws(self) -> None:
        """Poisson samples give Binomial(D n, p) rows in all.

        Where a record may be drawn only in every b-th step, n is a step's share of b, rounded up.
        """
        releases, p = self.plan.draws_after(self.done), self.plan.p
        trials = self.records * releases
        deviation = math.sqrt(trials * p * (1 - p)) + 0.5
        if releases != self.done:
            deviation += self.records * p
        if abs(self.rows - trials * p) > MOST_DEVIATIONS * deviation:
            raise UserError(
                f"{self.plan.spec.title} drew {self.rows:,} rows in {self.done:,} steps, where its "
                f"declared rate {p:.4g} gives about {trials * p:,.0f}; its ε does not hold"
            )

    def check_weights(self) -> None:
        """Our methods leave out a record without a finite gradient; a library may not."""
        if not all(weight.isfinite().all() for weight in self.model.parameters()):
            raise UserError(
                f"{self.plan.spec.title} ended with undefined weights: some record has no finite "
                f"gradient, and the weights show that it is there; keep them to yourself"
            )

    def claim(self) -> dict[str, Any]:
        """What is claimed of the run, and by whom: for its record."""
        by = self.plan.spec.by_library
        assert by is not None, "checked at the start"
        self.check_draws()
        self.check_weights()
        return {
            **installed(by.library),
            "says": by.claim,
            "sampling_rate": self.plan.p,
            "noise_multiplier": self.noise_multiplier,
            "releases": self.plan.draws_after(self.done),
            "epsilon": self.contestant.epsilons(),
            "settings": self.contestant.facts(),
            "notes": self.contestant.notes(),
        }

    def close(self) -> None:
        """Let the library take its hooks off the model."""
        if isinstance(self.training, Generator):
            self.training.close()


def same_steps(
    counted: list[tuple[float, float, int]], declared: list[tuple[float, float, int]]
) -> bool:
    return len(counted) == len(declared) and all(
        math.isclose(a, b, rel_tol=1e-9)
        for pair in zip(counted, declared, strict=True)
        for a, b in zip(*pair, strict=True)
    )
