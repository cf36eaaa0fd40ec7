"""What a planned comparison can show, said before it runs."""

from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.cli.main import main
from dpfp_ray.plan.values import make_plan
from dpfp_ray.results.power import seeds_needed, smallest_difference
from dpfp_ray.sweeps.compare_cells import plan_cells
from dpfp_ray.sweeps.preview import preview, runs_line, seeds_line, sensitivity_line


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
