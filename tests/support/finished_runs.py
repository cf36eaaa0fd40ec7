"""Small finished runs of every method and scope, for tests of what comes after training."""

from pathlib import Path
from typing import Any

from dpfp_ray.plan.values import make_plan
from dpfp_ray.training.train import TrainedRun, train
from tests.support.tiny_runs import tiny_split

KINDS: dict[str, dict[str, Any]] = {
    "non_private": {"method": "non_private", "epsilon": None},
    **{
        f"non_private {scope}": {"method": "non_private", "epsilon": None, "scope": scope}
        for scope in ("head", "bias", "lora", "top:1")
    },
    "dpfp": {"micro_batches": 2},
    **{
        f"dpfp {scope}": {"micro_batches": 2, "scope": scope}
        for scope in ("head", "bias", "lora", "top:1")
    },
    "dpsgd": {"method": "dpsgd"},
    "dpsgd head": {"method": "dpsgd", "scope": "head"},
    "dpsgd bias": {"method": "dpsgd", "scope": "bias"},
    "dpsgd lora": {"method": "dpsgd", "scope": "lora", "learning_rate": 1e-2},
    "dpsgd top:1": {"method": "dpsgd", "scope": "top:1"},
    "rgp": {"method": "rgp"},
    "rgp head": {"method": "rgp", "scope": "head"},
    "moments": {"mode": "moments"},
    "release_once": {"mode": "release_once"},
    "release_once clip": {"mode": "release_once", "scaling": "clip", "clip": 0.5},
    "objpert": {"method": "objpert", "accountant": "pld"},
    "public": {"method": "public", "epsilon": None},
    **{
        f"distil {scope}": {"method": "distil", "scope": scope, "accountant": "pld"}
        for scope in ("all", "bias", "lora")
    },
    "moments layers": {
        "mode": "moments",
        "representation": "layers",
        "centring": "dev",
        "ridge": "auto",
    },
}
STEPS = ("batch_size", "epochs", "learning_rate")


def finished(task: dict[str, Any], kind: str, folder: Path, **changes: Any) -> TrainedRun:
    """A run of `kind` on the tiny task, written to `folder`."""
    values = {key: value for key, value in task.items() if key not in ("method", "micro_batches")}
    values |= {"method": "dpfp"} | KINDS[kind] | changes
    if values.get("mode") or values["method"] in ("objpert", "public"):  # they have no steps
        values = {key: value for key, value in values.items() if key not in STEPS}
    if values["method"] == "distil":
        public = folder.parent / "public.txt"
        texts = tiny_split(40, seed=6).texts
        public.write_text("".join(f"{text} number {row}\n" for row, text in enumerate(texts)))
        values |= {"teacher_model": values["model"], "public_file": str(public)}
    if values["method"] in ("non_private", "public"):
        values = {k: v for k, v in values.items() if k not in ("epsilon", "accountant")}
    return train(make_plan(values), output=folder, seed=5, threads=1, reporter="silent")
