"""`dpfp compare`: cells, tables, tuning, and what it refuses."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.cli.compare import parse_settings
from dpfp_ray.cli.main import main
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.sweeps import driver
from dpfp_ray.sweeps.compare import plan_cells
from dpfp_ray.system.errors import UserError
from tests.support.ray_runs import ONE_PROCESS_FLAGS, records

METHODS = "non_private,dpfp,dpsgd"


def flags(task: dict[str, Any], output: Path, *names: str) -> list[str]:
    given = [f"--{name.replace('_', '-')}={task[name]}" for name in names]
    return ["compare", "--output", str(output), "--seed", "5", *ONE_PROCESS_FLAGS, *given]


INPUTS = ("train_file", "dev_file", "model", "representation", "accountant")


@pytest.fixture(scope="module")
def compared(
    tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, ray_session: None
) -> tuple[list[str], Path]:
    output = tmp_path_factory.mktemp("compare") / "out"
    command = flags({**tiny_task, "epochs": 1}, output, *INPUTS, "epochs", "batch_size")
    command += ["--methods", METHODS, "--epsilon", "3,8", "--seeds", "2"]
    assert main(command) == 0
    return command, output


def test_every_cell_is_run_for_every_seed_and_all_files_are_there(
    compared: tuple[list[str], Path],
) -> None:
    plans = [record["plan"] for record in records(compared[1]).values()]
    cells = [("non_private", None), ("dpfp", 3.0), ("dpfp", 8.0), ("dpsgd", 3.0), ("dpsgd", 8.0)]
    runs = Counter((plan["method"], plan["epsilon"]) for plan in plans)
    assert runs == dict.fromkeys(cells, 2), "non-private is run once a seed, whatever the ε"
    results = [f"results.{kind}" for kind in ("csv", "jsonl", "parquet")]
    assert sorted(path.name for path in compared[1].iterdir()) == ["records", *results, "table.md"]
    table = (compared[1] / "table.md").read_text()
    assert [word for word in ("| Non-DP |", "3†", "† nominal") if word not in table] == []


def test_second_run_starts_nothing_and_says_the_same(
    compared: tuple[list[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = records(compared[1])
    monkeypatch.setattr(driver, "connected", lambda *_: pytest.fail("Ray was started"))
    assert main([*compared[0], "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    names = ["non_private", "dpfp", "dpsgd", "dpfp", "dpsgd"]
    expected = list(zip(names, [None, 3.0, 3.0, 8.0, 8.0], [2] * 5, strict=True))
    assert [(row["method"], row["epsilon"], row["runs"]) for row in rows] == expected
    assert all(row["epsilon_gdp"] <= row["epsilon"] for row in rows[1:])
    assert records(compared[1]) == before


def test_the_table_fits_eighty_columns_and_wide_shows_all(
    compared: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(compared[0]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[: 1 + lines.index(next(line for line in lines if line.startswith("majority")))]
    table = rows[next(at for at, line in enumerate(rows) if line.startswith("Method")) :]
    assert len(table) == 7
    assert max(map(len, table)) <= 80
    assert table[0].split()[:3] == ["Method", "ε", "Accuracy"]
    assert any(line.startswith("--wide: ") for line in lines)
    assert main([*compared[0], "--wide"]) == 0
    assert "Measured memory and time" in capsys.readouterr().out


def test_tuning_takes_the_better_and_spends_the_same_on_all(
    tiny_task: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], ray_session: None
) -> None:
    command = flags(tiny_task, tmp_path, *INPUTS, "batch_size", "micro_batches", "epochs")
    command += ["--methods", "non_private,dpfp", "--tune", "2", "--json"]
    assert main(command) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    tried: dict[str, list[dict[str, Any]]] = {"non_private": [], "dpfp": []}
    for record in records(tmp_path).values():
        if record["trial"]["group"] == "tune":
            tried[record["plan"]["method"]].append(record)
    for method, candidates in tried.items():
        assert len(candidates) == 2
        accuracy = {r["plan"]["learning_rate"]: r["metrics"]["accuracy"] for r in candidates}
        chosen = rows[method]["learning_rate"]
        assert accuracy[chosen] == max(accuracy.values()), "ties may go either way"
        assert rows[method]["runs"] == 1


def test_every_row_is_audited_and_its_outcome_is_everywhere(
    tiny_task: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], ray_session: None
) -> None:
    command = [*flags(tiny_task, tmp_path, *INPUTS), "--epochs", "1", "--audit", "20"]
    command += ["--methods", "dpfp:moments,dpsgd:head", "--ledger", str(tmp_path / "ledger")]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "ε ≥ " in shown
    assert "ε ≥ " in (tmp_path / "table.md").read_text()
    assert "everything done to these records (4 uses, 2 of them audits) costs ε = " in shown
    (spent,) = Ledger(tmp_path / "ledger").groups()
    assert [entry.status for entry in spent.entries] == ["finished"] * 4
    assert spent.how == "composition of a fixed list"
    stored = records(tmp_path)
    audits = {r["plan_hash"]: r["audit"] for name, r in stored.items() if name[:5] == "audit"}
    rows = [record for name, record in stored.items() if name[:5] != "audit"]
    assert {row["plan_hash"]: row["statement"]["audit"] for row in rows} == audits
    assert [audit["canaries"] for audit in audits.values()] == [20, 20]


def test_a_setting_reaches_its_own_method_or_variant_only() -> None:
    settings = parse_settings(["dpfp.lr=1e-4", "dpsgd.epochs=4", "dpsgd:head.lr=1e-2"])
    names = ["non_private", "dpfp", "dpsgd", "dpsgd:head"]
    plain, *cells = plan_cells(names, [3.0], {}, None, settings)
    assert "learning_rate" not in plain
    plans = [make_plan(cell) for cell in cells]
    assert [plan.scope for plan in plans] == ["all", "all", "head"]
    assert [plan.learning_rate for plan in plans] == [1e-4, 5e-4, 1e-2]
    assert [plan.epochs for plan in plans][1:] == [4, 4]


@pytest.mark.parametrize("text", ["lr=1e-4", "dpfq.lr=1", "dpfp.lrr=1", "dpfp.lr"])
def test_a_wrong_setting_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match="--set"):
        parse_settings([text])


def test_a_flag_wins_over_the_plan_file_s_epsilon(
    tmp_path: Path, tiny_task: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {k: v for k, v in tiny_task.items() if k.endswith(("file", "model"))}
    lines = "\n".join(f"{k}: {v}" for k, v in {**facts, "epsilon": "[2, 4]"}.items())
    (tmp_path / "plan.yaml").write_text(lines)
    words = ["compare", "--plan", str(tmp_path / "plan.yaml"), "--methods", "dpsgd", "--dry-run"]
    for flags, budgets in (([], "24"), (["--epsilon", "7"], "7")):
        assert main([*words, *flags]) == 0
        said = capsys.readouterr().out
        assert [budget for budget in "247" if f"ε = {budget}" in said] == list(budgets)
