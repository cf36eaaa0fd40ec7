"""ε of a plan after t steps, under three accountants.

Every method we account for is the same mechanism: n Gaussian releases of sensitivity C and standard
deviation σ, each on a Poisson sample of rate p. Only p and n differ (DP-FP: p = B/(M D), n = T M;
DP-SGD and RGP: M = 1). Where each record is in exactly one batch of an epoch (`sampling:
allocation`), `allocation.py` takes the place of Poisson's theorems. What the accountants assume:

    gdp   the paper's central limit theorem (Bu et al. 2020). Asymptotic, *not* an upper bound.
    rdp   Rényi DP of the sampled Gaussian (Mironov et al. 2019). An upper bound, not tight.
    pld   privacy loss distributions (Doroshenko et al. 2022). An upper bound, tight; the default.
          Ours (`pld.py`), because dp-accounting's is too slow to calibrate with; equal to it.

All of them assume that a record's presence in a sample is hidden, which DP-FP's list of noisy rows
does not do: see `statement.py` for what that makes of the number.

Randomised response for labels, and its exact composition with one Gaussian release.

k-ary randomised response (Warner 1965; Kairouz et al. 2016): keep the label with probability
q = e^{ε_L} / (e^{ε_L} + K − 1), else say one of the others, each with r = 1 / (e^{ε_L} + K − 1).
Nothing that it says is more than e^{ε_L} times likelier under one label than under another, so it
is (ε_L, 0)-DP for the label, in the local model.

The m labels of a person are randomised with ε_L/m each: all of them together are (ε_L, 0)-DP, and
every pair of (ε_L, 0)-close distributions is a post-processing of the response to two classes with
ε_L (Kairouz, Oh & Viswanath 2015). So the bound below holds for a person as for a record.
"""

import dataclasses
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri

from dpfp_ray.plan.plan import ACCOUNTANTS, Plan
from dpfp_ray.privacy import allocation, pld
from dpfp_ray.system.cache import cached_number

# A larger ε than this protects nobody and would make the numerics slow.
HOPELESS_EPSILON = 1e4


class Profile(Protocol):
    def epsilon(self, delta: float) -> float: ...

    def rdp_epsilon(self, delta: float) -> float: ...

    def rdp(self, order: float) -> float: ...

    def zcdp(self) -> tuple[float, float]: ...


@dataclass(frozen=True)
class Mechanism:
    """n Poisson-sampled Gaussian releases with σ/C = `noise_multiplier`."""

    p: float
    n: int
    noise_multiplier: float
    adjacency: str
    # Of randomised response for the labels, beside the release of the texts; 0: none.
    label_epsilon: float = field(default=0.0, repr=False)
    # t, where each record is in exactly one of t releases in a row; 0: Poisson samples.
    batches: int = field(default=0, repr=False)
    # In place of all that, for a method that has one.
    own: Profile | None = field(default=None, repr=False)

    @property
    def sensitivity(self) -> float:
        """In units of C: how far one record moves a release."""
        return 2.0 if self.adjacency == "replace_one" else 1.0

    @property
    def epochs(self) -> int:
        """Passes that were begun, where records are allocated; each is charged as a whole one."""
        return -(-self.n // self.batches)


def mechanism(plan: Plan, noise_multiplier: float, steps: int | None = None) -> Mechanism:
    """What `plan` has released after `steps` steps (default: all T of them)."""
    plan = plan.private_part  # any step of a student follows the teacher's release
    done = plan.steps if steps is None else min(steps, plan.steps)
    if plan.spec.own_profile:
        own = dataclasses.replace(own_profile(plan), sigma=noise_multiplier)
        return Mechanism(plan.p, done, noise_multiplier, str(plan.adjacency), own=own)
    n, adjacency, labels = plan.draws_after(done), str(plan.adjacency), plan.label_epsilon or 0.0
    batches = plan.batches if plan.allocates and plan.p < 1 else 0
    return Mechanism(plan.p, n, noise_multiplier, adjacency, labels, batches)


def own_profile(plan: Plan) -> Any:
    """The profile that a method with one calibrates to `plan`'s budget; two classes unless known.

    A pure function of public facts, so it need not be stored with a result.
    """
    assert plan.spec.own_profile is not None
    more = {} if plan.user_column is None else {"persons": True}
    calibrate = plan.spec.own_profile.calibrate
    return calibrate(plan.epsilon, plan.delta, plan.classes or 2, **more)


def epsilon(mech: Mechanism, delta: float, accountant: str) -> float | None:
    """ε at `delta`; None where the accountant has no bound for this mechanism."""
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"unknown accountant {accountant!r}")
    if mech.n == 0:
        return 0.0
    if mech.own is not None:
        if accountant == "gdp":
            return None
        return mech.own.rdp_epsilon(delta) if accountant == "rdp" else mech.own.epsilon(delta)
    if mech.batches:
        if accountant == "gdp":
            return None
        facts = (mech.batches, mech.epochs, mech.noise_multiplier, delta)
        compute = allocation.rdp_epsilon if accountant == "rdp" else allocated_epsilon
        return cached_number(f"allocation {accountant} {facts!r}", lambda: compute(*facts))
    if mech.label_epsilon:
        # Exact for p = 1, the only case there is; Rényi bounds of the pair are not implemented.
        assert mech.p == 1, "labels are randomised only beside a release of all records"
        joint = joint_epsilon(gdp_mu(mech), mech.label_epsilon, delta)
        return None if accountant == "rdp" else joint
    if accountant == "gdp":
        return gdp_epsilon(gdp_mu(mech), delta)
    if accountant == "rdp" and mech.adjacency == "replace_one" and mech.p < 1:
        return None  # no RDP bound for Poisson samples under replacement is known to dp-accounting
    bound = rdp_epsilon if accountant == "rdp" else pld_epsilon
    return cached_number(f"epsilon {accountant} {mech} {delta!r}", lambda: bound(mech, delta))


def epsilons(mech: Mechanism, delta: float) -> dict[str, float | None]:
    return {accountant: epsilon(mech, delta, accountant) for accountant in ACCOUNTANTS}


def gdp_mu(mech: Mechanism) -> float:
    """μ_tot = p √(n (e^{μ²} − 1)), the paper's Eq. (gdp-clt-dpfp).

    Without sampling (p = 1) composition is exact and needs no limit theorem: μ_tot = μ √n
    (Dong et al. 2022, Corollary 2).
    """
    mu = mech.sensitivity / mech.noise_multiplier
    if mech.p == 1:
        return mu * math.sqrt(mech.n)
    if mu**2 > 700:  # e^700 is the edge of a double
        return math.inf
    if mech.adjacency == "replace_one":
        # The same limit for (1−p) N(0) + p N(±C), records replaced by their negative: the log
        # ratio is about p (e^{μx−μ²/2} − e^{−μx−μ²/2}), μ = C/σ, of variance 4 p² sinh μ².
        return mech.p * math.sqrt(mech.n * 4 * math.sinh((mu / 2) ** 2))
    return mech.p * math.sqrt(mech.n * math.expm1(mu**2))


def gdp_delta(eps: float, mu: float) -> float:
    """δ(ε; μ) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2), without cancellation or overflow."""
    above = float(log_ndtr(-eps / mu + mu / 2))
    if above < -745:  # e^-745 is the smallest double
        return 0.0
    below = eps + float(log_ndtr(-eps / mu - mu / 2))
    return -math.exp(above) * math.expm1(min(0.0, below - above))


def gdp_epsilon(mu: float, delta: float) -> float:
    if math.isinf(mu):
        return math.inf
    if mu > 1e6:  # the second term of δ no longer matters, and leaving it out errs upwards
        return mu * mu / 2 - mu * float(ndtri(delta))
    if mu == 0 or gdp_delta(0.0, mu) <= delta:
        return 0.0
    # A Gaussian loss of mean μ²/2 and deviation μ lies below this but for far less than δ.
    top = mu * mu / 2 + mu * (math.sqrt(2 * math.log(1 / delta)) + 2)
    return float(brentq(lambda eps: gdp_delta(eps, mu) - delta, 0.0, top, xtol=1e-12, rtol=1e-12))


def gdp_mu_of_budget(eps: float, delta: float) -> float:
    """The largest μ whose μ-GDP meets (ε, δ): Algorithm 1, line 1."""
    low = high = 1.0
    while gdp_delta(eps, high) < delta:
        high *= 2
    while gdp_delta(eps, low) > delta:
        low /= 2

    def excess(mu: float) -> float:
        return math.log(max(gdp_delta(eps, mu), 1e-320)) - math.log(delta)

    return float(brentq(excess, low, high, xtol=1e-300, rtol=1e-13))


def renyi_epsilon(order: float, value: float, delta: float) -> float:
    """ε at `delta` of RDP `value` at an order (Canonne, Kamath & Steinke 2020, proposition 12)."""
    return max(0.0, value + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def rdp_epsilon(mech: Mechanism, delta: float) -> float:
    """The smallest ε of all of dp-accounting's orders, found with a quarter of them.

    ε at an order α is (K(α) + (α−1) log(α−1) − α log α − log δ)/(α−1), K the convex cumulant of the
    loss: a convex function over a positive linear one, so it falls and then rises. Whole orders,
    whose sums are finite and exact, tell where; the orders between are asked there only.
    """
    from dp_accounting import rdp

    event, orders = dp_event(mech), rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS
    whole = [order for order in orders if order == int(order)]

    def at(*chosen: float) -> float:
        accountant = rdp.RdpAccountant(chosen)
        accountant.compose(event)
        return float(accountant.get_epsilon(delta))

    with unconverged_orders_left_out():
        low, high = 0, len(whole) - 1
        while low < high:
            middle = (low + high) // 2
            falls = at(whole[middle + 1]) < at(whole[middle])
            low, high = (middle + 1, high) if falls else (low, middle)
        first = whole[low - 1] if low else orders[0]
        near = [order for order in orders if first <= order <= whole[min(low + 1, len(whole) - 1)]]
        # The smallest order is where dp-accounting sees that δ alone covers everything.
        return at(orders[0], *near)


@contextmanager
def unconverged_orders_left_out() -> Iterator[None]:
    """dp-accounting warns of each order it leaves out, which can only enlarge ε."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(over="ignore"):
            yield
    finally:
        logger.setLevel(level)


def pld_epsilon(mech: Mechanism, delta: float) -> float:
    if mech.p == 1:
        return gdp_epsilon(gdp_mu(mech), delta)  # no sampling: the Gaussian's profile is exact
    if -math.expm1(mech.n * math.log1p(-mech.p)) <= delta:
        return 0.0  # δ covers the chance that the record is ever sampled
    # A rough size of ε, to choose the discretisation by; rdp takes some milliseconds.
    scale = rdp_epsilon(dataclasses.replace(mech, adjacency="zero_out"), delta)
    if scale > HOPELESS_EPSILON:
        return math.inf
    return pld.epsilon(
        mech.p, mech.n, mech.noise_multiplier, delta, max(scale, 1e-4), mech.adjacency
    )


def allocated_epsilon(batches: int, epochs: int, noise_multiplier: float, delta: float) -> float:
    # Poisson samples of the same rate cost about as much.
    scale = rdp_epsilon(
        Mechanism(1 / batches, batches * epochs, noise_multiplier, "zero_out"), delta
    )
    if scale > HOPELESS_EPSILON:
        return math.inf
    return allocation.epsilon(batches, epochs, noise_multiplier, delta, max(scale, 1e-4))


def dp_event(mech: Mechanism) -> "object":
    import dp_accounting

    if mech.own is not None:
        xi, rho = mech.own.zcdp()
        return dp_accounting.SelfComposedDpEvent(dp_accounting.ZCDpEvent(rho, xi), mech.n)
    if mech.batches:
        return dp_accounting.UnsupportedDpEvent()
    if mech.p == 1:  # both neighbours are sampled for sure: replacing is a shift by 2C
        gaussian = dp_accounting.GaussianDpEvent(mech.noise_multiplier / mech.sensitivity)
        return dp_accounting.SelfComposedDpEvent(gaussian, mech.n)
    sampled = dp_accounting.PoissonSampledDpEvent(
        mech.p, dp_accounting.GaussianDpEvent(mech.noise_multiplier)
    )
    return dp_accounting.SelfComposedDpEvent(sampled, mech.n)


Epsilon = TypeVar("Epsilon", float, NDArray[np.float64])


def keep_probability(label_epsilon: Epsilon, classes: int) -> Epsilon:
    """q, with which a label is kept; every other label is said with (1 − q)/(K − 1)."""
    return 1 / (1 + (classes - 1) * np.exp(-label_epsilon))


def randomise(
    labels: NDArray[np.int64],
    label_epsilon: float | NDArray[np.float64],
    classes: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Each label as randomised response says it, with its own ε where there are several."""
    kept = rng.random(len(labels)) < keep_probability(np.asarray(label_epsilon), classes)
    # A step of 1 … K−1 around the circle of classes is one of the other labels, all alike.
    steps = rng.integers(1, max(classes, 2), len(labels))
    return np.where(kept, labels, (labels + steps) % classes)


def joint_delta(eps: float, mu: float, label_epsilon: float) -> float:
    """δ(ε) of a μ-GDP release of a record's text together with randomised response for its label.

    The two are independent given the record, and δ(ε) of a product is the mean of one factor's
    curve at ε minus the other's privacy loss. With two classes that loss is +ε_L with probability
    q and −ε_L with 1 − q, and this is exact. With more classes it is 0 with some probability: the
    response to two classes, replaced by a constant now and then. So this is an upper bound there.
    """
    q = keep_probability(label_epsilon, classes=2)
    up, down = (gdp_delta(eps - loss, mu) for loss in (label_epsilon, -label_epsilon))
    return q * up + (1 - q) * down


def joint_epsilon(mu: float, label_epsilon: float, delta: float) -> float:
    """The ε at which text and label together have this δ; never more than the sum of both."""
    if not math.isfinite(mu):
        return math.inf
    if joint_delta(0.0, mu, label_epsilon) <= delta:
        return 0.0
    top = label_epsilon + gdp_epsilon(mu, delta)
    if joint_delta(top, mu, label_epsilon) >= delta:  # equal but for rounding
        return top
    return float(brentq(lambda e: joint_delta(e, mu, label_epsilon) - delta, 0.0, top, xtol=1e-12))


def joint_mu(epsilon: float, label_epsilon: float, delta: float) -> float:
    """The largest μ for the text such that text and label together stay within (ε, δ)."""
    if label_epsilon >= epsilon:
        raise ValueError(f"label_epsilon {label_epsilon} leaves nothing of epsilon {epsilon}")
    # The rest of ε alone would do; all of ε for the text would be too much.
    low = gdp_mu_of_budget(epsilon - label_epsilon, delta)
    high = gdp_mu_of_budget(epsilon, delta)
    if joint_delta(epsilon, high, label_epsilon) <= delta:
        return high
    return float(
        brentq(lambda mu: joint_delta(epsilon, mu, label_epsilon) - delta, low, high, rtol=1e-12)
    )
