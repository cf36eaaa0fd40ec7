"""A forecast measures real steps, of no private record, once for each kind of run."""

from typing import Any

import pytest

from dpfp_ray.data.tasks import load_task
from dpfp_ray.plan.values import make_plan
from dpfp_ray.training import forecast
from dpfp_ray.training.forecast import Rates, measure, rates


def plan_of(task: dict[str, Any], **fields: Any) -> Any:
    data = {name: task[name] for name in ("train_file", "dev_file", "model")}
    return make_plan({**data, "epsilon": 3, **fields})


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"method": "dpsgd"},
        {"method": "dpfp"},
        {"method": "dpfp", "scope": "head"},
        {"method": "dpfp", "mode": "moments"},
        {"method": "objpert"},
    ],
    ids=str,
)
def test_every_kind_of_run_has_rates(tiny_task: dict[str, Any], fields: dict[str, Any]) -> None:
    plan = plan_of(tiny_task, **fields)
    measured = measure(plan, load_task(plan), threads=1)
    assert measured.step + measured.row > 0
    assert measured.dev_row > 0
    assert (measured.encode_row > 0) == (plan.scope == "head")


def test_a_kind_is_measured_once(
    tiny_task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def measured(*asked: Any) -> Rates:
        calls.append(asked)
        return Rates(1.0, 0.1, 0.2, 0.0, 5.0, 6.0)

    monkeypatch.setattr(forecast, "measure", measured)
    plan = plan_of(tiny_task, method="dpsgd", max_length=77)
    task = load_task(plan)
    assert rates(plan, task, 1) == rates(plan, task, 1) == Rates(1.0, 0.1, 0.2, 0.0, 5.0, 6.0)
    rates(plan_of(tiny_task, method="rgp", max_length=77), task, 1)
    assert len(calls) == 2


def test_seconds_are_those_of_steps_rows_and_evaluations(tiny_task: dict[str, Any]) -> None:
    plan = plan_of(tiny_task, method="dpsgd", batch_size=16, epochs=3)
    bound = plan.bind(records=64, representation="mean")
    known = Rates(step=1.0, row=0.5, dev_row=0.25, encode_row=2.0, memory=0, state=0)
    assert known.seconds(bound, 8) == 12 * (1 + 8) + 3 * 2
    assert known.encoding(10, 5) == 30
