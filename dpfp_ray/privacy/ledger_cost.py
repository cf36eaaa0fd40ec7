"""What a list of uses of one record costs together, in one adjacency.

The common adjacency is zero-out in the sense of Kairouz et al. 2021: a record becomes ⊥, keeps its
place, and contributes exactly nothing (no gradient, a zero row, no moment). Every method here is
then a list of the parts below with its usual sensitivity, and all of them compose. Two sums:

    composed   privacy loss distributions of all parts; exact GDP if all are plain Gaussians. Valid
               for a list whose mechanisms (rates, noises, counts) were fixed before its first use.
    filter     for lists that grow as people or searchers look at results and decide.

**The filter.** Each of these is a fully adaptive privacy filter on its own:

    Rényi filter at an order α fixed beforehand: Σ RDP(α) ≤ r (Feldman & Zrnic 2021)
    GDP filter: Σ μ² ≤ μ_total² of μ-GDP mechanisms (Koskela, Tobaben & Honkela 2022)

A plain Gaussian is 1/σ-GDP, and the GDP filter is tight for a list of these. A sampled Gaussian is
1/σ-GDP too (sampling only mixes in a mechanism that says nothing), and so is an (ε, 0)-DP one with
μ = 2 Φ⁻¹(e^ε/(1 + e^ε)): its trade-off function is a chord above the convex one of G_μ, through the
same point with equal errors. Both bounds are valid and coarse; Rényi filters are for these. One α
alone fails badly for sampled Gaussians, whose RDP explodes above an order that depends on
their noise (SST-2, B = M = 32, one run of ε = 3: 1.6e6 at the α that is best for plain Gaussians).
So filters F_1 … F_k are fixed beforehand, each for (ε, δ_j) with Σ δ_j = δ, and a use is admitted
if at least one of them admits the whole sum with it. This is (ε, δ)-DP: let A_j be the transcripts
whose final sum is within F_j but none before it. Spending only grows, so such a transcript was
within F_j all along, and on A_j the process M equals M_j, the process stopped by F_j alone. For
every event S

    P[M ∈ S] = Σ_j P[M_j ∈ S ∩ A_j] ≤ Σ_j (e^ε Q[M_j ∈ S ∩ A_j] + δ_j) = e^ε Q[M ∈ S] + δ.

The shares δ_j/δ are fixed with the total; without one, by the mechanism of the first use, which
nobody chose after seeing a result (`filters_from`).

What is proved by a filter is the total that was fixed beforehand; "ε so far" by the filter is the
smallest total that would have admitted what was done.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import expit, logsumexp, ndtri

from dpfp_ray.privacy import allocation, pld
from dpfp_ray.privacy.accounting import gdp_epsilon, renyi_epsilon, unconverged_orders_left_out
from dpfp_ray.privacy.pld import Release

# Fixed in the code, hence before any use, for ledgers without a total.
WIDE_ORDERS = tuple(1 + 2.0**k for k in range(-3, 9))
# Where the first use is a plain Gaussian, this share of δ is the GDP filter's. The rest costs it
# little (ε = 1.839 for 1.835), and keeps Rényi filters for what may come later.
GDP_SHARE_OF_PLAIN = 0.97
# With a total, whose first use is not known: half of δ for plain Gaussians, half for all others.
GDP_SHARE_OF_TOTAL = 0.5
# Fractions of the optimal α − 1 for unsampled Gaussians, tried as filter orders: sampled ones need
# a smaller order, by their noise.
ORDER_FRACTIONS = (1.0, 0.66, 0.43)
HOPELESS_EPSILON = 1e3  # protects nobody, and distributions would need gigabytes to say so
LARGEST_NOISE = 1e6


@dataclass(frozen=True)
class Gaussian:
    """`per_step` releases a step with rate p and σ / zero-out sensitivity = `noise_multiplier`."""

    p: float
    noise_multiplier: float
    per_step: int = 1
    kind: str = "gaussian"

    def __post_init__(self) -> None:
        if not (0 < self.p <= 1 and 0 < self.noise_multiplier < math.inf and self.per_step >= 1):
            raise ValueError(f"no Gaussian mechanism has these parameters: {self}")


@dataclass(frozen=True)
class Pure:
    """An (ε, 0)-DP mechanism, such as randomised response for a label; made once a use."""

    epsilon: float
    kind: str = "pure"

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"no pure mechanism has this parameter: {self}")


@dataclass(frozen=True)
class RdpCurve:
    """A mechanism of which only a Rényi curve is known; made once a use."""

    orders: tuple[float, ...]
    values: tuple[float, ...]
    kind: str = "rdp_curve"

    def __post_init__(self) -> None:
        ascending = list(self.orders) == sorted(set(self.orders)) and min(self.orders) > 1
        if not ascending or len(self.orders) != len(self.values) or not min(self.values) >= 0:
            raise ValueError(f"no Rényi curve has these parameters: {self}")


@dataclass(frozen=True)
class Allocated:
    """One epoch of `batches` Gaussian releases, the record in one of them (`allocation.py`).

    An epoch that was begun counts as a whole one. Where a person has several `records`, they are
    allocated one by one.
    """

    batches: int
    noise_multiplier: float
    records: int = 1
    kind: str = "allocated"

    def __post_init__(self) -> None:
        sizes = self.batches >= 2 and self.records >= 1
        if not (sizes and 0 < self.noise_multiplier < math.inf):
            raise ValueError(f"no random allocation has these parameters: {self}")


Part = Gaussian | Pure | RdpCurve | Allocated
Counts = Mapping[Part, int]  # mechanism: how often; a Gaussian counts its releases, not its steps


def part_from_json(facts: Mapping[str, Any]) -> Part:
    """Unknown kinds raise: leaving one out would understate the sum."""
    match facts["kind"]:
        case "gaussian":
            return Gaussian(facts["p"], facts["noise_multiplier"], facts["per_step"])
        case "pure":
            return Pure(facts["epsilon"])
        case "rdp_curve":
            return RdpCurve(tuple(facts["orders"]), tuple(facts["values"]))
        case "allocated":
            return Allocated(facts["batches"], facts["noise_multiplier"], facts["records"])
        case other:
            raise ValueError(f"unknown kind of mechanism {other!r}")


def for_group(part: Part, records: int) -> Part:
    """What a part of a use of single records costs `records` of them that become ⊥ together.

    A Gaussian: none of them is drawn with probability (1 − p)^m, else they move the sum by at most
    m sensitivities; a mixture of smaller moves is dominated by the largest (docs/user_level.md).
    An epoch of random allocation: wherever they land, the sums move by vectors whose lengths add up
    to at most m, so it is a plain Gaussian's. A pure mechanism: m ε. A Rényi curve: Mironov 2017,
    proposition 2, for the next power of 2.
    """
    if isinstance(part, Gaussian):
        drawn = 1.0 if part.p == 1 else -math.expm1(records * math.log1p(-part.p))
        return replace(part, p=drawn, noise_multiplier=part.noise_multiplier / records)
    if isinstance(part, Allocated):
        return replace(part, records=records * part.records)
    if isinstance(part, Pure):
        return replace(part, epsilon=records * part.epsilon)
    doublings = math.ceil(math.log2(records))
    bounded = [
        (order / 2**doublings, 3**doublings * value)
        for order, value in zip(part.orders, part.values, strict=True)
        if order >= 2 ** (doublings + 1)
    ]
    orders, values = zip(*(bounded or [(2.0, math.inf)]), strict=True)
    return RdpCurve(orders, values)


def count_parts(parts: Sequence[Part], steps: int) -> Counter[Part]:
    counts: Counter[Part] = Counter()
    for part in parts if steps > 0 else ():
        if isinstance(part, Gaussian):
            counts[replace(part, per_step=1)] += steps * part.per_step
        elif isinstance(part, Allocated):
            # Several records: a plain Gaussian for each epoch, whichever batches they are in.
            several = Gaussian(1.0, part.noise_multiplier / part.records)
            counts[part if part.records == 1 else several] += -(-steps // part.batches)
        else:
            counts[part] += 1
    return counts


# --- a total, and the filters that hold it ------------------------------------------------------


@dataclass(frozen=True)
class Total:
    """(ε, δ) for ever, and the orders of its Rényi filters, fixed with it."""

    epsilon: float
    delta: float
    orders: tuple[float, ...]


def total_of(epsilon: float, delta: float) -> Total:
    """The orders follow from (ε, δ) alone.

    n plain Gaussians cost α ρ at order α, and the budget there is about ε − L/(α − 1), L = log of
    the inverse share of δ. Most ρ fits at α = 1 + (L + √(L (L + ε)))/ε.
    """
    log_inverse = math.log(len(ORDER_FRACTIONS) / (1 - GDP_SHARE_OF_TOTAL) / delta)
    best = (log_inverse + math.sqrt(log_inverse * (log_inverse + epsilon))) / epsilon
    # Whole orders have a finite closed form; below 4 the rounding would matter.
    orders = (1 + best * fraction for fraction in ORDER_FRACTIONS)
    return Total(epsilon, delta, tuple(float(round(a, 0 if a > 4 else 2)) for a in orders))


@dataclass(frozen=True)
class Filters:
    """Filters that are fixed before the first use: shares of δ, 1 in all."""

    gdp_share: float
    renyi_shares: Mapping[float, float]  # by order


def filters_of(total: Total) -> Filters:
    share = (1 - GDP_SHARE_OF_TOTAL) / len(total.orders)
    return Filters(GDP_SHARE_OF_TOTAL, dict.fromkeys(total.orders, share))


def filters_from(first_use: Sequence[Part]) -> Filters:
    """The filters of people without a total, by the mechanisms of the first use of their records
    (of the whole list, if it began one).

    A share s costs log(1/s)/(α − 1) at order α, so low orders get larger shares; those below 2
    are for sums that protect hardly anybody.
    """
    gdp_share = GDP_SHARE_OF_PLAIN if all(_plain(part) for part in first_use) else 0.0
    weights = {order: 0.5 if order < 2 else (order - 1) ** -0.5 for order in WIDE_ORDERS}
    scale = (1 - gdp_share) / sum(weights.values())
    return Filters(gdp_share, {order: scale * weight for order, weight in weights.items()})


def filter_epsilon(counts: Counts, delta: float, filters: Filters) -> tuple[float, str]:
    """The smallest ε whose filters admit `counts`, and which of them does."""
    if not counts:
        return 0.0, "nothing was released"
    curve = renyi_curve(counts, tuple(filters.renyi_shares))
    epsilons = [
        (renyi_epsilon(alpha, value, share * delta), f"Rényi filter, α = {alpha:g}")
        for (alpha, share), value in zip(filters.renyi_shares.items(), curve, strict=True)
    ]
    mu = _mu(counts)
    if filters.gdp_share and mu < math.inf:
        epsilons.append((gdp_epsilon(mu, filters.gdp_share * delta), "GDP filter"))
    return min(epsilons)


def would_fit(counts: Counts, new: Counts, total: Total) -> bool:
    together = Counter(dict(counts))
    together.update(dict(new))
    return filter_epsilon(together, total.delta, filters_of(total))[0] <= total.epsilon * (1 + 1e-9)


def what_fits(counts: Counts, template: Counts, total: Total, delta: float) -> float:
    """The largest ε at `delta` of one use like `template`, with more noise, that still fits.

    0 if none does. Parts other than Gaussians are kept as they are.
    """

    def noisier(log_factor: float) -> Counter[Part]:
        louder: Counter[Part] = Counter()
        for part, count in template.items():
            if isinstance(part, Gaussian):
                sigma = part.noise_multiplier * math.exp(log_factor)
                louder[replace(part, noise_multiplier=sigma)] += count
            else:
                louder[part] += count
        return louder

    low, high = 0.0, math.log(LARGEST_NOISE)
    if not template or not would_fit(counts, noisier(high), total):
        return 0.0
    if would_fit(counts, template, total):
        return composed_epsilon(template, delta)
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if would_fit(counts, noisier(middle), total) else (middle, high)
    return composed_epsilon(noisier(high), delta)


# --- Rényi --------------------------------------------------------------------------------------


def renyi_curve(counts: Counts, orders: Sequence[float]) -> list[float]:
    """Σ RDP at each order; infinite where a part has no bound."""
    curve = np.zeros(len(orders))
    for part, count in counts.items():
        curve += count * np.array(_renyi_of_one(part, tuple(orders)))
    return [float(value) for value in curve]


@functools.lru_cache(maxsize=4096)
def _renyi_of_one(part: Part, orders: tuple[float, ...]) -> tuple[float, ...]:
    if isinstance(part, Pure):
        return tuple(randomised_response_renyi(part.epsilon, alpha) for alpha in orders)
    if isinstance(part, RdpCurve):
        # Rényi divergence grows with the order: the next known order bounds those below it.
        points = list(zip(part.orders, part.values, strict=True))
        return tuple(next((v for o, v in points if o >= alpha), math.inf) for alpha in orders)
    if isinstance(part, Allocated):
        return allocation.renyi_curve(part.batches, part.noise_multiplier, orders)
    if part.p == 1:
        return tuple(alpha / (2 * part.noise_multiplier**2) for alpha in orders)
    import dp_accounting
    from dp_accounting import rdp

    # dp-accounting gives a curve only through ε; its inner array is the curve itself.
    gaussian = dp_accounting.GaussianDpEvent(part.noise_multiplier)
    with unconverged_orders_left_out():
        accountant = rdp.RdpAccountant(list(orders))
        accountant.compose(dp_accounting.PoissonSampledDpEvent(part.p, gaussian))
    values = (float(value) for value in accountant._rdp)
    return tuple(value if value >= 0 else math.inf for value in values)  # NaN is no bound


def randomised_response_renyi(epsilon: float, alpha: float) -> float:
    """D_α of (q, 1 − q) from (1 − q, q), q = e^ε/(1 + e^ε): the most that ε-DP allows."""
    log_q, log_r = -math.log1p(math.exp(-epsilon)), -epsilon - math.log1p(math.exp(-epsilon))
    both = [alpha * log_q + (1 - alpha) * log_r, alpha * log_r + (1 - alpha) * log_q]
    return float(logsumexp(both)) / (alpha - 1)


# --- a list fixed beforehand --------------------------------------------------------------------


def composed_epsilon(counts: Counts, delta: float) -> float:
    """ε at `delta` of everything in `counts`: an upper bound, tight to about a permille.

    Rényi curves are converted at the best order, and added to the rest as they are.
    """
    counts = {part: count for part, count in counts.items() if count > 0}
    if not counts:
        return 0.0
    if all(_plain(part) for part in counts):
        return gdp_epsilon(_mu(counts), delta)
    fine_orders = tuple(1 + 10 ** (k / 12) for k in range(-14, 37))
    by_renyi = min(
        renyi_epsilon(alpha, value, delta)
        for alpha, value in zip(fine_orders, renyi_curve(counts, fine_orders), strict=True)
    )
    if any(isinstance(part, RdpCurve) for part in counts) or by_renyi > HOPELESS_EPSILON:
        return by_renyi
    plain = {part: count for part, count in counts.items() if _plain(part)}
    parts: list[tuple[pld.OnGrid, int]] = []
    if plain:
        one = pld.PlainGaussian(1 / _mu(plain))
        parts.append((pld.release(one), 1))
    for part, count in counts.items():
        if isinstance(part, Pure):
            parts.append((pld.pure(part.epsilon), count))
        elif isinstance(part, Allocated):
            share = delta / sum(counts.values())
            parts.append((allocation.on_grid(part.batches, part.noise_multiplier, share), count))
        elif isinstance(part, Gaussian) and part not in plain:
            sampled = Release(part.p, part.noise_multiplier, "add_remove")
            parts.append((pld.release(sampled), count))
    return min(by_renyi, pld.joint_epsilon(parts, delta, max(by_renyi, 1e-4)))


def _plain(part: Part) -> bool:
    return isinstance(part, Gaussian) and part.p == 1


def _mu(counts: Counts) -> float:
    """√Σ μ² of all parts: exact for plain Gaussians (Dong et al. 2022, corollary 2)."""
    return math.sqrt(sum(n * _mu_of_one(part) ** 2 for part, n in counts.items()))


def _mu_of_one(part: Part) -> float:
    if isinstance(part, Gaussian | Allocated):  # of an epoch, with no amplification
        return 1 / part.noise_multiplier
    return -2 * float(ndtri(expit(-part.epsilon))) if isinstance(part, Pure) else math.inf
