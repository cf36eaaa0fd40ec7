"""A sweep on Ray whose unit is the person: trials, ledger, tables, report and card say so."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.reports.page import report
from dpfp_ray.sweeps.sweep import FinishedSweep, sweep
from tests.support.ray_runs import ONE_PROCESS, SEED, write_space
from tests.support.tiny_runs import write_person_csv

SIZES = (50, 1, 2, 1, 7, 3, 1, 12, 1, 1, 5, 2, 1, 1, 9, 1, 3, 1, 1, 2)


@dataclass(frozen=True)
class Swept:
    found: FinishedSweep
    space: Path
    ledger: Path


@pytest.fixture(scope="module")
def swept(
    tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, ray_session: None
) -> Swept:
    folder = tmp_path_factory.mktemp("persons")
    files = {
        "train_file": write_person_csv(folder / "train.csv", SIZES),
        "dev_file": write_person_csv(folder / "dev.csv", (3, 20, 1), seed=2, prefix="dev "),
    }
    task = {k: v for k, v in tiny_task.items() if k not in ("micro_batches", "accountant")}
    task |= {"method": "dpsgd", "scope": "head", "accountant": "pld", "batch_size": 5, "epochs": 4}
    space = write_space(
        folder / "s.yaml",
        task | files,
        method="grid",
        parameters={"max_per_user": {"values": [2, 50]}},
        plan={"user_column": "author"},
    )
    ledger = folder / "ledger"
    options: Any = {"seed": SEED, **ONE_PROCESS}
    return Swept(sweep(space, storage=folder / "runs", ledger=ledger, **options), space, ledger)


def test_trials_count_persons_and_keep_at_most_k_of_each(swept: Swept) -> None:
    records = {r["plan"]["max_per_user"]: r for r in swept.found.records}
    assert sorted(records) == [2, 50]
    for most, record in records.items():
        assert record["finished"]
        assert record["plan"]["records"] == len(SIZES)
        assert record["privacy"]["delta"] == 1 / (2 * len(SIZES))
        assert record["privacy"]["p"] == 5 / len(SIZES)
        unit = f"one person, with all of their records (column 'author', at most {most} "
        assert unit in record["statement"]["unit"]
        assert record["privacy"]["epsilon"]["pld"] <= 8.0
    # Both have the noise of so many persons, whatever they wrote; and other rows to learn from.
    one, other = records.values()
    assert one["privacy"]["noise_multiplier"] == other["privacy"]["noise_multiplier"]
    assert one["history"][-1]["dev"] != other["history"][-1]["dev"]
    assert {row["unit"] for row in swept.found.rows} == {"person"}


def test_ledger_and_report_say_persons(swept: Swept, tmp_path: Path) -> None:
    (spent,), (cost,) = Ledger(swept.ledger).groups(), swept.found.costs
    assert spent.holds_for == "one person"
    assert {entry.use.unit for entry in spent.entries} == {"person"}
    assert len(spent.used) == 2
    assert spent.epsilon > 8.0  # two trials on the same persons
    assert "one person" in cost.sentence()
    made = report(swept.found.storage, output=tmp_path / "page", ledger=swept.ledger)
    assert made.index is not None
    page = made.index.read_text(encoding="utf-8")
    assert "train.csv (per person)" in page[: page.index("<nav")]
    assert "one person, with all of their records" in page
    assert "the unit is one record" not in page
    assert "one record" not in (tmp_path / "page/tables/main.md").read_text()
