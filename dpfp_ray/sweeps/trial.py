"""One trial as data: which plan, which repetition, and how its seed follows from the sweep's."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import derived_seed

# States of a record that need not be run again.
SETTLED = ("finished", "stopped", "refused", "failed")


@dataclass(frozen=True)
class Trial:
    """A bound, calibrated plan and the number of its repetition (`seed_index`)."""

    plan: Plan
    noise_multiplier: float
    seed_index: int = 0
    group: str = ""

    @property
    def id(self) -> str:
        """The same for the same trial of the same sweep, whenever and wherever it runs."""
        return f"{self.group + '-' if self.group else ''}{self.plan.hash}-{self.seed_index}"

    def seed(self, sweep_seed: int) -> int:
        """Secret like the sweep's; independent of the order in which trials happen to run.

        Trials on one release must see the same release: its own key (`one_release.release_id`)
        keeps different releases apart, so their trials share a seed, and the release is paid once.
        """
        if self.plan.one_release:
            return derived_seed(sweep_seed, f"release {self.seed_index}")
        return derived_seed(sweep_seed, f"trial {self.id}")

    def to_config(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "plan": self.plan.to_dict()}

    @staticmethod
    def from_config(config: dict[str, Any]) -> "Trial":
        values = dict(config["plan"])
        if values.get("labels") is not None:
            values["labels"] = tuple(values["labels"])  # JSON and YAML know no tuples
        return Trial(**{**config, "plan": Plan(**values)})
