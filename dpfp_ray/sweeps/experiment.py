"""One Tune experiment: trials as Tune runs them, and the last record of those that write none."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import ray.tune
from ray.tune import Callback

from dpfp_ray.sweeps.state import ray_storage
from dpfp_ray.sweeps.trial import (
    RETRIES,
    SETTLED,
    Trial,
    drawn_before_failure,
    given_up,
    has_restarts_left,
    settle,
)
from dpfp_ray.sweeps.trial_process import Shared, Sweep, run_trial
from dpfp_ray.system.cache import NoRoom
from dpfp_ray.system.errors import UserError

if TYPE_CHECKING:
    from dpfp_ray.sweeps.live import LiveTable


def run_experiment(
    sweep: Sweep,
    shared: Shared,
    tune_config: Any,
    param_space: dict[str, Any] | None,
    table: "LiveTable",
    listeners: list[Any],
    *,
    forget: bool,
) -> None:
    """Run what `tune_config` and `param_space` ask for; `table` and `listeners` are told of it.

    `forget` deletes what Tune keeps of it on this machine.
    """
    alone = sweep.workers == 1
    check_deadlock(tune_config.scheduler, sweep.workers)
    resources = {"CPU": float(sweep.cpus_per_worker), "GPU": sweep.gpus_per_worker}
    trainable = ray.tune.with_resources(
        # Through the object store: Tune writes a trial's config to disk, this it does not.
        ray.tune.with_parameters(run_trial, sweep=sweep, shared=shared),
        # Ray Train reserves what workers need; the trial itself must ask for something, too.
        resources if alone else {"memory": 1.0},
    )
    tune_config.reuse_actors = alone
    tune_config.trial_dirname_creator = short_name
    callbacks: list[Any] = [LastRecords(sweep.storage), table, *listeners]
    name = uuid4().hex[:12]
    tuner = ray.tune.Tuner(
        trainable,
        param_space=param_space,
        tune_config=tune_config,
        run_config=ray.tune.RunConfig(
            name=name,
            **ray_storage(sweep.storage, "tune"),
            verbose=0,
            callbacks=callbacks,
            failure_config=ray.tune.FailureConfig(max_failures=RETRIES),
        ),
    )
    try:
        with table:
            ended = tuner.fit()
        for said in filter(None, (no_room(str(error)) for error in ended.errors)):
            raise UserError(said)
    finally:
        if forget:
            forget_artifacts(name)


class Uncopied(list[Any]):
    """A list that nobody changes. Tune copies its search space for each trial, with the list of all
    trials in it: of 400 closed-form trials a sixth of the driver's time."""

    def __deepcopy__(self, memo: Any) -> "Uncopied":
        return self


def each_of(trials: Iterable[Trial]) -> dict[str, Any]:
    """The search space that is these trials."""
    return {"trial": ray.tune.grid_search(Uncopied(trial.to_config() for trial in trials))}


class LastRecords(Callback):
    """Follows Tune's events, on the driver: such a trial's own process is gone."""

    def __init__(self, storage: str) -> None:
        self.storage = storage

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if (trial.last_result or {}).get("status") not in SETTLED:
            settle(self.storage, _ours(trial), "stopped", "stopped early by the scheduler")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # A full disk is not its fault: it goes on when there is room.
        if not (has_restarts_left(trial) or no_room(str(trial.get_error()))):
            ours = _ours(trial)
            drawn = drawn_before_failure(self.storage, ours)
            settle(self.storage, ours, "failed", given_up(trial), drawn)


def no_room(reason: str) -> str:
    """What a trial said that found its disk full or its store away; empty: it ended otherwise."""
    _, name, said = " ".join(reason.split()).rpartition(f"{NoRoom.__name__}: ")
    return said if name else ""


def _ours(trial: Any) -> Trial:
    return Trial.from_config(trial.config["trial"])


def check_deadlock(scheduler: Any, workers: int) -> None:
    """A scheduler that stops trials with workers of their own hangs Ray 2.60 without a dashboard:
    the stopped trial's placement group is never freed."""
    from ray._private.worker import get_dashboard_url

    if scheduler is not None and workers > 1 and not get_dashboard_url():
        raise UserError(
            "scheduler asha with several workers needs Ray's dashboard (Ray would hang without "
            "it); install ray[default] or use scheduler: none"
        )


def forget_artifacts(experiment: str) -> None:
    """Delete Tune's copies of an experiment's results from Ray's session on this machine."""
    from ray.train.constants import _get_ray_train_session_dir

    for folder in Path(_get_ray_train_session_dir()).glob(f"*/{experiment}"):
        shutil.rmtree(folder, ignore_errors=True)


def short_name(trial: Any) -> str:
    """Tune's folder for a trial: without a name of ours it makes one of the whole config."""
    return str(trial.trial_id)
