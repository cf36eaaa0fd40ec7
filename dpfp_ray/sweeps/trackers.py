"""`--tracker mlflow|wandb|tensorboard`: a sweep's trials in the tool that a team already uses.

Ray's own callbacks do the work, one run a trial. They are not given to Tune as they are: they
would show `trial/plan/learning_rate` for `learning_rate` and Tune's made-up names for trials, call
trials that failed finished, and write to a folder that goes when the sweep ends. `Tracked` stands
between and shows them a trial as the rest of this package knows it.
"""

import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ray.tune import Callback
from ray.tune.logger import LoggerCallback, TBXLoggerCallback

from dpfp_ray.plan.plan import ACCOUNTANTS
from dpfp_ray.privacy.statement import guarantee
from dpfp_ray.results.store import file_name
from dpfp_ray.sweeps.trial import Trial
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import one_line

# Each tracker's module and what installs it.
PACKAGES = {
    "mlflow": ("mlflow", "mlflow-skinny"),
    "wandb": ("wandb", "wandb"),
    "tensorboard": ("tensorboardX", "tensorboardX"),
}
# Ray's callbacks plot over this field of a result; here that is the training step.
AXIS = "training_iteration"
# The numbers that a trial reports (`experiment.trial_metrics`), without Tune's own.
PLOTTED = (
    "accuracy",
    "dev_loss",
    "loss",
    "epsilon",
    *(f"epsilon_{name}" for name in ACCOUNTANTS),
    "sigma",
    "examples_per_second",
    "train_seconds",
    "epoch",
)


def make_tracker(name: str, sweep: str, storage: str) -> "Tracked":
    """A Tune callback, ready to work; a UserError if a package, key or server is missing."""
    module, package = PACKAGES[name]
    if find_spec(module) is None:
        raise UserError(f"tracker {name} needs a package; pip install {package}")
    folder = tracker_folder(name, storage)
    logging.getLogger(module).setLevel(logging.WARNING)
    makers: dict[str, Callable[[], LoggerCallback]] = {
        "mlflow": lambda: mlflow_callback(sweep, storage, folder),
        "wandb": lambda: wandb_callback(sweep),
        "tensorboard": TBXLoggerCallback,
    }
    inner = makers[name]()
    try:
        inner.setup()  # Tune would do it when all else is up, and fail with pages of traceback
    except Exception as error:
        raise UserError(f"tracker {name} does not start: {one_line(error)}") from None
    return Tracked(name, inner, sweep, storage, folder)


def tracker_folder(name: str, storage: str) -> Path:
    """Where files of the tracker go: beside the records, if these are in a folder."""
    if "://" not in storage:
        return Path(storage) / name
    if name == "tensorboard":
        raise UserError(
            f"tracker tensorboard writes to a folder, but results go to {storage.split('?')[0]}; "
            f"use --storage FOLDER, or --tracker mlflow with MLFLOW_TRACKING_URI"
        )
    return Path(tempfile.gettempdir()) / f"dpfp-{name}-{mark(storage)}"


def mlflow_callback(sweep: str, storage: str, folder: Path) -> LoggerCallback:
    from ray.air.integrations.mlflow import MLflowLoggerCallback

    tags = {"dpfp.store": mark(storage)}

    class Mlflow(MLflowLoggerCallback):
        """Takes up the run that a killed sweep has left open, instead of a second one."""

        def log_trial_start(self, trial: Any) -> None:
            if trial not in self._trial_runs:
                wanted = {**tags, "trial_name": str(trial)}
                clauses = [f"tags.`{key}` = '{value}'" for key, value in wanted.items()]
                open_runs = self.mlflow_util._get_client().search_runs(
                    [str(self.mlflow_util.experiment_id)],
                    " and ".join([*clauses, "attributes.status = 'RUNNING'"]),
                )
                if open_runs:
                    self._trial_runs[trial] = open_runs[0].info.run_id
            super().log_trial_start(trial)

    address = os.environ.get("MLFLOW_TRACKING_URI")
    if not address:
        folder.mkdir(parents=True, exist_ok=True)
        address = f"sqlite:///{folder}/mlflow.db"  # MLflow 3 wants no plain files any more
    return Mlflow(tracking_uri=address, experiment_name=sweep, tags=tags)


def wandb_callback(sweep: str) -> LoggerCallback:
    from ray.air.integrations.wandb import WandbLoggerCallback

    project = os.environ.get("WANDB_PROJECT", "dpfp-ray")
    # A trial that goes on after a crash goes on in its own run. Of our environment, Ray passes only
    # the key on to the processes that write.
    mode = os.environ.get("WANDB_MODE", "online")
    return WandbLoggerCallback(project=project, group=sweep, resume="allow", mode=mode)


class TrackedTrial:
    """What Ray's callbacks may see of a trial: its id, its plan, and what its ε is worth."""

    def __init__(self, trial: Any, sweep: str, storage: str, folder: Path) -> None:
        ours = Trial.from_config(trial.config["trial"])
        self.name = ours.id
        # W&B never frees an id: the same trial of another sweep must have another.
        self.trial_id = f"{file_name(ours.id)}-{mark(sweep, storage)}"
        self.experiment_dir_name = sweep
        self.folder = folder / file_name(ours.id)
        plan = {**ours.plan.to_dict(), "labels": ",".join(ours.plan.labels or ()) or None}
        self.config = self.evaluated_params = {
            **{name: value for name, value in plan.items() if value is not None},
            "noise_multiplier": ours.noise_multiplier,
            "seed_index": ours.seed_index,
            "plan_hash": ours.plan.hash,
            "guarantee": guarantee(ours.plan),
            "sweep": sweep,
        }

    @property
    def local_path(self) -> str:
        """Made only for a tracker that asks."""
        self.init_local_path()
        return str(self.folder)

    def init_local_path(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def __str__(self) -> str:
        return self.name


class Tracked(Callback):
    """Passes Tune's events on. A tracker that breaks down costs a warning, never a trial."""

    def __init__(
        self, name: str, inner: LoggerCallback, sweep: str, storage: str, folder: Path
    ) -> None:
        self.name = name
        self.inner = inner
        self.sweep = sweep
        self.storage = storage
        self.folder = folder
        self.views: dict[str, TrackedTrial] = {}

    def setup(
        self,
        stop: Any = None,
        num_samples: int | None = None,
        total_num_samples: int | None = None,
        **info: Any,
    ) -> None:
        self._tell(self.inner.setup)  # again: through Ray Client this is another process

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._tell(self.inner.log_trial_start, self._view(trial))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        measured = measurements(result)
        if measured:
            self._tell(self.inner.log_trial_result, iteration, self._view(trial), measured)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # For Tune a trial that reports its own failure has done its work.
        failed = (trial.last_result or {}).get("status") == "failed"
        self._tell(self.inner.log_trial_end, self._view(trial), failed=failed)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._tell(self.inner.log_trial_end, self._view(trial), failed=True)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self._tell(self.inner.on_experiment_end, trials)

    def _view(self, trial: Any) -> TrackedTrial:
        if trial.trial_id not in self.views:
            view = TrackedTrial(trial, self.sweep, self.storage, self.folder)
            self.views[trial.trial_id] = view
        return self.views[trial.trial_id]

    def _tell(self, what: Callable[..., Any], *arguments: Any, **keys: Any) -> None:
        try:
            what(*arguments, **keys)
        except Exception as error:
            warnings.warn(f"tracker {self.name} missed an event: {one_line(error)}", stacklevel=2)


def measurements(result: dict[str, Any]) -> dict[str, float]:
    """What there is to plot of a report; nothing for a trial that only says that it failed."""
    if "step" not in result:
        return {}
    values = {name: float(result[name]) for name in PLOTTED if result.get(name) is not None}
    return {AXIS: int(result["step"]), **values}


def mark(*texts: str) -> str:
    return blake2b("\n".join(texts).encode(), digest_size=4).hexdigest()
