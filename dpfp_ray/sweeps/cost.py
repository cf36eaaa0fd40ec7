"""What it costs to release only the best of a random number of trials (`selection.py`).

What everything costs that was done to a set of records is the ledger's to say (`charges.py`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import dp_accounting

from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting, selection
from dpfp_ray.privacy.sampling import fresh_seed, keyed_generator
from dpfp_ray.privacy.selection import Selection
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.search_space import SearchSpace

# Fields that change what a trial costs; they must take finitely many values to be charged for.
COST_FIELDS = ("batch_size", "micro_batches", "rows_per_micro_batch", "epochs", "epsilon", "delta")


@dataclass(frozen=True)
class Cost:
    """ε, at `delta`, of releasing the best trial."""

    task: str
    adjacency: str
    trials: int
    epsilon: float
    delta: float
    accountant: str
    how: str
    nominal: bool

    def sentence(self) -> str:
        mark = "†" if self.nominal else ""
        return (
            f"all {self.trials} private trials on {self.task} ({self.adjacency}): "
            f"ε = {self.epsilon:.3g}{mark} ({self.accountant}, {self.how}), δ = {self.delta:.3g}"
        )


def chosen_cost(space: SearchSpace, chosen: Selection, bind: Any) -> Cost:
    """ε of releasing only the best of a random number of random trials.

    The theorem wants every mechanism that the space can draw, not only those that it drew.
    """
    trials = [bind(one) for one in privacy_choices(space)]
    plan = trials[0].plan
    if any(trial.plan.label_epsilon for trial in trials):
        raise UserError("--selection cannot charge for label_epsilon; use composition, or drop it")
    events = [
        accounting.dp_event(accounting.mechanism(trial.plan, trial.noise_multiplier))
        for trial in trials
    ]
    assert plan.delta is not None
    with accounting.unconverged_orders_left_out():
        found = selection.selection_epsilon(events, chosen, plan.delta, relation=_relation(plan))
    nominal = plan.spec.guarantee == "nominal"
    how = f"best of a random number of trials, {chosen}"
    expected, adjacency = round(chosen.expected or 0), str(plan.adjacency)
    epsilon, accountant = found.epsilon, found.accountant
    return Cost(plan.task, adjacency, expected, epsilon, plan.delta, accountant, how, nominal)


def draw_count(storage: str, chosen: Selection, seed: int | None) -> int:
    """How many trials there shall be: drawn once from a secret, and kept beside the sweep.

    Drawing again because the number is inconvenient would void the theorem.
    """
    path = f"selection-{str(chosen).replace(':', '-')}.json"
    files = Store(storage).files
    try:
        return int(json.loads(files.read_name(path))["trials"])
    except (OSError, ValueError, KeyError):
        rng = keyed_generator(fresh_seed() if seed is None else seed, "selection", 0)
        count = selection.draw_trials(chosen, rng)
        files.write(path, json.dumps({"selection": str(chosen), "trials": count}).encode())
        return count


def privacy_choices(space: SearchSpace) -> list[dict[str, Any]]:
    """One choice for each combination of values that makes a difference to privacy."""
    options: list[list[tuple[str, Any]]] = []
    for parameter in space.parameters:
        values: Sequence[Any] = parameter.values
        if not values and parameter.distribution == "power_of_two":
            values = [
                2**power for power in range(64) if parameter.low <= 2**power <= parameter.high
            ]
        elif not values and parameter.name in COST_FIELDS:
            raise UserError(
                f"--selection charges for every {parameter.name} that could be drawn; "
                "give it values: […] or distribution: power_of_two"
            )
        values = values or [parameter.low]  # no matter for privacy: one stands for all
        options.append([(parameter.name, value) for value in values])
    return [dict(combination) for combination in product(*options)]


def _relation(plan: Plan) -> dp_accounting.NeighboringRelation:
    relation = dp_accounting.NeighboringRelation
    replace = plan.adjacency == "replace_one"
    return relation.REPLACE_ONE if replace else relation.ADD_OR_REMOVE_ONE
