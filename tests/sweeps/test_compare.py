"""The runs of a comparison, and the comparison itself."""

from pathlib import Path
from typing import Any

import pandas
import pytest

from dpfp_ray.cli.main import main
from dpfp_ray.plan.method_spec import all_specs
from dpfp_ray.plan.values import make_plan
from dpfp_ray.results.power import seeds_needed, smallest_difference
from dpfp_ray.sweeps.compare import (
    bind_cells,
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
from tests.support.ray_runs import ONE_PROCESS, records
from tests.support.tiny_runs import tiny_split

METHODS = [spec.title.replace(" ", ":") for spec in all_specs().values()]


def test_data_in_memory_are_compared_and_audited(
    tiny_task: dict[str, Any], tmp_path: Path, ray_session: None
) -> None:
    split = tiny_split(120)
    frame = pandas.DataFrame({"review": split.texts, "stars": split.labels})
    table = compare(
        data=frame,
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
    found = records(tmp_path / "out")
    assert {record["plan"]["train_file"] for record in found.values()} == {"memory:data"}
    shown = table.to_pandas()
    assert list(shown["method"]) == ["non_private", "dpsgd head"]
    assert shown["runs"].tolist() == [1, 1]
    assert shown["verdict"].notna().all()
    assert "<html" in table.report(tmp_path / "page").index.read_text(encoding="utf-8")
    assert repr(table).startswith("| method |")


def test_every_method_is_a_trial_that_finishes(
    tiny_task: dict[str, Any], tmp_path: Path, ray_session: None
) -> None:
    names = ("train_file", "dev_file", "model", "representation", "batch_size")
    shared = {name: tiny_task[name] for name in names}
    table = compare(
        methods=METHODS, epsilon=[8], epochs=1, output=tmp_path / "out", **shared, **ONE_PROCESS
    )
    errors = [record.get("error") for record in records(tmp_path / "out").values()]
    assert errors == [None] * len(METHODS)
    assert table.to_pandas()["accuracy"].notna().all()


def test_repetitions_come_round_by_round(tiny_task: dict[str, Any]) -> None:
    cells = [tiny_task, {**tiny_task, "epsilon": 3.0}]
    trials = bind_cells(cells, 2, InputsOnce())
    assert [(t.plan.epsilon, t.seed_index) for t in trials] == [(8, 0), (3, 0), (8, 1), (3, 1)]


FREE = ("batch_size", "micro_batches", "learning_rate")


def test_tuning_starts_from_the_papers_settings(tiny_task: dict[str, Any]) -> None:
    cell = {k: v for k, v in tiny_task.items() if k not in FREE}
    found = drawn(cell, 6, InputsOnce())
    first: Trial = found[0][1]
    assert (first.plan.B, first.plan.M, first.plan.learning_rate) == (32, 32, 5e-6)
    assert len({trial.id for _, trial in found}) == 6
    assert all(trial.group == "tune" for _, trial in found)
    assert len({trial.plan.B for _, trial in found}) > 1
    assert all(trial.plan.B <= 120 * trial.plan.M for _, trial in found), "only what can run"


def test_tuning_leaves_alone_what_the_user_has_fixed(tiny_task: dict[str, Any]) -> None:
    cell = {k: v for k, v in tiny_task.items() if k != "learning_rate"}
    found = drawn(cell, 4, InputsOnce())
    assert {(trial.plan.B, trial.plan.M) for _, trial in found} == {(8, 2)}
    assert len({trial.plan.learning_rate for _, trial in found}) == 4


@pytest.mark.slow
def test_every_method_has_a_space_to_tune_in(tiny_task: dict[str, Any], tmp_path: Path) -> None:
    free = (*FREE, "epsilon", "accountant", "epochs")
    cell = {k: v for k, v in tiny_task.items() if k not in free}
    for method in ("non_private", "dpsgd", "rgp"):
        assert len(drawn({**cell, "method": method}, 3, InputsOnce())) == 3


def plans(methods: list[str], budgets: list[float]) -> list[Any]:
    return [make_plan(cell) for cell in plan_cells(methods, budgets, {}, None)]


def test_the_line_has_the_number_of_the_power_analysis() -> None:
    found = smallest_difference(rows=872, seeds=5, methods=3).smallest_difference
    assert found is not None
    line = sensitivity_line(plans(["non_private", "dpfp", "dpsgd"], [3.0]), 5, 872)
    assert f"5 seeds on 872 dev rows show: {100 * found:.1f} points" in line


def test_more_budgets_leave_less_level_for_each() -> None:
    one = sensitivity_line(plans(["dpfp", "dpsgd"], [3.0]), 5, 872)
    two = sensitivity_line(plans(["dpfp", "dpsgd"], [3.0, 8.0]), 5, 872)
    assert float(one.split("show: ")[1].split()[0]) < float(two.split("show: ")[1].split()[0])


def test_one_seed_is_said_to_name_no_winner() -> None:
    assert "1 seed names no winner" in sensitivity_line(plans(["dpfp", "dpsgd"], [3.0]), 1, 872)


def test_seeds_for_a_difference_or_that_none_are_enough() -> None:
    both = plans(["dpfp", "dpsgd"], [3.0])
    assert f"{seeds_needed(0.05, rows=872)} seeds" in seeds_line(both, 872, 5.0)
    assert "not even" in seeds_line(both, 872, 0.1)


def test_runs_are_counted_with_tuning_and_audits() -> None:
    assert runs_line(3, 5, 8, 1000) == "42 runs: 3 cells × 5 seeds + 3 × 8 for tuning + 3 audits"


def test_a_dry_run_reads_the_data_and_writes_nothing(
    tiny_task: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("train_file", "dev_file", "model", "representation", "accountant", "batch_size")
    given = [f"--{name.replace('_', '-')}={tiny_task[name]}" for name in names]
    output = ["--output", str(tmp_path / "out")]
    command = ["compare", *given, *output, "--methods", "dpfp,dpsgd", "--seeds", "3"]
    assert main([*command, "--dry-run", "--difference", "1.0"]) == 0
    shown = capsys.readouterr().out
    assert "dpsgd at ε = 3: B = 8" in shown
    assert "6 runs: 2 cells × 3 seeds" in shown
    assert "smallest difference that 3 seeds" in shown
    assert "1 points" in shown
    assert not (tmp_path / "out").exists()


def test_nothing_is_run_without_a_place_for_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--task", "demo"]) == 2
    assert "--output is missing" in capsys.readouterr().err


def test_preview_of_one_method_says_that_nothing_is_compared(tiny_task: dict[str, Any]) -> None:
    shared = {k: v for k, v in tiny_task.items() if k not in ("method", "epsilon")}
    lines = preview(methods="dpfp", epsilon=8, seeds=5, **shared)
    assert lines[-1] == "one method at each ε: nothing is compared"


def test_a_flag_reaches_the_methods_that_know_it() -> None:
    common = {"epochs": 2, "micro_batches": 4, "batch_size": 8, "ridge": 0.5, "accountant": "gdp"}
    methods = ["non_private", "dpfp", "dpfp:moments", "dpsgd"]
    plans = [make_plan(cell) for cell in plan_cells(methods, [3.0], common, None)]
    assert [plan.epochs for plan in plans] == [2, 2, 1, 2]
    assert [plan.M for plan in plans] == [1, 4, 1, 1]
    assert [plan.ridge for plan in plans] == [None, None, 0.5, None]
    assert [plan.mode for plan in plans] == ["paper", "paper", "moments", "paper"]


def test_match_gives_all_the_same_batch() -> None:
    cells = plan_cells(["non_private", "dpfp", "dpsgd", "rgp"], [3.0], {}, "batch")
    assert {make_plan(cell).batch_size for cell in cells} == {32}


def test_scopes_are_variants_and_lora_flags_reach_lora_only() -> None:
    names = ["dpsgd:bias", "dpsgd:lora", "dpsgd:top:2", "dpfp:bias"]
    cells = plan_cells(names, [3.0], {"lora_rank": 4, "clip_style": "automatic"}, None)
    plans = [make_plan(cell) for cell in cells]
    assert [plan.scope for plan in plans] == ["bias", "lora", "top:2", "bias"]
    assert [plan.lora_rank for plan in plans] == [None, 4, None, None]
    assert [plan.clip_style for plan in plans] == ["automatic"] * 3 + ["abadi"]
    assert [space_name(cell) for cell in cells] == ["dpsgd_bias", "dpsgd_lora", "dpsgd_top", "dpfp"]


@pytest.mark.parametrize("name", ["dpsgd:top:K", "dpsgd:top:0", "rgp:bias", "objpert:lora"])
def test_a_scope_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UserError):
        plan_cells([name], [3.0], {}, None)
