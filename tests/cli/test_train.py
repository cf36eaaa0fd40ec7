"""`dpfp train`: plans from files and flags, and refusals before anything is loaded."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.cli.main import build_parser
from dpfp_ray.cli.options import plan_from
from dpfp_ray.cli.train import show, time_text
from dpfp_ray.plan.plan import FIELDS, FROM_DATA, Plan
from dpfp_ray.training.record import make_record
from dpfp_ray.training.train import TrainedRun


def plan_of(*argv: str) -> Plan:
    return plan_from(build_parser().parse_args(["train", "--output", "x", *argv]))


def plan_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return str(path)


def test_every_field_of_a_plan_is_a_flag() -> None:
    arguments = ["train", "--output", "x"]
    for name in FIELDS:
        if name not in FROM_DATA:
            arguments += [f"--{name.replace('_', '-')}", "given"]
    parsed = vars(build_parser().parse_args(arguments))
    assert [name for name in FIELDS if parsed.get(name) != "given"] == [*FROM_DATA]


def test_flags_and_a_plan_file_set_fields(tmp_path: Path) -> None:
    plan = plan_of("--batch-size", "64", "--lr", "1e-5", "--labels", "no,yes", "--task", "sst2")
    assert plan == Plan(batch_size=64, learning_rate=1e-5, labels=("no", "yes"), task="sst2")
    path = plan_file(tmp_path, 'method: dpfp\nbatch_size: 64\nlr: 5e-6\nlabels: [no way, "yes"]\n')
    plan = plan_of("--plan", path)
    assert plan == Plan(batch_size=64, learning_rate=5e-6, labels=("no way", "yes"))


@pytest.mark.parametrize("key", ["batch_size", "batch-size", "B"])
def test_flags_win_over_the_plan_file(tmp_path: Path, key: str) -> None:
    plan = plan_of("--plan", plan_file(tmp_path, f"{key}: 64\nepochs: 7\n"), "--batch-size", "128")
    assert (plan.batch_size, plan.epochs) == (128, 7)


def a_result(cost: dict[str, float] | None = None, **privacy: Any) -> TrainedRun:
    costs = {"examples_per_second": 9.0, "train_seconds": 1.0, "eval_seconds": 0.5}
    record: Any = {
        "plan": {"method": "dpfp", "task": "demo"},
        "metrics": {"accuracy": 0.75, "rule": "last epoch"},
        "privacy": {"guarantee": "nominal", "delta": 1e-5, "sigma": 0.4, **privacy},
        "cost": {**costs, "peak_memory_bytes": 2**20, **(cost or {})},
    }
    return TrainedRun(make_record(**record))


def test_a_result_is_shown_with_all_its_epsilons_if_it_has_any(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(a_result(epsilon={"gdp": 1.5, "rdp": None, "pld": "inf"}), as_json=False)
    text = capsys.readouterr().out
    assert "accuracy 0.7500 (last epoch)" in text
    assert "nominal" in text
    assert "gdp 1.500, rdp —, pld inf" in text
    show(a_result(epsilon={}), as_json=False)
    assert "ε" not in capsys.readouterr().out


def test_time_says_what_came_before_training_and_no_rate_of_a_moment() -> None:
    cost = {"prepare_seconds": 598.0, "eval_seconds": 1.0, "examples_per_second": 9e5}
    assert time_text(a_result({**cost, "train_seconds": 0.4})) == (
        "598.0 s of reading, tokenising and encoding, 0.4 s of training, 1.0 s of evaluation"
    )
    longer = time_text(a_result({**cost, "train_seconds": 2.3}))
    assert "2.3 s of training (900,000 examples/s)" in longer


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_age_of_a_process_counts_from_its_start() -> None:
    code = "from dpfp_ray.cli.train import process_seconds; print(process_seconds())"
    began = time.monotonic()
    age = float(subprocess.check_output([sys.executable, "-c", code]))
    assert 0 < age <= time.monotonic() - began + 0.1
