"""Spoilt states: nothing may be continued from them but what was written, and nothing may break."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from fuzzing.cases import Case, Inputs
from fuzzing.values import spoil, spoil_bytes

SEED = 7


def states(inputs: Inputs, rng: Random) -> Case:
    name = rng.choice(sorted(KINDS))
    write, read = KINDS[name]
    folder = inputs.world / "states" / name
    if not folder.exists():
        folder.mkdir(parents=True)
        write(folder, inputs)
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    inside = str(path.relative_to(folder))
    content = path.read_bytes()
    spoilt = spoil_bytes(content, rng)
    if name in UNCHECKED and path.suffix == ".json" and rng.random() < 0.5:
        spoilt = json.dumps(spoil(json.loads(content), rng)).encode("utf-8", "surrogatepass")
    good = read(folder, inputs)

    def run(payload: bytes, place: Path) -> str | None:
        from dpfp_ray.system.errors import UserError

        for other in folder.rglob("*"):
            if other.is_file():
                (place / other.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
                (place / other.relative_to(folder)).write_bytes(other.read_bytes())
        (place / inside).write_bytes(payload)
        try:
            found = read(place, inputs)
        except UserError as error:
            lines = str(error).splitlines()
            return None if len(lines) == 1 else f"several lines: {lines[:3]}"
        if found is None or same(found, good) or name in UNCHECKED:
            return None
        return "believed: what was read is not what was written"

    return Case("states", f"{name}: {inside}", spoilt, run)


def same(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def _plan(inputs: Inputs) -> Any:
    from dpfp_ray.plan.plan import Plan

    return Plan(method="dpfp", task="sst2").bind(records=1000, representation="mean")


def _write_run(folder: Path, inputs: Inputs) -> None:
    from dpfp_ray.training.run_folder import save_state
    from tests.support.states import whole_state

    save_state(folder, whole_state(_plan(inputs), 3), SEED)


def _read_run(folder: Path, inputs: Inputs) -> Any:
    from dpfp_ray.training.run_folder import load_state

    return load_state(folder, _plan(inputs))


def _write_trial(folder: Path, inputs: Inputs) -> None:
    from dpfp_ray.sweeps.trial import SweepState
    from tests.support.states import whole_state

    state = SweepState(str(folder))
    state.save_trial("trial-1", whole_state(_plan(inputs), 3), SEED)


def _read_trial(folder: Path, inputs: Inputs) -> Any:
    from dpfp_ray.sweeps.trial import SweepState

    return SweepState(str(folder)).load_trial("trial-1", SEED, _plan(inputs))


def _write_sweep(folder: Path, inputs: Inputs) -> None:
    from dpfp_ray.sweeps.trial import SweepState

    state = SweepState(str(folder))
    state.seed(None)
    state.save_search("key", [{"learning_rate": 0.1, "accuracy": 0.5}])


def _read_sweep(folder: Path, inputs: Inputs) -> Any:
    from dpfp_ray.sweeps.trial import SweepState

    state = SweepState(str(folder))
    return {"seed": state.seed(None), "search": state.load_search("key")}


def _write_audit(folder: Path, inputs: Inputs) -> None:
    from dpfp_ray.auditing.outcome import keep

    keep(folder, {"seed": 2**70, "membership_seed": 3, "plan_hash": "x", "settings": {"a": 1}})


def _read_audit(folder: Path, inputs: Inputs) -> Any:
    from dpfp_ray.auditing.outcome import read_begun

    return read_begun(folder)


def _write_weights(folder: Path, inputs: Inputs) -> None:
    import torch

    from dpfp_ray.training.run_folder import write_weights

    write_weights(folder / "w.safetensors", {"a": torch.arange(9.0)}, "hash")


def _read_weights(folder: Path, inputs: Inputs) -> Any:
    from dpfp_ray.training.run_folder import read_weights

    return read_weights(folder / "w.safetensors", "hash")


def _write_ledger(folder: Path, inputs: Inputs) -> None:
    for path in inputs.ledger.rglob("*"):
        if path.is_file() and path.name != "lock":
            target = folder / path.relative_to(inputs.ledger)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


def _read_ledger(folder: Path, inputs: Inputs) -> Any:
    from dpfp_ray.privacy.ledger import Ledger

    ledger = Ledger(folder)
    ledger.register(["a film", "another"], ["dev"])
    return ledger.to_json()


Write: TypeAlias = Callable[[Path, Inputs], None]
Read: TypeAlias = Callable[[Path, Inputs], Any]
KINDS: dict[str, tuple[Write, Read]] = {
    "run": (_write_run, _read_run),
    "trial": (_write_trial, _read_trial),
    "sweep": (_write_sweep, _read_sweep),
    "audit": (_write_audit, _read_audit),
    "weights": (_write_weights, _read_weights),
    "ledger": (_write_ledger, _read_ledger),
}
# A ledger's files have no checksums: they must break nothing, what they say cannot be checked.
UNCHECKED = ("ledger",)
