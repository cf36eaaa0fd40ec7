"""The last record of a trial that wrote none itself: stopped by the scheduler, or given up."""

from typing import Any

from ray.tune import Callback

from dpfp_ray.data.disk import NoRoom
from dpfp_ray.sweeps.trial import SETTLED, Trial, settle


class LastRecords(Callback):
    """Follows Tune's events, on the driver: such a trial's own process is gone."""

    def __init__(self, storage: str) -> None:
        self.storage = storage

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if (trial.last_result or {}).get("status") not in SETTLED:
            settle(self.storage, _ours(trial), "stopped", "stopped early by the scheduler")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if not no_room(str(trial.get_error())):  # not its fault: it goes on when there is room
            settle(self.storage, _ours(trial), "failed", given_up(trial))


def given_up(trial: Any) -> str:
    """The last reason of a trial that was restarted as often as is allowed."""
    error = trial.get_error()
    reason = " ".join(str(error or "its process died").split())
    return f"given up after restarts: {reason[-300:]}"


def no_room(reason: str) -> str:
    """What a trial said that found its disk full or its store away; empty: it ended otherwise."""
    _, name, said = " ".join(reason.split()).rpartition(f"{NoRoom.__name__}: ")
    return said if name else ""


def _ours(trial: Any) -> Trial:
    return Trial.from_config(trial.config["trial"])
