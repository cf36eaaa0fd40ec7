"""A trial as Tune hands it to callbacks."""

from typing import Any

from dpfp_ray.plan.plan import Plan
from dpfp_ray.sweeps.trial import RETRIES, Trial


class TuneTrial:
    """What callbacks use of it."""

    def __init__(self, rate: float, status: str = "RUNNING", /, **result: Any) -> None:
        plan = Plan(method="dpfp", learning_rate=rate).bind(records=1000, representation="mean")
        self.ours = Trial(plan, 1.0)
        self.config = {"trial": self.ours.to_config()}
        self.status = status
        self.last_result = result
        self.max_failures = RETRIES
        self.num_failures = 1 + RETRIES if status == "ERROR" else 0

    def is_finished(self) -> bool:
        return self.status in ("TERMINATED", "ERROR")

    def get_error(self) -> Exception:
        return RuntimeError("the worker died")
