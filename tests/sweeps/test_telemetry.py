"""Gauges: few and bounded tags, nothing without Ray, and what a sweep's trials really set."""

from typing import Any

import pytest

from dpfp_ray.plan.fields import ACCOUNTANTS
from dpfp_ray.plan.plan import Plan
from dpfp_ray.sweeps import progress as telemetry
from dpfp_ray.sweeps.progress import GAUGES, LONGEST, STATUSES, TrialCounts, TrialGauges, trial_tags
from dpfp_ray.sweeps.trial import Trial
from tests.support.result_records import make_record
from tests.support.tune_trial import TuneTrial

Shown = dict[tuple[str, ...], float]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Value by (gauge, tag values in the gauge's order), in place of Ray's."""
    values: Shown = {}

    def put(name: str, value: float | None, tags: dict[str, str]) -> None:
        assert set(tags) == set(GAUGES[name][1])
        if value is not None:
            values[name, *(tags[key] for key in GAUGES[name][1])] = value

    monkeypatch.setattr(telemetry, "put", put)
    return values


def bound(**values: Any) -> Plan:
    return Plan(**values).bind(records=1000, representation="mean")


def test_a_sealed_trial_has_no_gauges(shown: Shown) -> None:
    gauges = TrialGauges(Trial(bound(method="dpfp"), 0.5), "a sweep", silent=True)
    gauges.report(make_record("t"))
    assert shown == {}


def gauges_of(plan: Plan) -> TrialGauges:
    return TrialGauges(Trial(plan, 0.5), "a sweep")


def names(shown: Shown) -> set[str]:
    return {key[0] for key in shown}


def test_tags_hold_no_path_and_no_model() -> None:
    plan = bound(train_file="/home/me/secret.csv", dev_file="/home/me/dev.csv", model="/home/me/m")
    text = " ".join(trial_tags(plan, "abc-0", "sweep").values())
    assert "/" not in text
    assert "me" not in text


def test_tags_are_short_words_whatever_a_sweep_is_called() -> None:
    tags = trial_tags(bound(), "abc-0", "/my sweep\n" + "ε" * 500)
    assert all(len(value) <= LONGEST and value.isascii() for value in tags.values())
    assert not any(mark in tags["sweep"] for mark in "/ \nε")


def test_runs_that_differ_in_seed_or_learning_rate_have_the_same_tags_but_their_id() -> None:
    first = trial_tags(bound(learning_rate=1e-3), "x", "s")
    assert first == trial_tags(bound(learning_rate=2e-3), "x", "s")


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ({"method": "dpfp"}, "dpfp"),
        ({"method": "dpfp", "mode": "moments"}, "dpfp:moments"),
        ({"method": "dpsgd"}, "dpsgd"),
    ],
)
def test_methods_are_named_as_on_the_command_line(values: dict[str, Any], method: str) -> None:
    assert trial_tags(bound(**values), "x", "s")["method"] == method


def test_a_budget_that_does_not_exist_is_none() -> None:
    assert trial_tags(bound(method="non_private"), "x", "s")["epsilon_budget"] == "none"


def test_epsilon_is_nominal_for_the_papers_mode_and_proved_for_dpsgd_but_not_by_clt(
    shown: Shown,
) -> None:
    for method in ("dpfp", "dpsgd"):
        gauges_of(bound(method=method)).report(make_record(method=method))
    guarantees = {(k[3], k[-1]): k[-2] for k in shown if k[0] == "dpfp_epsilon_spent"}
    assert {guarantees["dpfp", name] for name in ACCOUNTANTS} == {"nominal"}
    assert {name: guarantees["dpsgd", name] for name in ACCOUNTANTS} == {
        "gdp": "nominal",
        "rdp": "proved",
        "pld": "proved",
    }


@pytest.mark.parametrize(
    "values",
    [
        {"method": "objpert"},  # which pld alone calibrates
        {
            "method": "dpfp",
            "mode": "release_once",
            "label_epsilon": 1.0,
        },  # for which rdp has no bound
    ],
)
def test_a_plan_that_some_accountants_cannot_calibrate_has_gauges(values: dict[str, Any]) -> None:
    assert gauges_of(bound(**values)).guarantees["pld"] == "proved"


def test_a_report_shows_everything_of_the_last_epoch(shown: Shown) -> None:
    record = make_record()
    record["metrics"] |= {"accuracy": 0.9, "accuracy_last": 0.8}
    gauges_of(bound()).report(record)
    trial_gauges = {name for name, (_, tags) in GAUGES.items() if "trial" in tags}
    assert names(shown) == trial_gauges
    assert {v for k, v in shown.items() if k[0] == "dpfp_accuracy"} == {0.8}


def test_a_method_without_budget_shows_neither_epsilon_nor_noise(shown: Shown) -> None:
    gauges_of(bound(method="non_private")).report(make_record(method="non_private"))
    assert not names(shown) & {"dpfp_epsilon_spent", "dpfp_sigma"}


def test_a_save_shows_the_middle_of_an_epoch(shown: Shown) -> None:
    progress = {"step": 3, "rows": 60, "train_seconds": 2.0}
    state = {"epsilon": {"pld": 0.5}, "progress": progress, "loss_sum": 10.0, "loss_rows": 20}
    gauges_of(bound()).save(state)
    values = {key[0]: value for key, value in shown.items()}
    assert values["dpfp_loss"] == 0.5
    assert values["dpfp_examples_per_second"] == 30.0
    assert values["dpfp_step"] == 3
    assert "dpfp_accuracy" not in values


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_what_is_no_number_is_not_shown(
    value: float | None, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "gauge", lambda name: pytest.fail("was set"))
    telemetry.put("dpfp_trials_planned", value, {"sweep": "s"})


def test_without_ray_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(telemetry, "gauge", lambda name: pytest.fail("was set"))
    telemetry.put("dpfp_trials_planned", 1.0, {"sweep": "s"})


def test_ray_takes_every_gauge_and_its_tags(ray_session: None, recwarn: Any) -> None:
    for name, (_, tags) in GAUGES.items():
        telemetry.put(name, 1.0, dict.fromkeys(tags, "x"))
    assert not recwarn.list


def test_a_gauge_that_ray_refuses_is_a_warning(ray_session: None) -> None:
    with pytest.warns(UserWarning, match="dpfp_trials_planned is not exported"):
        telemetry.put("dpfp_trials_planned", 1.0, {"other": "s"})


class CountedTrial(TuneTrial):
    def __init__(self, status: str, last: str | None = None, failures: int = 0) -> None:
        super().__init__(1e-3, status)
        self.last_result = {"status": last}
        self.num_failures = failures


def test_trials_are_counted_by_status_with_zeros(shown: Shown) -> None:
    trials = [
        CountedTrial("PENDING"),
        CountedTrial("RUNNING", failures=2),
        CountedTrial("TERMINATED", "finished"),
        CountedTrial("TERMINATED", "running"),
        CountedTrial("ERROR"),
    ]
    TrialCounts("s", 9).on_step_end(0, trials)
    counts = {status: shown["dpfp_trials", "s", "dpfp", status] for status in STATUSES}
    assert counts == {
        "waiting": 1,
        "running": 1,
        "finished": 1,
        "stopped": 1,
        "failed": 1,
        "refused": 0,
    }
    assert shown["dpfp_trials_planned", "s"] == 9
    assert shown["dpfp_restarts", "s", "dpfp"] == 2


def test_a_sweep_that_goes_on_counts_on(shown: Shown) -> None:
    plan = bound()
    settled = {"plan": plan.to_dict(), "trial": {"id": "a", "status": "finished"}}
    unsettled = {"plan": plan.to_dict(), "trial": {"id": "b", "status": "running"}}
    counts = TrialCounts("s", 2, [settled, unsettled])
    counts.on_trial_complete(0, [CountedTrial("TERMINATED", "stopped")], None)
    assert shown["dpfp_trials", "s", "dpfp", "finished"] == 1
    assert shown["dpfp_trials", "s", "dpfp", "running"] == 0
