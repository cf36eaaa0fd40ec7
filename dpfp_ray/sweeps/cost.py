"""What a sweep or a comparison costs as a whole, if anything chosen among its trials is released.

The best trial is chosen by looking at all of them, and a table shows all of them: both release what
every trial learnt. So all trials on the same records compose, unless the number of trials was drawn
at random for that purpose (`selection.py`), or they all read one and the same noisy release.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import dp_accounting

from dpfp_ray.plan.method_spec import is_private
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy import accounting, selection
from dpfp_ray.results.store import Store

# Trials that agree on these used the same private records.
RECORDS_FIELDS = ("task", "data_dir", "train_file", "max_train", "records", "delta", "adjacency")


@dataclass(frozen=True)
class Cost:
    """ε, at `delta`, of what was learnt about one set of records."""

    task: str
    adjacency: str
    trials: int
    epsilon: float
    delta: float
    accountant: str
    how: str
    nominal: bool
    audits: int = 0  # of the trials: they read the same records, and their verdicts are shown

    def sentence(self) -> str:
        mark = "†" if self.nominal else ""
        audits = f", {self.audits} of them audits" if self.audits else ""
        return (
            f"all {self.trials} private trials on {self.task} ({self.adjacency}{audits}): "
            f"ε = {self.epsilon:.3g}{mark} ({self.accountant}, {self.how}), δ = {self.delta:.3g}"
        )


def composed_cost(records: Iterable[Mapping[str, Any]]) -> list[Cost]:
    """Every trial that touched private records, composed; one entry for each set of records."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        plan = record.get("plan", {})
        spent = record.get("privacy", {}).get("steps")
        if plan.get("method") and is_private(plan["method"]) and spent and plan.get("records"):
            groups.setdefault(tuple(plan.get(name) for name in RECORDS_FIELDS), []).append(record)
    return [_compose(group) for group in groups.values()]


def _compose(records: Sequence[Mapping[str, Any]]) -> Cost:
    plans = [_plan(record) for record in records]
    releases: dict[str, tuple[Plan, Mapping[str, Any]]] = {}
    for plan, record in zip(plans, records, strict=True):
        # The same release read again costs nothing; a run in steps is a release of its own.
        name = record["privacy"].get("release_id") or record.get("trial", {}).get("id", id(record))
        releases[str(name)] = (plan, record)
    events = [_event(plan, record) for plan, record in releases.values()]
    delta = plans[0].delta
    assert delta is not None
    with accounting.unconverged_orders_left_out():
        epsilon, accountant = selection.composition_epsilon(events, delta, _relation(plans[0]))
    if len(releases) == 1 and plans[0].spec.own_profile:  # what the event stands for is not tight
        own = accounting.mechanism(plans[0], records[0]["privacy"]["noise_multiplier"])
        epsilon, accountant = accounting.epsilon(own, delta, "pld") or epsilon, "pld"
    # Randomised labels are pure ε-DP, and add up (basic composition).
    epsilon += sum(plan.label_epsilon or 0.0 for plan, _ in releases.values())
    how = "composition" if len(events) > 1 else "one release"
    nominal = any(plan.spec.guarantee == "nominal" for plan in plans)
    first = plans[0]
    adjacency = str(first.adjacency)
    audits = sum("audit" in record for record in records)
    return Cost(
        first.task, adjacency, len(records), epsilon, delta, accountant, how, nominal, audits
    )


def write_cost(storage: str, records: Iterable[dict[str, Any]], costs: Sequence[Cost]) -> None:
    """Into every record's statement, where report and readers look for it."""
    store = Store(storage)
    known = {(cost.task, cost.adjacency, cost.delta): cost for cost in costs}
    for record in records:
        plan = record.get("plan", {})
        cost = known.get((plan.get("task"), plan.get("adjacency"), plan.get("delta")))
        if cost is None or "statement" not in record:
            continue
        tuning = {**asdict(cost), "text": cost.sentence()}
        store.put({**record, "statement": {**record["statement"], "tuning": tuning}})


def _plan(record: Mapping[str, Any]) -> Plan:
    return make_plan({key: value for key, value in record["plan"].items() if value is not None})


def _event(plan: Plan, record: Mapping[str, Any]) -> Any:
    privacy = record["privacy"]
    done = accounting.mechanism(plan, privacy["noise_multiplier"], privacy["steps"])
    return accounting.dp_event(done)


def _relation(plan: Plan) -> dp_accounting.NeighboringRelation:
    relation = dp_accounting.NeighboringRelation
    replace = plan.adjacency == "replace_one"
    return relation.REPLACE_ONE if replace else relation.ADD_OR_REMOVE_ONE
