"""Sweeps for tests: run here, or as a command that a test can kill."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.cluster import RayOptions
from dpfp_ray.sweeps.driver import Runner
from dpfp_ray.sweeps.space import read_search_space
from dpfp_ray.sweeps.sweep import run_sweep
from dpfp_ray.sweeps.trial import InputsOnce, Trial, bind_trial
from dpfp_ray.training.prepare import Prepared
from tests.support.tiny_runs import run_with

SEED = 5
PATIENCE = 1800  # seconds; a busy machine is no failure
# Trials one after the other in one process: each process first spends seconds on imports.
ONE_PROCESS = {"concurrency": 1, "cpus_per_worker": 1}
ONE_PROCESS_FLAGS = ("--concurrency", "1", "--cpus-per-worker", "1")


def run_here(
    trials: list[Trial], storage: Path, *, scheduler: Any = None, **options: Any
) -> dict[str, dict[str, Any]]:
    """Run `trials` on the session's Ray; their records by id."""
    options = {"seed": SEED, **ONE_PROCESS, **options}
    with Runner("test", str(storage), RayOptions(**options), InputsOnce()) as runner:
        runner.run(trials, varied=["learning_rate"], scheduler=scheduler)
    return records(storage)


def sweep_here(space: Path, storage: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """Run a search space on the session's Ray; its records by id."""
    parsed = read_search_space(space, {})
    options = {"seed": SEED, **ONE_PROCESS, **options}
    with Runner("test", str(storage), RayOptions(**options), InputsOnce()) as runner:
        run_sweep(parsed, runner)
    return records(storage)


def records(storage: Path) -> dict[str, dict[str, Any]]:
    return {record["trial"]["id"]: record for record in Store(storage).records()}


def saved_trials(storage: Path, count: int) -> list[dict[str, Any]]:
    """Trials that run, have done an epoch and have saved their state; if there are `count`."""
    saved = {path.stem for path in storage.glob("states/*.pt") if path.name[0] != "."}
    facts = [record["trial"] for record in records(storage).values()]
    running = [f for f in facts if f["status"] == "running" and f["id"] in saved]
    return running if len({f["node"] for f in running}) >= count else []


def write_space(path: Path, task: dict[str, Any], **keys: Any) -> Path:
    """A search space on the tiny task; fields that it varies are not fixed."""
    budget = {name: task[name] for name in ("epsilon", "accountant")}
    varied = keys["parameters"]
    plan = {k: v for k, v in task.items() if k not in budget and k not in varied}
    if "rows_per_micro_batch" in varied:
        plan.pop("micro_batches", None)
    content = {"name": "tiny", "budget": budget, "plan": plan | keys.pop("plan", {}), **keys}
    path.write_text(yaml.safe_dump(content))
    return path


def trial(task: dict[str, Any], seed_index: int = 0, **changes: Any) -> Trial:
    return bind_trial({**task, **changes}, InputsOnce(), seed_index)


def run_plainly(trials: list[Trial], seed: int = SEED) -> dict[str, dict[str, Any]]:
    """The same trials in this very process, without Ray; their records by id."""
    inputs, found = InputsOnce(), {}
    for one in trials:
        prepared = Prepared(one.plan, inputs(one.plan), one.noise_multiplier)
        found[one.id], _ = run_with(prepared, seed=one.seed(seed))
    return found


def measured(record: dict[str, Any]) -> Any:
    """All of a record that must not depend on where, when and how often it was run."""
    history = [{k: v for k, v in e.items() if k != "train_seconds"} for e in record["history"]]
    return {
        "finished": record["finished"],
        "history": history,
        "metrics": record["metrics"],
        "privacy": record["privacy"],
    }


class Command:
    """`dpfp …` in a session of its own, so that all it has started can be found and ended."""

    def __init__(self, *arguments: str, save_seconds: float = 0.2) -> None:
        environment = {
            **os.environ,
            "DPFP_SAVE_SECONDS": str(save_seconds),
            "RAY_AUTH_MODE": "disabled",
            "RAY_object_store_memory": str(100 * 2**20),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dpfp_ray.cli", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def kill(self) -> None:
        """SIGKILL to the driver, and to all that it started: what losing the machine is like."""
        for process in (self.process.pid, *self.others()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.communicate()
        wait_for(lambda: not self.others(), "Ray's processes to end")

    def interrupt(self) -> tuple[int, str]:
        os.killpg(self.process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        return self.end()

    def end(self) -> tuple[int, str]:
        """Exit code and stderr; all that it started is gone."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        wait_for(lambda: not self.others(), "Ray's processes to end")
        return self.process.returncode, errors

    def others(self) -> list[int]:
        """Living processes of this command's session."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    state, session = _state_and_session(entry)
                    if session == self.process.pid and state != "Z":
                        found.append(int(entry.name))
        return found


def _state_and_session(process: Path) -> tuple[str, int]:
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[3])


def wait_for(holds: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        result = holds()
        if result:
            return result
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds} s for {what}")


def run_script(name: str, *arguments: str, patience: float = PATIENCE) -> Any:
    """What `tests/NAME.py` prints as JSON on its last line."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{name}", *arguments],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=patience,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
