"""What a run leaves of private records is its owner's only, whatever the umask."""

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray import Plan, train
from dpfp_ray.system.signals import Interrupted
from dpfp_ray.training.console import Silent
from dpfp_ray.training.loop import Event, Step
from dpfp_ray.training.run_folder import RESUME

# Between them: tokens, representations, rows of all layers, outputs of frozen layers.
KINDS: dict[str, dict[str, Any]] = {
    "moments of all layers": {"method": "dpfp", "mode": "moments", "representation": "layers"},
    "moments": {"method": "dpfp", "mode": "moments"},
    "top": {"method": "dpsgd", "scope": "top:1"},
}


@pytest.fixture(params=[0o000, 0o022], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    """Of all below a folder that are not as they should be."""
    return {
        str(path.relative_to(folder)): oct(stat.S_IMODE(path.stat().st_mode))
        for path in folder.rglob("*")
        if stat.S_IMODE(path.stat().st_mode) != (0o700 if path.is_dir() else 0o600)
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_caches_and_the_ledger_are_private(
    kind: str, umask: None, tmp_path: Path, fresh_cache: Path, tiny_task: dict[str, Any]
) -> None:
    dropped = {"micro_batches"}
    if "mode" in KINDS[kind]:  # one release of all records
        dropped |= {"batch_size", "epochs", "learning_rate"}
    values = {k: v for k, v in tiny_task.items() if k not in dropped} | KINDS[kind]
    fresh_cache.mkdir(mode=0o755)  # a folder of the user's own choice, which is open
    train(Plan(**values), ledger=tmp_path / "ledger", threads=1, reporter="silent")
    assert len(list(fresh_cache.rglob("*"))) > 3
    assert modes(fresh_cache) == {}
    assert modes(tmp_path / "ledger") == {}


@pytest.mark.slow
def test_the_state_of_a_stopped_run_is_private(
    umask: None, tmp_path: Path, tiny_task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Silent, event: Event) -> None:
        if isinstance(event, Step) and event.done == 9:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Silent, "show", stop)
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(Plan(**tiny_task), output=folder, threads=1, reporter="silent", save_every=0)
    assert (folder / RESUME).exists()
    assert modes(folder) == {}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
