"""The commands that are disturbed, and what must come out of them whatever happens.

A command ends in a folder. `essence` is all in it that must not depend on when, where and how often
it was run: records without their times, weights to the last bit, and the names of all files.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SEED = 5
# Of a place, a time, a process or what befell it; the rest of a record is the same anywhere.
TIMES = {
    "train_seconds",
    "prepare_seconds",
    "eval_seconds",
    "seconds",
    "started_at",
    "reported_at",
    "batch",
    "planned",
    "examples_per_second",
    "peak_memory_bytes",
    "node",
    "pid",
    "resumed_at_step",
    "ledger_entry",
    "warning",  # that a damaged state was passed over
}
SEED_KNOWN = {
    "statement",
    "seed",
    "seed_known",
    "checksum",
}  # what a record says of a seed that was given
STATES = {
    "train": ("resume.pt", "resume.seed"),
    "audit": ("unfinished/resume.pt", "audit.json"),
    "sweep": ("states/*.pt", "sweep.secret", "search-*.json"),
    "compare": ("states/*.pt", "sweep.secret"),
}


@dataclass(frozen=True)
class Work:
    """One command; `name` tells it from others of its verb."""

    verb: str
    name: str
    arguments: tuple[str, ...]

    @property
    def forked(self) -> bool:
        return self.verb in ("train", "audit")

    def command(self, folder: Path, seed: int | None) -> list[str]:
        place = "--storage" if self.verb == "sweep" else "--output"
        given = [] if seed is None else ["--seed", str(seed)]
        return [self.verb, *self.arguments, place, str(folder), *given]

    def states(self, folder: Path) -> list[Path]:
        """What continues it, as far as it is there; a finished sweep needs nothing of it."""
        if self.verb in ("sweep", "compare") and not (folder / "sweep.secret").exists():
            return []
        return sorted(path for pattern in STATES[self.verb] for path in folder.glob(pattern))

    def secret_seed(self, folder: Path) -> int | None:
        """The seed of an unfinished run that nobody was told."""
        try:
            if self.verb == "audit":
                return int(json.loads((folder / "audit.json").read_bytes())["seed"])
            if self.verb == "train" and (folder / "resume.seed").exists():
                return int(json.loads(_content(folder / "resume.seed"))["seed"])
            if self.verb == "train":
                import torch

                return int(torch.load(folder / "resume.pt", weights_only=True)["seed"])
            return int(_content(folder / "sweep.secret"))
        except Exception:  # while it is being written, or damaged, torch fails in many ways
            return None


def all_works(world: Path, verbs: Sequence[str]) -> list[Work]:
    """Commands on a tiny model and tiny data, which are made in `world`."""
    sys.path[:0] = [str(ROOT)]  # for the tests' tiny models
    from tests.support.tiny_models import build_tiny
    from tests.support.tiny_runs import tiny_split, write_csv

    data = {
        "train_file": write_csv(world / "train.csv", 120),
        "dev_file": write_csv(world / "dev.csv", 40, seed=2),
        "model": build_tiny(world / "model", "bert", layers=1, texts=tiny_split(60).texts),
        "representation": "mean",
    }
    budget = {"epsilon": 8.0, "accountant": "gdp"}  # gdp calibrates in no time
    short = {"batch_size": 8, "learning_rate": 1e-3}

    def flags(**values: Any) -> tuple[str, ...]:
        return tuple(
            word
            for key, value in values.items()
            for word in (f"--{key.replace('_', '-')}", str(value))
        )

    def train(name: str, **values: Any) -> Work:
        return Work("train", name, flags(threads=1, **data, **values))

    def audit(name: str, **values: Any) -> Work:
        coins = {"membership_seed": SEED}  # or every audit would have other canaries
        return Work("audit", name, flags(threads=1, **coins, **data, **budget, **values))

    def sweep(name: str, **keys: Any) -> Work:
        plan = {**data, **short, "method": "dpfp", "micro_batches": 2, "epochs": 6}
        plan = {key: value for key, value in plan.items() if key not in keys["parameters"]}
        space = {"name": name, "budget": budget, "plan": plan, **keys}
        path = world / f"{name}.yaml"
        path.write_text(yaml.safe_dump(space))
        return Work("sweep", name, (str(path), "--concurrency", "1"))

    rates = {"learning_rate": {"values": [1e-3, 3e-3, 1e-2]}}
    drawn = {"learning_rate": {"distribution": "log_uniform", "min": 1e-4, "max": 1e-2}}
    shared = flags(**data, accountant="gdp", concurrency=1)
    for setting in ("batch_size=8", "learning_rate=1e-3", "epochs=4"):
        shared += ("--set", f"dpsgd.{setting}")
    made = [
        train("dpfp", method="dpfp", micro_batches=2, epochs=16, **short, **budget),
        train("dpsgd", method="dpsgd", epochs=8, **short, **budget),
        train("best", method="non_private", epochs=10, select="best", **short),
        train("moments", method="dpfp", mode="moments", **budget),
        audit("dpsgd", method="dpsgd", epochs=6, canaries=20, **short),
        audit("moments", method="dpfp", mode="moments", canaries=20),
        sweep("grid", method="grid", parameters=rates),
        sweep("tpe", method="tpe", samples=3, parameters=drawn),
        Work("compare", "audited", ("--methods", "dpsgd,dpfp:moments", "--audit", "10", *shared)),
    ]
    return [work for work in made if work.verb in verbs]


def essence(folder: Path, *, seed_known: bool) -> dict[str, Any]:
    """By file name; `seed_known` whether the run was told its seed, as its twin was."""
    dropped = TIMES if seed_known else TIMES | SEED_KNOWN
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            continue
        if path.suffix == ".json":
            try:
                found[name] = without(json.loads(_content(path)), dropped)
            except ValueError:  # Ray Tune's own files of that ending are pickles
                found[name] = "is no JSON"
        elif path.suffix == ".safetensors":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "is there"
    return found


def _content(path: Path) -> bytes:
    return path.read_bytes().partition(b"dpfp-checksum")[0]


def without(value: Any, dropped: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: without(item, dropped) for key, item in value.items() if key not in dropped}
    return [without(item, dropped) for item in value] if isinstance(value, list) else value


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two essences differ, in words."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            line
            for key in sorted({*one, *other})
            for line in (
                differences(one[key], other[key], f"{where}/{key}")
                if key in one and key in other
                else [f"{where}/{key} is {'left over' if key in one else 'missing'}"]
            )
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for n, (a, b) in pairs for line in differences(a, b, f"{where}/{n}")]
    return [] if one == other else [f"{where}: {str(one)[:60]} for {str(other)[:60]}"]
