"""A selection as its theorem has it: i.i.d. trials, K and losers secret, one record in the end."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from dpfp_ray.cli.main import main
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.sampling import keyed_generator
from dpfp_ray.privacy.selection import draw_trials, parse_selection, selection_epsilon
from dpfp_ray.results.store import Store
from dpfp_ray.service.snapshot import LiveRecords
from dpfp_ray.sweeps import selection
from dpfp_ray.sweeps.cluster import RayOptions
from dpfp_ray.sweeps.selection import (
    Draw,
    SelectionCost,
    best_name,
    best_record,
    check_choosing,
    draw_all,
    open_sealed,
    privacy_choices,
    selection_cost,
    shown,
)
from dpfp_ray.sweeps.space import SearchSpace, read_search_space
from dpfp_ray.sweeps.sweep import FinishedSweep, sweep
from dpfp_ray.sweeps.trial import SECRET, Trial
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import to_json, with_checksum
from tests.support.ray_runs import (
    ONE_PROCESS,
    ONE_PROCESS_FLAGS,
    Command,
    measured,
    wait_for,
    write_space,
)
from tests.support.result_records import make_record

RATES = {"learning_rate": {"distribution": "log_uniform", "min": 1e-5, "max": 1e-3}}


def space(tmp_path: Path, parameters: dict[str, Any], **keys: Any) -> SearchSpace:
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump({"method": "random", "parameters": parameters, **keys}))
    return read_search_space(path, {})


def bind(searched: SearchSpace, **values: Any) -> selection.Bind:
    """Binds to 5,000 records that nobody has to load."""

    def bound(settings: dict[str, Any]) -> Trial:
        plan = make_plan({**searched.plan_values(settings), **values})
        plan = plan.bind(records=5000, representation="mean")
        return Trial(plan, noise_multiplier(plan))

    return bound


# --- the draw -----------------------------------------------------------------------------------

SELECTIONS = 1000
PLACES = 8  # of an adversarial space: its draws from a seed that is known tell their index


@dataclass
class Simulated:
    """Many selections among trials of 0.5-GDP, on data and without one record of it."""

    settings: list[int] = field(default_factory=list)
    trials: list[int] = field(default_factory=list)

    def add(self, draws: list[Draw], seed: int, shift: float) -> None:
        rng = keyed_generator(seed, "simulated scores", 0)
        scores = {draw.name: float(rng.normal(shift)) for draw in draws}
        best = best_name(scores, seed)
        winner = next(draw for draw in draws if draw.name == best)
        self.settings.append(winner.settings["rank"])
        self.trials.append(len(draws))

    def chance_of_independence(self) -> float:
        """p-value: do the winner's settings tell nothing about how many trials there were?"""
        table = np.zeros((3, PLACES))
        for setting, count in zip(self.settings, self.trials, strict=True):
            table[int(np.digitize(count, [2, 5])), setting - 1] += 1
        return float(stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue)


def adversarial(tmp_path: Path) -> SearchSpace:
    return space(tmp_path, {"rank": {"values": list(range(1, PLACES + 1))}})


def test_the_winner_s_settings_say_nothing_about_the_number_of_trials(tmp_path: Path) -> None:
    searched, chosen = adversarial(tmp_path), parse_selection("logarithmic:6")
    simulated = Simulated()
    for seed in range(SELECTIONS):
        simulated.add(draw_all(searched, chosen, seed), seed, shift=0.5)
    assert simulated.chance_of_independence() > 1e-3
    seen = np.bincount(simulated.settings, minlength=PLACES + 1)[1:]
    assert stats.chisquare(seen).pvalue > 1e-3, "as one draw of the space"


def test_with_a_public_seed_they_would(tmp_path: Path) -> None:
    """The flaw that the test above looks for is one that it finds."""
    searched, chosen = adversarial(tmp_path), parse_selection("logarithmic:6")
    simulated = Simulated()
    for seed in range(SELECTIONS):
        count = draw_trials(chosen, keyed_generator(seed, "count", 0))
        rng = keyed_generator(0, "public", 0)
        draws = [
            Draw(f"{n}", {p.name: p.draw(rng) for p in searched.parameters}) for n in range(count)
        ]
        simulated.add(draws, seed, shift=0.5)
    assert simulated.chance_of_independence() < 1e-9


def test_the_number_of_trials_follows_its_distribution(tmp_path: Path) -> None:
    searched, chosen = adversarial(tmp_path), parse_selection("geometric:4")
    counts = [len(draw_all(searched, chosen, seed)) for seed in range(SELECTIONS)]
    seen = [sum(count == k for count in counts) for k in range(1, 7)]
    expected = [SELECTIONS * 0.75 ** (k - 1) * 0.25 for k in range(1, 7)]
    rest = SELECTIONS - sum(seen), SELECTIONS - sum(expected)
    assert stats.chisquare([*seen, rest[0]], [*expected, rest[1]]).pvalue > 1e-3


def test_names_show_neither_settings_nor_order(tmp_path: Path) -> None:
    searched, chosen = adversarial(tmp_path), parse_selection("geometric:5")
    drawn = [draw_all(searched, chosen, seed) for seed in range(SELECTIONS)]
    in_order = [draws[0].name < draws[1].name for draws in drawn if len(draws) > 1]
    assert stats.binomtest(sum(in_order), len(in_order)).pvalue > 1e-4
    names: dict[int, set[str]] = {}
    for draw in (draw for draws in drawn for draw in draws):
        names.setdefault(draw.settings["rank"], set()).add(draw.name)
    assert sum(map(len, names.values())) == sum(map(len, drawn)), "no two have the same name"


def test_the_same_seed_draws_the_same_and_another_draws_others(tmp_path: Path) -> None:
    searched, chosen = space(tmp_path, RATES), parse_selection("geometric:20")
    one = draw_all(searched, chosen, 1)
    assert draw_all(searched, chosen, 1) == one
    others = [draw for seed in range(2, 20) for draw in draw_all(searched, chosen, seed)]
    assert not {draw.name for draw in one} & {draw.name for draw in others}
    rates = {draw.settings["learning_rate"] for draw in one}
    assert not rates & {draw.settings["learning_rate"] for draw in others}


def seed_with(searched: SearchSpace, kind: str, trials: int, repeated: bool = False) -> int:
    """The first seed that draws so many trials, two of them equal if asked for."""
    for seed in range(10_000):
        draws = draw_all(searched, parse_selection(kind), seed)
        distinct = {to_json(draw.settings) for draw in draws}
        if len(draws) == trials and (len(distinct) < trials or not repeated):
            return seed
    raise AssertionError("no such seed")


# --- the winner ---------------------------------------------------------------------------------


def test_the_best_score_wins_and_failures_lose_to_all() -> None:
    assert best_name({"a": 0.5, "b": 0.7, "c": None}, seed=1) == "b"
    assert best_name({"a": None, "b": 0.0}, seed=1) == "b"
    assert best_name({}, seed=1) is None


def test_ties_are_broken_by_the_secret() -> None:
    scores = dict.fromkeys("abcd", 0.5)
    winners = [best_name(scores, seed) for seed in range(400)]
    assert stats.chisquare([winners.count(name) for name in "abcd"]).pvalue > 1e-4
    assert best_name(scores, 3) == best_name(dict(reversed(scores.items())), 3)


def charge_of(
    tmp_path: Path,
    kind: str = "geometric:5",
    parameters: dict[str, Any] = RATES,
    plan: dict[str, Any] | None = None,
    **values: Any,
) -> SelectionCost:
    searched = space(tmp_path, parameters, **({} if plan is None else {"plan": plan}))
    return selection_cost(searched, parse_selection(kind), bind(searched, **values))


def test_a_winner_s_record_has_no_clock_and_no_machine(tmp_path: Path) -> None:
    record = make_record("t", method="dpsgd")
    record["statement"] = {"guarantee": "proved", "tuning": {"epsilon": None, "text": "none"}}
    chosen = parse_selection("logarithmic:30")
    kept = shown(record, chosen, charge_of(tmp_path, str(chosen), method="dpsgd"))
    assert not {"node", "pid", "started_at", "seconds"} & set(kept["trial"])
    assert kept["metrics"] == record["metrics"]
    assert not {"train_seconds", "peak_memory_bytes"} & set(kept["cost"])
    assert {epoch["train_seconds"] for epoch in kept["history"]} == {None}
    assert kept["statement"]["tuning"]["selection"] == "logarithmic:30"


def test_a_trial_without_a_final_record_is_no_candidate(tmp_path: Path) -> None:
    trial = bind(space(tmp_path, RATES), method="dpsgd")({"learning_rate": 1e-3})
    with pytest.raises(RuntimeError, match="no final record"):
        best_record(Store(tmp_path), [trial], seed=1)


# --- what it costs ------------------------------------------------------------------------------


def test_the_charge_is_the_theorem_s(tmp_path: Path) -> None:
    trial = bind(space(tmp_path, RATES), method="dpsgd")({"learning_rate": 1e-3})
    event: Any = accounting.dp_event(accounting.mechanism(trial.plan, trial.noise_multiplier))
    charge = charge_of(tmp_path, "logarithmic:30", method="dpsgd")
    assert trial.plan.delta is not None
    exact = selection_epsilon([event], parse_selection("logarithmic:30"), trial.plan.delta)
    assert charge.epsilon == exact
    assert 4.5 < charge.epsilon < 8, "for runs of ε = 3"
    assert "all others and their number secret: ε = " in charge.sentence()


@pytest.mark.slow
@pytest.mark.parametrize("order", [[1, 3], [3, 1]])
def test_the_worst_mechanism_that_could_be_drawn_is_charged_for_wherever_it_stands(
    order: list[int], tmp_path: Path
) -> None:
    both, alone = (
        charge_of(tmp_path, parameters={"epsilon": {"values": values}}, method="dpsgd")
        for values in (order, [3])
    )
    assert both.epsilon == pytest.approx(alone.epsilon)
    assert both.entry.parts == alone.entry.parts


@pytest.mark.slow
def test_a_selection_holds_at_the_smallest_delta_of_its_trials(tmp_path: Path) -> None:
    deltas = {"delta": {"values": [1e-4, 1e-6, 1e-5]}}
    assert charge_of(tmp_path, parameters=deltas, method="dpsgd").entry.delta == 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("method", "proved"), [("dpsgd", True), ("dpfp", False)])
@pytest.mark.parametrize(("column", "unit"), [("author", "person"), (None, "record")])
def test_the_entry_of_a_selection_has_unit_labels_and_guarantee_of_its_trials(
    method: str, proved: bool, column: str | None, unit: str, tmp_path: Path
) -> None:
    charge = charge_of(tmp_path, method=method, user_column=column)
    use = charge.use(key="k", people="p", run="r")
    assert (use.unit, use.labels_protected) == (unit, proved)
    assert (use.guarantee, charge.nominal) == ("proved" if proved else "nominal", not proved)
    assert ("†" in charge.sentence()) is not proved


def test_a_ledger_takes_a_selection_as_one_entry(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    charge = charge_of(tmp_path, "logarithmic:30", method="dpsgd")
    people = ledger.register(["a text", "another"])
    entry = ledger.begin(charge.use(key="k", people=people.id, run=ledger.mark(7)))
    ledger.end(entry.id, done=1)
    spent = ledger.spent(people.id)
    assert charge.epsilon < spent.epsilon < 2 * charge.epsilon
    assert len(ledger.entries()) == 1


def test_releases_that_differ_are_selected_from_with_noise_of_their_own(tmp_path: Path) -> None:
    scaling = {"scaling": {"values": ["clip", "unit"]}}
    assert charge_of(tmp_path, "geometric:3", scaling, mode="moments").epsilon > 3


def test_all_batch_sizes_that_could_be_drawn_are_charged_for(tmp_path: Path) -> None:
    sizes = {"distribution": "power_of_two", "min": 16, "max": 64}
    choices = privacy_choices(space(tmp_path, {"batch_size": sizes, **RATES}))
    assert sorted(choice["batch_size"] for choice in choices) == [16, 32, 64]


@pytest.mark.parametrize("name", ["batch_size", "max_train", "epochs"])
def test_what_changes_the_mechanism_without_end_cannot_be_charged_for(
    name: str, tmp_path: Path
) -> None:
    searched = space(tmp_path, {name: {"distribution": "int_uniform", "min": 16, "max": 64}})
    with pytest.raises(UserError, match=f"every {name} that could be drawn.*power_of_two"):
        privacy_choices(searched)


TWO = {"one": {"values": [{"method": "dpsgd"}, {"method": "dpfp", "mode": "paper"}]}}
SCALING = {"scaling": {"values": ["clip", "unit"]}}


@pytest.mark.parametrize(
    ("parameters", "values", "why"),
    [
        (RATES, {"method": "non_private"}, "non_private"),
        ({"ridge": {"values": [0.1, 1.0]}}, {"mode": "moments"}, "ridge on that release is free"),
        (SCALING, {"mode": "release_once", "label_epsilon": 0.5}, "label_epsilon"),
        (TWO, {}, "add_remove and zero_out"),
        (
            RATES,
            {"method": "dpsgd", "sampling": "allocation"},
            "cannot charge for sampling allocation",
        ),
    ],
)
def test_what_the_theorem_has_no_price_for_is_refused(
    parameters: dict[str, Any], values: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=why):
        charge_of(tmp_path, "geometric:3", parameters, values)


def test_a_tracker_would_show_all_trials_and_only_dev_accuracy_chooses(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="drop --tracker"):
        check_choosing(space(tmp_path, RATES), RayOptions(tracker="mlflow"))
    with pytest.raises(UserError, match="metric is epsilon min"):
        check_choosing(space(tmp_path, RATES, metric="epsilon"), RayOptions())


# --- files --------------------------------------------------------------------------------------


def test_the_sealed_folder_is_owner_only_and_of_one_selection(tmp_path: Path) -> None:
    (tmp_path / "sealed").mkdir(mode=0o755)
    sealed = Path(open_sealed(str(tmp_path), "one"))
    assert sealed == tmp_path / "sealed"
    assert sealed.stat().st_mode & 0o777 == 0o700
    assert open_sealed(str(tmp_path), "one") == str(sealed)
    with pytest.raises(UserError, match="unfinished selection"):
        open_sealed(str(tmp_path), "other")


def tiny_space(tiny_task: dict[str, Any], path: Path, **plan: Any) -> Path:
    """Two settings, so that four trials cannot all differ."""
    parameters = {"learning_rate": {"values": [1e-3, 3e-3]}}
    return write_space(path, tiny_task, method="random", parameters=parameters, plan=plan)


def test_no_trial_at_all_releases_nothing(
    tiny_task: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_space(tiny_task, tmp_path / "s.yaml")
    seed = seed_with(read_search_space(path, {}), "poisson:1", trials=0)
    command = ["sweep", str(path), "--storage", str(tmp_path / "runs")]
    command += ["--selection", "poisson:1", "--seed", str(seed)]
    for _ in range(2):
        assert main(command) == 0
        output = capsys.readouterr()
        assert output.err.count("nothing is run, nothing is released") == 1
        assert output.out == ""
    assert Store(tmp_path / "runs").records() == []
    assert not (tmp_path / "runs" / "sealed").exists()


def test_settings_that_cannot_run_are_found_before_any_trial(
    tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    parameters = {"dropout": {"distribution": "uniform", "min": 0.0, "max": 50.0}}
    path = write_space(tmp_path / "s.yaml", tiny_task, method="random", parameters=parameters)
    with pytest.raises(UserError, match="can draw settings that cannot run: "):
        sweep(path, storage=tmp_path / "runs", selection="geometric:9", seed=1)
    assert not (tmp_path / "runs" / "sealed").exists()


# --- on Ray -------------------------------------------------------------------------------------


@dataclass
class Selected:
    space: Path
    storage: Path
    seed: int
    results: FinishedSweep
    sealed: list[dict[str, Any]]
    modes: set[int]
    folder_mode: int
    listed_meanwhile: int


@pytest.fixture(scope="module")
def selected(
    tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, ray_session: None
) -> Selected:
    """Four trials, at least two of them with equal settings; an older trial is in the store."""
    folder = tmp_path_factory.mktemp("selected")
    path, storage = tiny_space(tiny_task, folder / "s.yaml", epochs=1), folder / "runs"
    seed = seed_with(read_search_space(path, {}), "geometric:4", trials=4, repeated=True)
    older = make_record("older", method="dpsgd")
    older["statement"] = {"guarantee": "proved", "tuning": {"epsilon": 17.4, "text": "all"}}
    Store(storage).put(older)
    caught: dict[str, Any] = {}

    def look(store: Store, trials: list[Trial], seed: int) -> Any:
        files = [p for p in (storage / "sealed" / "records").iterdir() if p.is_file()]
        caught["sealed"] = store.records()
        caught["modes"] = {p.stat().st_mode & 0o777 for p in files}
        caught["folder_mode"] = (storage / "sealed").stat().st_mode & 0o777
        caught["listed_meanwhile"] = len(Store(storage).records())
        return best_record(store, trials, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "best_record", look)
        results = sweep(path, storage=storage, selection="geometric:4", seed=seed, **ONE_PROCESS)
    return Selected(path, storage, seed, results, **caught)


def test_repeats_run_again_with_noise_of_their_own(selected: Selected) -> None:
    assert len(selected.sealed) == 4
    assert len({record["plan_hash"] for record in selected.sealed}) < 4
    losses = {to_json([e["dev"]["dev"]["loss"] for e in r["history"]]) for r in selected.sealed}
    assert len(losses) == 4


def test_the_best_of_them_is_the_only_one_that_is_kept(selected: Selected) -> None:
    (winner,) = selected.results.records
    best = max(record["metrics"]["accuracy"] for record in selected.sealed)
    assert winner["metrics"]["accuracy"] == best
    kept = {record["trial"]["id"] for record in Store(selected.storage).records()}
    assert kept == {"older", winner["trial"]["id"]}
    names = sorted(path.name for path in selected.storage.iterdir())
    (mark,) = selected.storage.glob("selection-*.json")
    results = [f"results.{kind}" for kind in ("csv", "jsonl", "parquet")]
    assert names == sorted(["records", *results, mark.name])
    assert json.loads(mark.read_text()).keys() == {"selection", "winner"}


def test_while_it_ran_losers_were_sealed(selected: Selected) -> None:
    assert selected.modes == {0o600}
    assert selected.folder_mode == 0o700
    assert selected.listed_meanwhile == 1, "the older trial"


def test_ray_s_session_keeps_no_copy_of_their_results(selected: Selected) -> None:
    from ray.train.constants import _get_ray_train_session_dir

    names = [record["trial"]["id"].encode() for record in selected.sealed]
    files = [p for p in Path(_get_ray_train_session_dir()).rglob("*") if p.is_file()]
    assert not [p for p in files if any(name in p.read_bytes() for name in names)]


def test_only_the_winner_says_what_the_selection_costs(selected: Selected) -> None:
    (winner,), (charge,) = selected.results.records, selected.results.costs
    assert winner["statement"]["tuning"]["epsilon"] == charge.epsilon > 8
    older = Store(selected.storage).get("older")
    assert older is not None
    assert older["statement"]["tuning"] == {"epsilon": 17.4, "text": "all"}


def test_no_reader_finds_a_loser(
    selected: Selected, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (winner,) = selected.results.records
    losers = {r["trial"]["id"] for r in selected.sealed} - {winner["trial"]["id"]}
    assert len(losers) == 3
    assert main(["results", str(selected.storage), "--json"]) == 0
    output = capsys.readouterr().out
    assert main(["report", str(selected.storage), "--output", str(tmp_path / "report")]) == 0
    output += "".join(p.read_text() for p in (tmp_path / "report").rglob("*.html"))
    output += "".join(p.read_text() for p in (tmp_path / "report").rglob("*.csv"))
    output += (selected.storage / "results.jsonl").read_text()
    output += to_json([run.row for run in LiveRecords(str(selected.storage)).now().runs])
    assert winner["trial"]["id"] in output
    assert not [loser for loser in losers if loser in output]


def test_asked_again_it_shows_the_winner_and_runs_nothing(
    selected: Selected, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "Runner", lambda *_, **__: pytest.fail("a trial was run"))
    command = ["sweep", str(selected.space), "--storage", str(selected.storage), "--json"]
    assert main([*command, "--selection", "geometric:4"]) == 0
    output = capsys.readouterr()
    (row,) = json.loads(output.out)
    (winner,) = selected.results.records
    assert row["id"] == winner["trial"]["id"]
    assert "this selection is finished" in output.err
    assert "all others and their number secret" in output.err


def test_a_killed_selection_goes_on_to_the_same_winner(
    tiny_task: dict[str, Any],
    tmp_path: Path,
    ray_session: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tiny_space(tiny_task, tmp_path / "s.yaml", epochs=4, batch_size=4)
    seed = seed_with(read_search_space(path, {}), "geometric:4", trials=3)
    storage, sealed = tmp_path / "runs", tmp_path / "runs" / "sealed"
    sealed.mkdir(parents=True)
    # As if the system had drawn it.
    (sealed / SECRET).write_bytes(with_checksum(str(seed).encode()))
    command = ("sweep", str(path), "--storage", str(storage), "--selection", "geometric:4")
    command += ONE_PROCESS_FLAGS

    def finished() -> bool:
        states = [r["trial"]["status"] for r in Store(sealed).records()]
        return "finished" in states

    first = Command(*command)
    wait_for(finished, "the end of the first trial")
    first.kill()
    before = {r["trial"]["id"]: r for r in Store(sealed).records()}
    assert Store(storage).records() == []
    code, errors = main(command), capsys.readouterr().err
    assert code == 0, errors
    assert "selection in progress" in errors
    assert not any(f"{n}/3" in errors or f"of {n}" in errors for n in range(10))
    assert not sealed.exists()
    (winner,) = Store(storage).records()
    unbroken = sweep(
        path, storage=tmp_path / "other", selection="geometric:4", seed=seed, **ONE_PROCESS
    )
    (same,) = unbroken.records
    assert winner["trial"]["id"] == same["trial"]["id"]
    assert measured(winner) == measured(same)
    if winner["trial"]["id"] in before:
        assert measured({**before[winner["trial"]["id"]]})["metrics"] == winner["metrics"]
