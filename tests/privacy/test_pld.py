"""Our privacy loss distributions: against dp-accounting, against integrals, and at the corners."""

import math
import warnings

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant, pld_pmf

from dpfp_ray.privacy import accounting, pld
from dpfp_ray.privacy.accounting import Mechanism
from dpfp_ray.privacy.pld import Floats, Losses, composed_epsilon

SST2 = 67_349
RELATIONS = {
    "add_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}
# p, n, σ, δ, a grid that dp-accounting does quickly, and one so fine that we may call it true.
PLANS = {
    "paper": (1 / SST2, 202_016, 0.4, 7.4e-6, 3e-3, 5e-5),
    "dp-sgd": (1024 / SST2, 197, 0.77, 7.4e-6, 1e-3, 3e-5),
    "half": (0.5, 20, 3.0, 1e-5, 1e-3, 3e-5),
    "nearly all": (0.95, 10, 4.0, 1e-6, 1e-3, 3e-5),
    "one release": (0.01, 1, 0.5, 1e-5, 1e-3, 1e-5),
    "many releases": (0.001, 1_000_000, 2.0, 1e-5, 1e-3, 1e-5),
    "large epsilon": (0.01, 500, 0.25, 1e-5, 1e-2, 1e-4),
}


def theirs(
    p: float, n: int, sigma: float, delta: float, interval: float, adjacency: str = "add_remove"
) -> float:
    accountant = PLDAccountant(RELATIONS[adjacency], value_discretization_interval=interval)
    accountant.compose(
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(p, dp_accounting.GaussianDpEvent(sigma)), n
        )
    )
    return float(accountant.get_epsilon(delta))


# Against dp-accounting


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", RELATIONS)
@pytest.mark.parametrize("name", PLANS)
def test_equal_grids_give_dp_accountings_epsilon(name: str, adjacency: str) -> None:
    p, n, sigma, delta, interval, _ = PLANS[name]
    ours = pld.epsilon_at(p, n, sigma, delta, interval, adjacency)
    # Each truncates its tails in its own way, and charges for it.
    assert ours == pytest.approx(theirs(p, n, sigma, delta, interval, adjacency), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", RELATIONS)
@pytest.mark.parametrize("name", PLANS)
def test_epsilon_is_an_upper_bound_within_two_permille(name: str, adjacency: str) -> None:
    p, n, sigma, delta, _, fine = PLANS[name]
    truth = pld.epsilon_at(p, n, sigma, delta, fine, adjacency)
    found = pld.epsilon(p, n, sigma, delta, 3.0, adjacency)
    assert truth * (1 - 1e-9) <= found <= 1.002 * truth


@pytest.mark.parametrize("scale", [0.03, 300.0])
def test_a_bad_guess_of_the_scale_is_put_right(scale: float) -> None:
    p, n, sigma, delta, *_ = PLANS["dp-sgd"]
    good = pld.epsilon(p, n, sigma, delta, scale=3.0)
    assert pld.epsilon(p, n, sigma, delta, scale) == pytest.approx(good, rel=1e-3)


def test_finer_grids_are_never_higher() -> None:
    p, n, sigma, delta, *_ = PLANS["paper"]
    found = [pld.epsilon_at(p, n, sigma, delta, interval) for interval in (9e-3, 3e-3, 1e-3)]
    assert found == sorted(found, reverse=True)


def test_connected_dots_are_dp_accountings() -> None:
    release, interval = pld.Release(0.3, 0.9, "add_remove"), 0.05
    forward, backward = pld.connect_dots(release, 1e-9, interval)
    for ours, curve in ((forward, pld.remove_curve), (backward, pld.add_curve)):
        steps = np.arange(ours.first, ours.first + len(ours.masses))
        their_pmf = pld_pmf.create_pmf_pessimistic_connect_dots(
            interval, steps, curve(steps * interval, 0.3, 0.9)
        ).to_dense_pmf()
        np.testing.assert_allclose(ours.masses, their_pmf._probs, atol=1e-13)
        assert ours.infinite == pytest.approx(their_pmf._infinity_mass, abs=1e-15)


# Both directions


def swapped(one: pld.OnGrid) -> pld.OnGrid:
    return lambda tail, interval: one(tail, interval)[::-1]


def test_the_worse_direction_counts_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    p, n, sigma, delta, interval, _ = PLANS["dp-sgd"]
    plain = pld.epsilon_at(p, n, sigma, delta, interval)
    connect = pld.connect_dots
    monkeypatch.setattr(pld, "connect_dots", lambda *args: connect(*args)[::-1])
    assert pld.epsilon_at(p, n, sigma, delta, interval) == pytest.approx(plain, rel=1e-9)


def test_the_worse_direction_of_several_mechanisms_counts_whichever_it_is() -> None:
    p, n, sigma, delta, interval, _ = PLANS["dp-sgd"]
    parts = [
        (pld.release(pld.Release(p, sigma, "add_remove")), n),
        (pld.release(pld.Release(0.5, 3.0, "add_remove")), 20),
    ]
    other = [(swapped(one), count) for one, count in parts]
    plain = pld.joint_epsilon_at(parts, delta, interval)
    assert pld.joint_epsilon_at(other, delta, interval) == pytest.approx(plain, rel=1e-9)


# The composition, against a slow twin


def slow_epsilon(losses: Losses, n: int, delta: float) -> float:
    """The same by plain convolution, and bisection of the definition."""
    masses = losses.masses
    for _ in range(n - 1):
        masses = np.convolve(masses, losses.masses)
    values = losses.interval * (n * losses.first + np.arange(len(masses)))
    lost = 1 - (1 - losses.infinite) ** n
    low, high = 0.0, float(values[-1])
    for _ in range(100):
        middle = (low + high) / 2
        over = values > middle
        left = lost + float(masses[over] @ -np.expm1(middle - values[over]))
        low, high = (middle, high) if left > delta else (low, middle)
    return high


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_composition_is_convolution(n: int, delta: float) -> None:
    release = pld.Release(0.2, 0.8, "add_remove")
    for losses in pld.connect_dots(release, 1e-7 * delta / n, 0.02):
        found = composed_epsilon([(losses, n)], delta)
        assert found == pytest.approx(slow_epsilon(losses, n, delta), rel=1e-5, abs=1e-9)
        assert found >= slow_epsilon(losses, n, delta) * (1 - 1e-9)


def test_one_release_has_the_epsilon_of_its_curve() -> None:
    p, sigma, eps = 0.1, 0.7, 2.0
    delta = float(pld.remove_curve(np.array([eps]), p, sigma)[0])
    assert pld.epsilon_at(p, 1, sigma, delta, 1e-4) == pytest.approx(eps, rel=1e-4)


@pytest.mark.slow
def test_small_deltas_are_not_lost_in_rounding() -> None:
    """dp-accounting's FFT sees nothing below about 1e-11 here: its ε is then far above rdp's."""
    p, n, sigma = 1 / SST2, 202_016, 0.6
    deltas = (1e-8, 1e-10, 1e-12, 1e-14, 1e-16)
    found = [pld.epsilon(p, n, sigma, delta, scale=3.0) for delta in deltas]
    renyi = [accounting.rdp_epsilon(Mechanism(p, n, sigma, "add_remove"), d) for d in deltas]
    assert all(ours < theirs for ours, theirs in zip(found, renyi, strict=True))
    assert found == sorted(found)
    # Both are tail bounds of one sum: as δ falls, they come together.
    ratios = [ours / theirs for ours, theirs in zip(found, renyi, strict=True)]
    assert ratios == sorted(ratios)


@pytest.mark.parametrize("delta", [1e-5, 1e-12])
def test_sampling_nearly_everything_is_nearly_the_exact_gaussian(delta: float) -> None:
    exact = accounting.gdp_epsilon(math.sqrt(100) / 20, delta)
    assert pld.epsilon(1 - 1e-9, 100, 20.0, delta, 1.0) == pytest.approx(exact, rel=1e-3)


def test_no_release_of_any_consequence_costs_nothing() -> None:
    assert pld.epsilon(1e-9, 10, 1.0, 1e-5, 1e-4) == 0.0


# The curves, against integrals of the densities


def integral(eps: float, p: float, sigma: float, kind: str) -> float:
    """∫ max(0, P − e^ε Q), as a fine sum."""
    x, width = np.linspace(-2 - 12 * sigma, 2 + 12 * sigma, 1_000_001, retstep=True)

    def density(at: float) -> Floats:
        return np.exp(-((x - at) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))

    without, mixture = density(0), (1 - p) * density(0) + p * density(1)
    first, second = {
        "remove": (mixture, without),
        "add": (without, mixture),
        "replace": (mixture, mixture[::-1]),
    }[kind]
    return float(width * np.maximum(0.0, first - math.exp(eps) * second).sum())


CURVES = {"remove": pld.remove_curve, "add": pld.add_curve, "replace": pld.replace_curve}


@pytest.mark.parametrize("kind", CURVES)
@pytest.mark.parametrize(("p", "sigma"), [(0.5, 1.0), (0.01, 0.5), (0.9, 3.0), (1e-4, 0.8)])
def test_curves_are_hockey_sticks(kind: str, p: float, sigma: float) -> None:
    eps = np.array([0.0, 1e-3, 0.05, 0.5, 2.0])
    expected = [integral(e, p, sigma, kind) for e in eps]
    np.testing.assert_allclose(CURVES[kind](eps, p, sigma), expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize(("p", "sigma"), [(0.5, 1.0), (0.01, 0.5), (1e-4, 0.8)])
def test_negative_losses_are_the_other_direction(p: float, sigma: float) -> None:
    """H_{e^ε}(P‖Q) = 1 − e^ε + e^ε H_{e^{−ε}}(Q‖P)."""
    eps = -np.array([1e-6, 1e-4, 0.005, 0.1, 0.69, 3.0])
    other = -np.expm1(eps) + np.exp(eps) * pld.add_curve(-eps, p, sigma)
    np.testing.assert_allclose(pld.remove_curve(eps, p, sigma), other, atol=1e-14)


@pytest.mark.parametrize("kind", CURVES)
@pytest.mark.parametrize("p", [1e-12, 1e-3, 0.5, 1 - 1e-12])
@pytest.mark.parametrize("sigma", [0.01, 0.3, 1.0, 1e5])
def test_curves_fall_from_at_most_one_to_nothing(kind: str, p: float, sigma: float) -> None:
    eps = np.concatenate([[0.0], np.geomspace(1e-15, 1e5, 500)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # A backward loss is at most −log(1 − p), so its curve is asked for no more than that.
        curve = CURVES[kind](eps[eps < 100] if kind == "add" else eps, p, sigma)
    assert 0 <= curve[-1] <= curve[0] <= 1
    # Falling, but for rounding.
    assert (np.diff(curve) <= 1e-12 * curve[:-1] + 1e-15).all()


# Corners: small, and no worse than rdp


@pytest.mark.parametrize(
    ("p", "n", "sigma", "delta"),
    [
        (0.2, 15, 0.9, 0.01),  # D = 50, B = 10
        (1 / SST2, 202_016, 1.83, 7.4e-6),  # ε = 0.01
        (1 / SST2, 202_016, 0.176, 7.4e-6),  # ε = 100
        (0.5, 1000, 0.5, 1e-5),  # ε of thousands
        (1e-8, 1, 0.1, 1e-12),
        (1e-6, 10_000_000, 0.6, 1e-9),
        (0.01, 10_000_000, 30.0, 1e-6),
        (0.999999, 1, 0.05, 1e-6),
    ],
)
@pytest.mark.parametrize("adjacency", RELATIONS)
def test_corners(p: float, n: int, sigma: float, delta: float, adjacency: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mech = Mechanism(p, n, sigma, adjacency)
        found = accounting.pld_epsilon(mech, delta)
    assert found >= 0
    if adjacency == "add_remove":
        assert found <= accounting.rdp_epsilon(mech, delta) * 1.001


def test_grids_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    power = pld._tilted_product

    def watched(*args: object) -> Floats:
        sizes.append(int(args[-1]))  # type: ignore[call-overload]
        return power(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pld, "MOST_POINTS", 20_000)
    monkeypatch.setattr(pld, "_tilted_product", watched)
    p, n, sigma, delta = 1 / SST2, 6_000_000, 0.45, 7.4e-6
    found = pld.epsilon(p, n, sigma, delta, scale=0.1)
    assert max(sizes) < 10 * 20_000
    # Larger than it need be, never less.
    monkeypatch.setattr(pld, "MOST_POINTS", 300_000)
    assert found >= pld.epsilon(p, n, sigma, delta, scale=3.0)


def test_how_far_losses_reach_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the grids of a search asks for it."""
    looks: list[float] = []
    look = pld.root_of_decreasing
    monkeypatch.setattr(
        pld, "root_of_decreasing", lambda c, mass: looks.append(mass) or look(c, mass)
    )
    pld.Release.top.cache_clear()
    pld.epsilon(1024 / SST2, 197, 0.77, 7.4e-6, scale=3.0)
    assert len(looks) == 1
