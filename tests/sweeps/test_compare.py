"""The runs of a comparison, its audits, and the comparison itself."""

import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest

from dpfp_ray.auditing.audit import Settings
from dpfp_ray.cli.main import main
from dpfp_ray.plan.method_spec import all_specs
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.results.power import seeds_needed, smallest_difference
from dpfp_ray.results.runs import label as label_of
from dpfp_ray.sweeps import compare as comparing
from dpfp_ray.sweeps.compare import (
    audit_task,
    bind_cells,
    cells_of,
    compare,
    drawn,
    plan_cells,
    preview,
    runs_line,
    seeds_line,
    sensitivity_line,
    space_name,
)
from dpfp_ray.sweeps.trial import InputsOnce, Trial
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.step import Steps
from tests.support.ray_runs import ONE_PROCESS, records
from tests.support.tiny_runs import tiny_split

METHODS = [spec.title.replace(" ", ":") for spec in all_specs().values() if spec.compared]
FREE = ("batch_size", "micro_batches", "learning_rate")


def test_data_in_memory_are_compared_and_audited(
    tiny_task: dict[str, Any], tmp_path: Path, ray_session: None
) -> None:
    split = tiny_split(120)
    table = compare(
        data=pandas.DataFrame({"review": split.texts, "stars": split.labels}),
        text="review",
        label="stars",
        epsilon=[8],
        methods=["non_private", "dpsgd:head"],
        audit=20,
        seed=5,
        output=tmp_path / "out",
        model=tiny_task["model"],
        representation="mean",
        accountant="gdp",
        epochs=1,
        batch_size=8,
        **ONE_PROCESS,
    )
    files = {record["plan"]["train_file"] for record in records(tmp_path / "out").values()}
    assert files == {"memory:data"}
    shown = table.to_pandas()
    assert list(shown["method"]) == ["non_private", "dpsgd head"]
    assert shown["runs"].tolist() == [1, 1]
    assert shown["verdict"].notna().all()
    assert "<html" in table.report(tmp_path / "page").index.read_text(encoding="utf-8")
    assert "| Method |" in repr(table)


def test_every_method_is_a_trial_that_finishes(
    tiny_task: dict[str, Any], tmp_path: Path, ray_session: None
) -> None:
    names = ("train_file", "dev_file", "model", "representation", "batch_size")
    shared = {name: tiny_task[name] for name in names}
    table = compare(
        methods=METHODS, epsilon=[8], epochs=1, output=tmp_path / "out", **shared, **ONE_PROCESS
    )
    errors = [record["trial"]["error"] for record in records(tmp_path / "out").values()]
    assert errors == [None] * len(METHODS)
    assert table.to_pandas()["accuracy"].notna().all()


# --- audits -------------------------------------------------------------------------------------


SEEDS = {"seed": 1, "membership_seed": 2}


@pytest.mark.parametrize(("save_every", "saved"), [(1000.0, False), (0.0, True)])
def test_states_of_an_audit_are_saved_now_and_then(
    tiny_task: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save_every: float,
    saved: bool,
) -> None:
    take = Steps.take

    def take_or_die(self: Steps, step: int) -> Any:
        return take(self, step) if step < 3 else sys.exit()

    monkeypatch.setattr(Steps, "take", take_or_die)
    plan = make_plan({**tiny_task, "scope": "head"})
    with pytest.raises(SystemExit):
        audit_task(plan, Settings(10), str(tmp_path), 1, None, SEEDS, save_every)
    assert (tmp_path / "unfinished" / "resume.pt").exists() == saved


def test_an_audit_without_a_folder_works_in_a_private_one_and_removes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders: list[Path] = []

    def open_audit(folder: Path, *_: Any) -> Any:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folders.append(folder)
        return SimpleNamespace(record={})

    monkeypatch.setattr(comparing, "open_audit", open_audit)
    for _ in range(2):
        audit_task(Plan(), Settings(10), None, 1, None, SEEDS, 30.0)
    assert folders[0] != folders[1]
    assert not any(folder.exists() for folder in folders)


# --- cells and tuning ---------------------------------------------------------------------------


def test_repetitions_come_round_by_round(tiny_task: dict[str, Any]) -> None:
    cells = [tiny_task, {**tiny_task, "epsilon": 3.0}]
    trials = bind_cells(cells, 2, InputsOnce())
    assert [(t.plan.epsilon, t.seed_index) for t in trials] == [(8, 0), (3, 0), (8, 1), (3, 1)]


def test_tuning_starts_from_the_papers_settings(tiny_task: dict[str, Any]) -> None:
    candidates = drawn({k: v for k, v in tiny_task.items() if k not in FREE}, 6, InputsOnce())
    first: Trial = candidates[0][1]
    assert (first.plan.B, first.plan.M, first.plan.learning_rate) == (32, 32, 5e-6)
    assert len({trial.id for _, trial in candidates}) == 6
    assert all(trial.group == "tune" for _, trial in candidates)
    assert len({trial.plan.B for _, trial in candidates}) > 1
    assert all(t.plan.B <= 120 * t.plan.M for _, t in candidates), "only what can run"


def test_tuning_leaves_alone_what_the_user_has_fixed(tiny_task: dict[str, Any]) -> None:
    cell = {k: v for k, v in tiny_task.items() if k != "learning_rate"}
    candidates = drawn(cell, 4, InputsOnce())
    assert {(trial.plan.B, trial.plan.M) for _, trial in candidates} == {(8, 2)}
    assert len({trial.plan.learning_rate for _, trial in candidates}) == 4


@pytest.mark.slow
def test_every_method_has_a_space_to_tune_in(tiny_task: dict[str, Any]) -> None:
    free = (*FREE, "epsilon", "accountant", "epochs")
    cell = {k: v for k, v in tiny_task.items() if k not in free}
    for method in ("non_private", "dpsgd", "rgp"):
        assert len(drawn({**cell, "method": method}, 3, InputsOnce())) == 3


def plans(methods: list[str], budgets: tuple[float, ...] = (3.0,), **common: Any) -> list[Plan]:
    return [make_plan(cell) for cell in plan_cells(methods, list(budgets), common, None)]


def test_a_flag_reaches_the_methods_that_know_it() -> None:
    common = {"epochs": 2, "micro_batches": 4, "batch_size": 8, "ridge": 0.5, "accountant": "gdp"}
    made = plans(["non_private", "dpfp", "dpfp:moments", "dpsgd"], **common)
    assert [plan.epochs for plan in made] == [2, 2, 1, 2]
    assert [plan.M for plan in made] == [1, 4, 1, 1]
    assert [plan.ridge for plan in made] == [None, None, 0.5, None]
    assert [plan.mode for plan in made] == ["paper", "paper", "moments", "paper"]


def test_match_gives_all_the_same_batch() -> None:
    cells = plan_cells(["non_private", "dpfp", "dpsgd", "rgp"], [3.0], {}, "batch")
    assert {make_plan(cell).batch_size for cell in cells} == {32}


def test_scopes_are_variants_and_lora_flags_reach_lora_only() -> None:
    names = ["dpsgd:bias", "dpsgd:lora", "dpsgd:top:2", "dpfp:bias"]
    cells = plan_cells(names, [3.0], {"lora_rank": 4, "clip_style": "automatic"}, None)
    made = [make_plan(cell) for cell in cells]
    assert [plan.scope for plan in made] == ["bias", "lora", "top:2", "bias"]
    assert [plan.lora_rank for plan in made] == [None, 4, None, None]
    assert [plan.clip_style for plan in made] == ["automatic"] * 3 + ["abadi"]
    assert [space_name(cell) for cell in cells] == ["dpsgd_bias", "dpsgd_lora", "dpsgd_top", "dpfp"]


@pytest.mark.parametrize("name", ["dpsgd:top:K", "dpsgd:top:0", "rgp:bias", "objpert:lora"])
def test_a_scope_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UserError):
        plans([name])


# --- what the seeds and rows can show -----------------------------------------------------------


def test_the_line_has_the_number_of_the_power_analysis() -> None:
    smallest = smallest_difference(rows=872, seeds=5, methods=3).smallest_difference
    assert smallest is not None
    line = sensitivity_line(plans(["non_private", "dpfp", "dpsgd"]), 5, 872)
    assert f"5 seeds on 872 dev rows show: {100 * smallest:.1f} points" in line
    assert "1 seed names no winner" in sensitivity_line(plans(["dpfp", "dpsgd"]), 1, 872)


def test_more_budgets_leave_less_level_for_each() -> None:
    one, two = (
        sensitivity_line(plans(["dpfp", "dpsgd"], budgets), 5, 872)
        for budgets in ((3.0,), (3.0, 8.0))
    )
    assert float(one.split("show: ")[1].split()[0]) < float(two.split("show: ")[1].split()[0])


def test_seeds_for_a_difference_or_that_none_are_enough() -> None:
    both = plans(["dpfp", "dpsgd"])
    assert f"{seeds_needed(0.05, rows=872)} seeds" in seeds_line(both, 872, 5.0)
    assert "not even" in seeds_line(both, 872, 0.1)


def test_runs_are_counted_with_tuning_and_audits() -> None:
    assert runs_line(3, 5, 8, 1000) == "42 runs: 3 cells × 5 seeds + 3 × 8 for tuning + 3 audits"


def test_a_dry_run_reads_the_data_and_writes_nothing(
    tiny_task: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("train_file", "dev_file", "model", "representation", "accountant", "batch_size")
    given = [f"--{name.replace('_', '-')}={tiny_task[name]}" for name in names]
    command = ["compare", *given, "--methods", "dpfp,dpsgd", "--seeds", "3"]
    command += ["--output", str(tmp_path / "out"), "--dry-run", "--difference", "1.0"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "dpsgd at ε = 3: B = 8" in shown
    assert "6 runs: 2 cells × 3 seeds" in shown
    assert "smallest difference that 3 seeds" in shown
    assert "1 points" in shown
    assert not (tmp_path / "out").exists()


def test_a_comparison_that_names_no_methods_has_opacus_ours_and_the_proved_heads() -> None:
    cells = cells_of(None, 3.0, {"task": "demo"}, None, None)
    names = [label_of(make_plan(cell).to_dict()) for cell in cells]
    proved_heads = ["dpfp release_once", "dpfp moments", "objpert head"]
    assert {"non_private", "dpsgd", "opacus", "rgp", "dpfp", *proved_heads} <= set(names)
    assert not any(name.startswith("jax") for name in names)  # an extra


def test_methods_that_cannot_protect_persons_are_left_out_in_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cells = cells_of(None, 3.0, {"train_file": "a.csv", "user_column": "author"}, None, None)
    assert "opacus" not in [cell["method"] for cell in cells]
    assert "without opacus: opacus bounds each record by itself" in capsys.readouterr().err


def test_preview_of_one_method_says_that_nothing_is_compared(tiny_task: dict[str, Any]) -> None:
    shared = {k: v for k, v in tiny_task.items() if k not in ("method", "epsilon")}
    lines = preview(methods="dpfp", epsilon=8, seeds=5, **shared)
    assert "one method at each ε: nothing is compared" in lines
