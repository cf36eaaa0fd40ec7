"""`compare` from a notebook: data in memory travel to the workers, and a table comes back."""

from pathlib import Path
from typing import Any

import pandas

from dpfp_ray.plan.method_spec import all_specs
from dpfp_ray.sweeps.run_compare import compare
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
