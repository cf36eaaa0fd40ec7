"""The noise that a privacy budget asks for, and what it costs under every accountant."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.method_spec import METHODS, is_private
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.calibration import noise_multiplier


@dataclass(frozen=True)
class Calibration:
    """σ = `noise_multiplier` C, and the ε that each accountant says it spends at `delta`.

    An accountant without a bound for this mechanism has None. `noise_power_ratio` is σ² relative to
    M = 1, and `noise_power_ratio_claimed` the paper's 1/M; both are None where M = 1.
    """

    plan: Plan
    sigma: float
    noise_multiplier: float
    p: float
    steps: int
    draws: int
    delta: float
    epsilon: dict[str, float | None]
    accountant: str
    adjacency: str
    noise_power_ratio: float | None = None
    noise_power_ratio_claimed: float | None = None
    own: Mapping[str, float] = field(default_factory=dict)  # constants that only this method has

    def to_dict(self) -> dict[str, Any]:
        """What `dpfp calibrate --json` prints."""
        facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del facts["plan"]
        facts |= facts.pop("own")
        return {k: v for k, v in facts.items() if k[:11] != "noise_power" or v is not None}


def calibrate(plan: Plan, records: int | None = None) -> Calibration:
    """Solve the noise for `plan` on a training set of `records` rows; no data are needed.

    >>> plan = Plan(method="dpfp", epsilon=1.73, accountant="gdp")
    >>> round(calibrate(plan, records=67_349).sigma, 3)
    0.346
    """
    if not plan.private:
        private = ", ".join(name for name in METHODS if is_private(name))
        raise UserError(f"{plan.method} adds no noise; use --method {private}")
    if records is not None:
        plan = plan.bind(records=records)
    if plan.records is None:
        raise UserError("the noise depends on D; give records, the rows of the training set")
    multiplier = noise_multiplier(plan)
    assert plan.delta is not None
    assert plan.adjacency is not None
    own = accounting.own_profile(plan) if plan.spec.own_profile else None
    single = noise_multiplier(dataclasses.replace(plan, micro_batches=1)) if plan.M > 1 else None
    return Calibration(
        plan=plan,
        sigma=multiplier * plan.C,
        noise_multiplier=multiplier,
        p=plan.p,
        steps=plan.steps,
        draws=plan.draws,
        delta=plan.delta,
        epsilon=accounting.epsilons(accounting.mechanism(plan, multiplier), plan.delta),
        accountant=plan.accountant,
        adjacency=plan.adjacency,
        noise_power_ratio=None if single is None else (multiplier / single) ** 2,
        noise_power_ratio_claimed=None if single is None else 1 / plan.M,
        own={"lambda": own.ridge, "sigma_out": own.output_sigma, "tau": own.tau} if own else {},
    )
