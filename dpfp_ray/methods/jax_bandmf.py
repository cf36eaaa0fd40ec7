"""BandMF by jax-privacy, for a linear head on frozen rows (`pip install 'dpfp-ray[jax]'`).

Amplified banded matrix factorisation (Choquette-Choo et al. 2023, arXiv 2306.08153): the noise of
up to b steps is correlated so that it cancels in sums of steps, which is what a model is. Records
are put into b groups at random; group j is drawn from in steps j, j + b, …, each record with the
chance p = b B/D. So no record is in two of b steps in a row, and the whole is worth ⌈T/b⌉ Poisson
sampled Gaussian releases of rate p: that is what our accountant is asked for.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dpfp_ray.methods.jax_privacy import SPEC as DP_SGD
from dpfp_ray.methods.jax_privacy import JaxPrivacy
from dpfp_ray.methods.parts.base import noise_of_minimum
from dpfp_ray.plan.method_spec import ByLibrary

if TYPE_CHECKING:
    from dpfp_ray.plan.plan import Plan

MOST_BANDS = 4  # with more, less of the noise is saved than amplification loses at our rates
OPTIMIZED = 500  # steps of the library's own optimizer of the matrix, its default


def bands(plan: Plan) -> int:
    """b: no more than keep p at 1."""
    return max(1, min(MOST_BANDS, plan.D // plan.B, plan.steps))


class JaxBandMf(JaxPrivacy):
    def strategy(self) -> Any:
        return strategy(self.plan.steps, bands(self.plan))


@functools.cache
def strategy(steps: int, count: int) -> Any:
    import numpy as np
    from jax_privacy.matrix_factorization import toeplitz

    found = toeplitz.optimize_banded_toeplitz(n=steps, bands=count, max_optimizer_steps=OPTIMIZED)
    return np.asarray(found)


def noise_to_signal(plan: Plan, noise_multiplier: float, width: int, classes: int) -> float:
    """As for independent noise, which is more than what is left of this in the sum of the steps."""
    sigma = noise_multiplier * plan.D / (plan.B * math.sqrt(plan.steps))
    return noise_of_minimum(sigma, width, plan.D)


assert DP_SGD.by_library is not None
SPEC = replace(
    DP_SGD,
    method="jax_bandmf",
    label="BandMF",
    by_library=ByLibrary(
        library=DP_SGD.by_library.library,
        make=JaxBandMf,
        rate=lambda plan: min(1.0, bands(plan) * plan.B / plan.D),
        releases=lambda plan, steps: -(-steps // bands(plan)),
        claim="jax-privacy draws from one of b groups in turn, each record with the chance b B/D "
        "by itself, clips each record's gradient to C, and correlates Gaussian noise by a banded "
        "matrix whose columns have norm 1",
    ),
    noise_to_signal=noise_to_signal,
)
