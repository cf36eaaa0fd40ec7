"""The audit: it notices a mechanism that leaks on purpose, and lets honest ones pass."""

import json
import stat
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfp_ray.auditing import audit as audits
from dpfp_ray.auditing.audit import (
    Audit,
    Audited,
    Settings,
    absence,
    audit_events,
    open_audit,
    set_up,
)
from dpfp_ray.auditing.canaries import Canaries, flip_coins, insert
from dpfp_ray.auditing.outcome import (
    Gaussian,
    audit_outcome,
    claim_of,
    count_correct,
    one_run_epsilon,
)
from dpfp_ray.auditing.scores import score_name, strongest_family
from dpfp_ray.data import Task
from dpfp_ray.methods import moments, release_once
from dpfp_ray.methods.parts.one_release import Seen
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.system.errors import UserError
from dpfp_ray.training import run_folder
from dpfp_ray.training.prepare import Data, Inputs, Prepared, load_inputs, prepare
from dpfp_ray.training.run_folder import RESUME, save_state
from tests.support.tiny_runs import Killed, Listener, audit_with, run_with, tiny_split

pytestmark = pytest.mark.slow

Floats = np.ndarray[Any, np.dtype[np.float64]]


# --- outcomes from scores -----------------------------------------------------------------------


def plan_of(mode: str = "release_once", **changes: Any) -> Plan:
    return Plan(method="dpfp", mode=mode, epsilon=3, records=20_000, **changes)


def outcome_of(scores: Floats, members: Any, plan: Plan | None = None, **options: Any) -> Any:
    rng = np.random.default_rng(1)
    return audit_outcome(
        plan or plan_of(), scores, members, **{"confidence": 0.95, "rng": rng, **options}
    )


@pytest.mark.parametrize("mode", ["release_once", "paper"])
@pytest.mark.parametrize("constant", [True, False])
def test_scores_that_know_nothing_show_nothing(mode: str, constant: bool) -> None:
    for seed in range(10):
        members = flip_coins(400, seed)
        scores = np.zeros(400) if constant else np.random.default_rng(seed).normal(size=400)
        found = outcome_of(scores, members, plan_of(mode))
        assert found["epsilon"] < 0.2
        assert found["verdict"] == "consistent"


@pytest.mark.parametrize("mode", ["release_once", "paper"])
def test_scores_that_know_all_show_almost_the_ceiling(mode: str) -> None:
    members = flip_coins(1000, 3)
    found = outcome_of(members.astype(float), members, plan_of(mode))
    assert found["verdict"] == "refuted"
    # Not half of them are in, so of 1000 guesses, half "in", a few are wrong whatever the scores.
    assert 3.0 < found["epsilon"] <= found["ceiling"]
    assert found["claim"] == ("gaussian" if mode == "release_once" else "epsilon_delta")


def test_in_only_guesses_never_say_out() -> None:
    """Low scores that are a coin toss spoil every guess of "out"."""
    members = np.arange(1000) % 2 == 0
    scores = np.where(members & (np.arange(1000) < 900), 1.0, 0.0)
    rng = np.random.default_rng(1)
    found = dict(count_correct(scores, members, rng, in_only=True))
    assert found[450] == 450
    assert found[400] == 400
    found = dict(count_correct(scores, members, rng, in_only=False))
    assert found[1000] < 1000 * 0.98


def test_without_a_stated_epsilon_there_is_no_claim_to_refute() -> None:
    members = flip_coins(1000, 3)
    plan = Plan(method="non_private", records=20_000)
    found = outcome_of(members.astype(float), members, plan)
    assert found["verdict"] == "no claim"
    assert found["epsilon"] > 3
    assert found["stated_epsilon"] is None


def test_randomised_labels_leave_less_for_the_text() -> None:
    shared, whole = claim_of(plan_of(label_epsilon=1.0)), claim_of(plan_of())
    assert isinstance(shared, Gaussian)
    assert isinstance(whole, Gaussian)
    assert shared.mu < whole.mu


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"batch_size": 2000}, "gaussian"),
        ({"batch_size": 200}, "sampled_gaussian"),
        ({"batch_size": 200, "accountant": "gdp"}, "epsilon_delta"),
        ({"batch_size": 200, "method": "rgp"}, "sampled_gaussian"),
        ({"batch_size": 200, "method": "dpfp"}, "epsilon_delta"),
        ({"batch_size": 200, "method": "non_private"}, "none"),
    ],
)
def test_the_claim_follows_from_the_plan(changes: dict[str, Any], kind: str) -> None:
    assert claim_of(Plan(**{"method": "dpsgd", "records": 2000, **changes})).kind == kind


def sampled_scores(plan: Plan, count: int, seed: int, leak: float) -> tuple[Floats, Any]:
    """DP-SGD at its worst: every step shows the canary's whole clipped gradient, and noise."""
    rng = np.random.default_rng(seed)
    members, sigma = flip_coins(count, seed), noise_multiplier(plan) / leak
    drawn = (rng.random((count, plan.steps)) < plan.p) & members[:, None]
    x = drawn + sigma * rng.normal(size=drawn.shape)
    return np.log1p(plan.p * np.expm1((x - 0.5) / sigma**2)).sum(1), members


def test_a_sampled_gaussian_is_held_to_its_whole_curve() -> None:
    """Halved noise is noticed; the same guesses show nothing against (ε, δ) alone."""
    plan = Plan(method="dpsgd", epsilon=3, delta=1e-5, batch_size=30, epochs=3, records=2000)
    honest = [outcome_of(*sampled_scores(plan, 900, seed, 1.0), plan) for seed in range(20)]
    assert {one["verdict"] for one in honest} == {"consistent"}
    leaky = [outcome_of(*sampled_scores(plan, 900, seed, 2.0), plan) for seed in range(5)]
    assert [one["verdict"] for one in leaky].count("refuted") >= 4
    for one in leaky:
        assert (one["epsilon"] >= 3) == (one["verdict"] == "refuted")
        assert one_run_epsilon(900, one["guesses"], one["correct"], 1e-5, 1 - 0.05 / 6) < 3


# --- which canaries, which score ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "family", "name"),
    [
        ({"method": "dpfp"}, "unused_token", "row_movement"),
        ({"method": "non_private"}, "unused_token", "row_movement"),
        ({"method": "dpsgd"}, "unused_token", "row_releases"),
        ({"method": "dpsgd", "scope": "head"}, "mislabelled", "alignment"),
        ({"method": "rgp"}, "mislabelled", "alignment"),
        ({"method": "dpfp", "mode": "release_once"}, "mislabelled", "released_row"),
        ({"method": "dpfp", "mode": "moments"}, "mislabelled", "released_moments"),
    ],
)
def test_each_method_gets_its_strongest_score(
    values: dict[str, Any], family: str, name: str
) -> None:
    plan = Plan(**values)
    assert strongest_family(plan, "white_box") == family
    assert score_name(plan, family, "white_box") == name
    assert score_name(plan, family, "black_box") == "loss"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"method": "dpfp"}, "zero_out"),
        ({"method": "dpfp", "adjacency": "replace_one"}, "replace_one"),
        ({"method": "dpfp", "mode": "moments"}, "left_out"),
        ({"method": "dpsgd"}, "add_remove"),
        ({"method": "non_private"}, "none"),
    ],
)
def test_out_follows_the_adjacency(values: dict[str, Any], expected: str) -> None:
    assert absence(Plan(**values)) == expected


# --- mechanisms that are honest, and one that is not --------------------------------------------


def synthetic(seed: int, plan: Plan, count: int, leak: float = 1.0, width: int = 128) -> Audit:
    """Random representations instead of texts; σ is divided by `leak`."""
    rng = np.random.default_rng(7)

    def rows(number: int, key: str) -> RepresentationTable:
        h = rng.normal(size=(number, width)).astype(np.float32)
        return RepresentationTable(h, rng.integers(0, 2, number), f"{key} {number} {width}")

    real, dev = rows(3 * count, "real"), rows(50, "dev")
    canaries = Canaries("mislabelled", rows(count, "canaries"), 3 * np.arange(count), None)
    members = flip_coins(count, seed)
    bound = plan.bind(records=len(real), representation="mean")
    data = Data(insert(real, canaries, members, absence(bound)), {"dev": dev})
    inputs = Inputs(data, ("negative", "positive"), "mean")
    prepared = Prepared(bound, inputs, noise_multiplier(bound) / leak)
    return Audit(Settings(count).for_plan(bound), prepared, real, canaries, members, seed)


PLANS: dict[str, dict[str, Any]] = {
    "release_once": {"mode": "release_once"},
    "replace_one": {"mode": "release_once", "adjacency": "replace_one"},
    "moments": {"mode": "moments"},
    "paper, frozen": {"scope": "head", "batch_size": 300, "micro_batches": 1, "epochs": 1},
    # DP-SGD on the head in full batches: an exact Gaussian claim.
    "head": {"method": "rgp", "scope": "head", "batch_size": 1500, "epochs": 2},
}


def audited(seed: int, name: str, count: int = 1000, leak: float = 1.0) -> dict[str, Any]:
    plan = Plan(**{"method": "dpfp", "epsilon": 3, **PLANS[name]})
    record, _ = audit_with(synthetic(seed, plan, count, leak), seed=1000 + seed)
    found: dict[str, Any] = record["audit"]
    return found


@pytest.mark.parametrize("name", PLANS)
def test_honest_mechanisms_pass_with_twenty_seeds(name: str) -> None:
    found = [audited(seed, name, count=500) for seed in range(20)]
    assert {one["verdict"] for one in found} == {"consistent"}
    expected = "epsilon_delta" if name == "paper, frozen" else "gaussian"
    assert {one["claim"] for one in found} == {expected}


@pytest.mark.parametrize("name", ["release_once", "moments"])
def test_halved_noise_is_noticed(name: str) -> None:
    """Within its power: with 2000 canaries most such runs are caught, with 1000 every other one."""
    found = [audited(seed, name, count=2000, leak=2.0)["verdict"] for seed in range(5)]
    assert found.count("refuted") >= 3


@pytest.fixture
def half_the_noise() -> Iterator[None]:
    """Every release is made with half of the noise that its plan states, as a bug would."""
    real = {spec: spec.release for spec in (release_once.SPEC.one_release, moments.SPEC.one_release)
            if spec is not None}  # fmt: skip
    for spec, release in real.items():
        halved = partial(_halved, release)
        object.__setattr__(spec, "release", halved)
    yield
    for spec, release in real.items():
        object.__setattr__(spec, "release", release)


def _halved(release: Any, plan: Plan, noise_multiplier: float, *rest: Any) -> Any:
    return release(plan, noise_multiplier / 2, *rest)


@pytest.mark.parametrize("name", ["release_once", "moments"])
def test_what_is_scored_is_what_was_released(name: str, half_the_noise: None) -> None:
    """Not what the plan says should have been: that would always be consistent."""
    found = [audited(seed, name, count=2000)["verdict"] for seed in range(5)]
    assert found.count("refuted") >= 3


def test_rows_that_the_head_was_not_made_from_are_not_scored() -> None:
    audit = synthetic(1, Plan(method="dpfp", mode="release_once", epsilon=3), 50)
    prepared, table = audit.prepared, audit.prepared.data.train
    assert isinstance(table, RepresentationTable)
    sigma = prepared.noise_multiplier
    released = release_once.release(prepared.plan, sigma, table, 2, seed=3)
    other = release_once.release(prepared.plan, sigma, table, 2, seed=4)
    canaries = audit.canaries.table
    assert isinstance(canaries, RepresentationTable)
    seen = Seen(
        prepared.plan, sigma, 2, released, table, audit.canaries.places, canaries, None, table
    )
    assert len(release_once.released_row(seen)) == 50
    with pytest.raises(ValueError, match="not the rows"):
        release_once.released_row(replace(seen, released=replace(released, sums=other.sums)))


def test_an_audit_is_a_function_of_its_two_seeds() -> None:
    assert audited(3, "moments") == audited(3, "moments")
    assert audited(3, "moments") != audited(4, "moments")


# --- real texts, a tiny BERT --------------------------------------------------------------------


@pytest.fixture(scope="module")
def task() -> Task:
    dev = {"dev": tiny_split(10, seed=2)}
    return Task("tiny", ("negative", "positive"), tiny_split(400), dev)


def tiny(steady_folder: str, method: str = "dpfp", **changes: Any) -> Plan:
    settings: dict[str, Any] = {"batch_size": 20, "epochs": 3, "learning_rate": 1e-4}
    settings["representation"] = "mean"
    if method != "non_private":
        settings |= {"epsilon": 1.0, "delta": 1e-6}
    return Plan(method=method, model=steady_folder, **{**settings, **changes})


SETTINGS = Settings(100)


def run_tiny(plan: Plan, task: Task, settings: Settings = SETTINGS, **seeds: int) -> Any:
    audit = set_up(plan, settings, seeds.get("membership_seed", 5), task)
    record, scores = audit_with(audit, seed=seeds.get("seed", 6))
    return record["audit"], scores, audit


def test_the_paper_mode_is_refuted_by_its_word_embeddings(steady_folder: str, task: Task) -> None:
    found, scores, audit = run_tiny(tiny(steady_folder), task)
    assert found["verdict"] == "refuted"
    assert (found["family"], found["score"]) == ("unused_token", "row_movement")
    assert found["correct"] == found["guesses"]
    # Rows of canaries that are out do not move at all, weight decay aside.
    out, drawn = scores[~audit.members], scores > 1e-5
    assert out.max() < 1e-6
    assert drawn[audit.members].mean() > 0.85  # 1 − e^−3 of them came up


def test_weight_decay_is_not_taken_for_movement(steady_folder: str, task: Task) -> None:
    plan = tiny(steady_folder, weight_decay=5.0, schedule="constant")
    _, scores, audit = run_tiny(plan, task)
    assert scores[~audit.members].max() < 1e-5
    assert np.median(scores[audit.members]) > 1e-4


def test_noise_on_every_row_hides_who_was_in(steady_folder: str, task: Task) -> None:
    found, _, _ = run_tiny(tiny(steady_folder, "dpsgd"), task)
    assert found["verdict"] == "consistent"
    assert found["score"] == "row_releases"


@pytest.mark.parametrize(
    ("method", "family", "access", "epochs"),
    [
        ("non_private", "unused_token", "white_box", 3),
        ("non_private", "unused_token", "black_box", 3),
        ("non_private", "mislabelled", "black_box", 30),
        ("dpsgd", "unused_token", "white_box", 3),
        ("dpsgd", "unused_token", "black_box", 3),
    ],
)
def test_without_noise_the_scores_see_who_was_in(
    steady_folder: str, task: Task, method: str, family: str, access: str, epochs: int
) -> None:
    """So that "consistent" above is the noise's doing."""
    plan = tiny(steady_folder, method, learning_rate=1e-3, epochs=epochs)
    audit = set_up(plan, Settings(100, family, access), 5, task)
    audit.prepared.noise_multiplier = 1e-3 if plan.private else 0.0
    _, scores = audit_with(audit, seed=6)
    mine, theirs = scores[audit.members], scores[~audit.members]
    assert np.mean(mine[:, None] > theirs) > 0.6


def test_rgp_is_scored_on_all_weights_that_it_trains(steady_folder: str, task: Task) -> None:
    found, scores, _ = run_tiny(tiny(steady_folder, "rgp"), task)
    assert found["score"] == "alignment"
    assert found["verdict"] == "consistent"
    assert len(set(scores.tolist())) > 50


def test_the_plan_is_the_one_that_is_trained_without_canaries(
    steady_folder: str, task: Task
) -> None:
    plan = tiny(steady_folder)
    inputs = load_inputs(plan, task)
    ordinary = prepare(plan, inputs)
    ours = set_up(plan, SETTINGS, 5, task).prepared
    assert ours.plan == ordinary.plan
    assert ours.noise_multiplier == ordinary.noise_multiplier
    assert len(ours.data.train) == ordinary.plan.D


def test_membership_does_not_depend_on_the_training_seed(steady_folder: str, task: Task) -> None:
    plan = tiny(steady_folder)
    _, scores, audit = run_tiny(plan, task)
    _, other_scores, other = run_tiny(plan, task, seed=7)
    assert np.array_equal(audit.members, other.members)
    assert not np.array_equal(scores, other_scores)
    assert not np.array_equal(audit.members, set_up(plan, SETTINGS, 6, task).members)


# --- the folder ---------------------------------------------------------------------------------


def audit_in(
    folder: Path, plan: Plan, task: Task, settings: Settings = SETTINGS, **options: Any
) -> dict[str, Any]:
    """The audit in `folder` to its end; with `kill_after`, saved and killed after that step."""
    kill_after, say = options.pop("kill_after", None), options.pop("say", lambda message: None)
    opened = open_audit(folder, plan, settings, options, task, say)
    if opened.record is not None:
        return opened.record
    listener = Listener(kill_after)
    try:
        for event in audit_events(opened.audit, opened.run, opened.scratch):
            listener.hear(event)
    except Killed:
        save_state(opened.scratch, listener.state(), opened.run.seed)
        raise
    assert isinstance(event, Audited)
    return opened.finish(event)


def facts(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("plan", "metrics", "privacy", "audit")}


@pytest.mark.parametrize("method", ["dpfp", "dpsgd"])
def test_a_killed_audit_continues_and_ends_the_same(
    steady_folder: str, task: Task, tmp_path: Path, method: str
) -> None:
    """Also with a score that is gathered on the way."""
    plan = tiny(steady_folder, method)
    unbroken, broken = tmp_path / "one", tmp_path / "other"
    unbroken.mkdir()
    broken.mkdir()
    seeds = {"seed": 8, "membership_seed": 9}
    expected = audit_in(unbroken, plan, task, **seeds)
    with pytest.raises(Killed):
        audit_in(broken, plan, task, kill_after=20, **seeds)
    assert not (broken / RESUME).exists()  # `dpfp train` in this folder must not find it
    said: list[str] = []
    found = audit_in(broken, plan, task, say=said.append)
    assert said == ["continuing after step 20 of 60"]
    assert facts(found) == facts(expected)
    files = [json.loads((folder / "audit.json").read_text()) for folder in (unbroken, broken)]
    assert files[0] == files[1]
    assert sorted(path.name for path in broken.iterdir()) == ["audit.json", "result.json"]


def test_both_seeds_are_on_record_for_their_owner_only(
    steady_folder: str, task: Task, tmp_path: Path
) -> None:
    plan = tiny(steady_folder, epochs=0.5)
    record = audit_in(tmp_path, plan, task)
    kept = json.loads((tmp_path / "audit.json").read_text())
    assert stat.S_IMODE((tmp_path / "audit.json").stat().st_mode) == 0o600
    assert kept["seed"] != kept["membership_seed"]
    assert flip_coins(100, kept["membership_seed"]).tolist() == kept["members"]
    public = (tmp_path / "result.json").read_text()
    assert str(kept["seed"]) not in public
    assert str(kept["membership_seed"]) not in public
    assert json.loads(public)["audit"]["verdict"] == kept["verdict"] == record["audit"]["verdict"]


def test_a_finished_audit_is_not_repeated(
    steady_folder: str, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tiny(steady_folder, epochs=0.5)
    first = audit_in(tmp_path, plan, task)
    monkeypatch.setattr(audits, "run_events", lambda *_: pytest.fail("it was run again"))
    assert facts(audit_in(tmp_path, plan, task)) == facts(first)


@pytest.mark.parametrize(
    "change", [{"settings": Settings(90)}, {"seed": 1}, {"plan": {"learning_rate": 1e-5}}]
)
def test_another_audit_in_the_same_folder_is_refused(
    steady_folder: str, task: Task, tmp_path: Path, change: dict[str, Any]
) -> None:
    plan = tiny(steady_folder, epochs=0.5)
    audit_in(tmp_path, plan, task)
    other, seeds = replace(plan, **change.get("plan", {})), {"seed": change.get("seed")}
    with pytest.raises(UserError, match="another"):
        open_audit(tmp_path, other, change.get("settings", SETTINGS), seeds, task)


def test_an_ordinary_result_is_not_taken_for_an_audit(
    steady_folder: str, task: Task, tmp_path: Path
) -> None:
    plan = tiny(steady_folder, epochs=0.5)
    prepared = prepare(plan, load_inputs(plan, task))
    record, _ = run_with(prepared, seed=3)
    run_folder.write_result(tmp_path, record, None, prepared.plan)
    with pytest.raises(UserError, match="without canaries"):
        open_audit(tmp_path, plan, SETTINGS, {}, task)
