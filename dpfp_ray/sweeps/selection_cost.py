"""What a selection costs: the best of a random number of random trials, all others secret."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from dp_accounting import NeighboringRelation

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.ledger_cost import RdpCurve
from dpfp_ray.privacy.ledger_entries import Use
from dpfp_ray.privacy.selection import Selection, selection_curve, selection_epsilon
from dpfp_ray.sweeps.search_space import SearchSpace
from dpfp_ray.sweeps.trial import Trial
from dpfp_ray.system.errors import UserError

# Fields that change no mechanism, whatever their value; all others must take finitely many values.
FREE_OF_COST = (
    "learning_rate", "weight_decay", "clip", "dropout", "ridge", "shrinkage", "rank",
    "power_iterations", "max_length", "max_dev", "max_physical_batch", "cache_gb",
)  # fmt: skip
# Fields that only matter to what is computed from a release that has been paid for.
POST_PROCESSING = {"ridge", "shrinkage", "prior"}
Bind = Callable[[dict[str, Any]], Trial]


@dataclass(frozen=True)
class SelectionCost:
    """What a selection costs as a whole, in the trials' own adjacency.

    `ledger_part` is the same in a ledger's adjacency (zero-out); see `use`.
    """

    selection: str
    task: str
    methods: str
    adjacency: str
    labels_protected: bool
    unit: str
    records: int
    epsilon: float
    delta: float
    nominal: bool
    ledger_part: RdpCurve
    accountant: str = "rdp"

    def sentence(self) -> str:
        mark = "†" if self.nominal else ""
        return (
            f"the best of a random number of trials on {self.task} ({self.selection}, "
            f"{self.adjacency}), all others and their number secret: "
            f"ε = {self.epsilon:.3g}{mark} ({self.accountant}), δ = {self.delta:.3g}"
        )

    def lines(self) -> list[str]:
        return [self.sentence()]

    def statement(self) -> dict[str, Any]:
        """For the winner's statement, under `tuning`."""
        names = ("selection", "task", "adjacency", "epsilon", "delta", "accountant", "nominal")
        return {name: getattr(self, name) for name in names} | {"text": self.sentence()}

    def use(self, *, key: str, people: str, run: str, loss_shown: bool = False) -> Use:
        """The selection as *one* entry of a ledger, to be begun before its first trial.

        Its trials must have no entries of their own: these would add up to composition, and count
        K. It has one step, and is charged in full however many trials were run. `key` is
        `selection_key`; `run` must be equal for equal seeds (`Ledger.mark` of the secret seed)
        on equal data.
        """
        return Use(
            purpose="trial",
            plan_hash=key,
            method=f"{self.methods}, {self.selection}",
            people=people,
            records=self.records,
            steps=1,
            parts=(self.ledger_part,),
            adjacency=self.adjacency,
            labels_protected=self.labels_protected,
            guarantee="nominal" if self.nominal else "proved",
            delta=self.delta,
            run=run,
            loss_shown=loss_shown,
            unit=self.unit,
        )


def selection_cost(space: SearchSpace, chosen: Selection, bind: Bind) -> SelectionCost:
    """ε of releasing only the best of a random number of random trials.

    The theorem wants every mechanism that the space can draw, not only those that it drew.
    """
    trials = [bind(one) for one in privacy_choices(space)]
    plans = [trial.plan for trial in trials]
    check_chargeable(space, plans)
    mechanisms = list(
        dict.fromkeys(accounting.mechanism(t.plan, t.noise_multiplier) for t in trials)
    )
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    if plans[0].adjacency == "replace_one":
        relation = NeighboringRelation.REPLACE_ONE
    events: list[Any] = [accounting.dp_event(one) for one in mechanisms]
    zeroed: list[Any] = [
        accounting.dp_event(replace(one, adjacency="zero_out")) for one in mechanisms
    ]
    delta = min(plan.delta for plan in plans if plan.delta is not None)
    return SelectionCost(
        selection=str(chosen),
        task=", ".join(dict.fromkeys(plan.task for plan in plans)),
        methods=", ".join(dict.fromkeys(plan.spec.title for plan in plans)),
        adjacency=str(plans[0].adjacency),
        labels_protected=all(plan.spec.labels_protected for plan in plans),
        unit="person" if all(plan.unit == "person" for plan in plans) else "record",
        records=max(plan.D for plan in plans),
        epsilon=selection_epsilon(events, chosen, delta, relation),
        delta=delta,
        nominal=any(plan.spec.guarantee == "nominal" for plan in plans),
        ledger_part=selection_curve(zeroed, chosen),
    )


def check_chargeable(space: SearchSpace, plans: Sequence[Plan]) -> None:
    """Refuse spaces for which the theorem has no price, or that pay one for nothing."""
    open_ones = [plan for plan in plans if not plan.private]
    if open_ones:
        raise UserError(
            f"--selection cannot promise anything for method {open_ones[0].method}; take it out of "
            "the space"
        )
    if any(plan.label_epsilon for plan in plans):
        raise UserError("--selection cannot charge for label_epsilon; use composition, or drop it")
    adjacencies = sorted({str(plan.adjacency) for plan in plans})
    if len(adjacencies) > 1:
        raise UserError(
            f"--selection needs one adjacency for all trials, and this space has "
            f"{' and '.join(adjacencies)}; fix adjacency, or the method"
        )
    if all(plan.one_release for plan in plans) and set(space.varied) <= POST_PROCESSING:
        raise UserError(
            f"{plans[0].spec.title} uses the records once, and choosing {', '.join(space.varied)} "
            "on that release is free: a selection would only cost more; drop --selection"
        )


def privacy_choices(space: SearchSpace) -> list[dict[str, Any]]:
    """One choice for each combination of values that makes a difference to privacy."""
    options: list[list[tuple[str, Any]]] = []
    for parameter in space.parameters:
        values: Sequence[Any] = parameter.values
        if not values and parameter.distribution == "power_of_two":
            values = [
                2**power for power in range(64) if parameter.low <= 2**power <= parameter.high
            ]
        elif not values and parameter.name not in FREE_OF_COST:
            raise UserError(
                f"--selection charges for every {parameter.name} that could be drawn; "
                "give it values: […] or distribution: power_of_two"
            )
        # Parameters without a privacy cost: one representative value is enough.
        whole = int(parameter.low) if parameter.distribution == "int_uniform" else parameter.low
        options.append([(parameter.name, value) for value in values or [whole]])
    return [dict(combination) for combination in product(*options)]
