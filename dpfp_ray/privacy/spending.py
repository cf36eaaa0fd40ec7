"""What a run has spent so far: a pure function of its plan, its noise and the steps it has done.

There is no running total that a crash could lose or a resume could reset.
"""

from dataclasses import dataclass

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting

MILESTONES = 10


@dataclass(frozen=True)
class Spending:
    plan: Plan
    noise_multiplier: float

    def spent(self, steps: int) -> dict[str, float | None]:
        """ε after `steps` steps by every accountant; empty for a method without a budget."""
        if not self.plan.private:
            return {}
        done = accounting.mechanism(self.plan, self.noise_multiplier, steps)
        return accounting.epsilons(done, self._delta)

    def at_most(self, steps: int) -> float | None:
        """The plan's own accountant at the next tenth of the run: cheap enough to show live."""
        if not self.plan.private or steps == 0:
            return 0.0 if self.plan.private else None
        # Milestone i of 10 is step ⌈i T / 10⌉; the first one that is not before `steps`.
        number = (steps - 1) * MILESTONES // self.plan.steps + 1
        milestone = -(-number * self.plan.steps // MILESTONES)
        done = accounting.mechanism(self.plan, self.noise_multiplier, milestone)
        return accounting.epsilon(done, self._delta, self.plan.accountant)

    @property
    def _delta(self) -> float:
        assert self.plan.delta is not None, "a bound private plan has a delta"
        return self.plan.delta
