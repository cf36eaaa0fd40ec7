"""Draws of a run that do not depend on what the temporary folder is called.

A run's draws are keyed by its plan, and a plan has the paths of its model and files. With these as
they are, a test that counts or measures would see other draws in every run of the suite.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import run_seed

USED = "dpfp_ray.training.loop.run_seed"


@contextmanager
def steady_draws() -> Iterator[None]:
    """Equal seeds give equal draws for equal names of files, in whatever folder."""

    def by_name(seed: int, plan: Plan, *rest: Any) -> int:
        paths = {n: getattr(plan, n) for n in ("model", "train_file", "dev_file")}
        names = {n: Path(path).name for n, path in paths.items() if path}
        return run_seed(seed, replace(plan, **names), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(USED, by_name)
        yield


@contextmanager
def ordinary_draws() -> Iterator[None]:
    """As other processes draw, which the above does not reach: for comparisons with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(USED, run_seed)
        yield
