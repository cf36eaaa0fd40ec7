import math

import numpy as np
import pytest
from scipy import integrate, stats

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting, allocation
from dpfp_ray.privacy.accounting import Mechanism, allocated_epsilon
from dpfp_ray.privacy.calibration import calibrate, shown_epsilon
from dpfp_ray.privacy.ledger_cost import (
    Allocated,
    Gaussian,
    composed_epsilon,
    count_parts,
    for_group,
    part_from_json,
)
from dpfp_ray.privacy.ledger_entries import use_of
from dpfp_ray.privacy.sampling import AllocationSampler, make_sampler
from dpfp_ray.system.errors import UserError

DRAWS = 200_000
CASES = [(2, 1.0), (3, 0.8), (10, 1.5), (40, 0.7), (200, 0.6)]  # (t, σ)


def ratios(batches: int, sigma: float, epochs: int, present: bool) -> np.ndarray:
    """log P/Q of `DRAWS` runs: the sums of `epochs` epochs, drawn as the records' sums are."""
    rng = np.random.default_rng(batches)
    total = np.zeros(DRAWS)
    for _ in range(epochs):
        z = rng.standard_normal((DRAWS, batches), dtype=np.float32).astype(float)
        if present:
            z[np.arange(DRAWS), rng.integers(batches, size=DRAWS)] += 1 / sigma
        total += np.log(np.exp(z / sigma - 1 / (2 * sigma**2)).mean(1))
    return total


@pytest.mark.parametrize(("batches", "sigma"), CASES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_curve_is_never_below_monte_carlo(batches: int, sigma: float, direction: str) -> None:
    law = allocation.Law(batches, sigma, 1e-9)
    loss = ratios(batches, sigma, 1, present=direction == "forward")
    loss = loss if direction == "forward" else -loss
    for eps in np.linspace(0.0, float(np.quantile(loss, 0.999)), 5):
        gains = np.maximum(0.0, -np.expm1(eps - loss))
        error = gains.std() / math.sqrt(DRAWS)
        bound = float(getattr(law, direction)(np.array([eps]))[0])
        assert gains.mean() - 4 * error <= bound <= gains.mean() + 4 * error + 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("batches", "sigma", "epochs"), [(5, 1.5, 4), (20, 0.9, 3)])
def test_epochs_compose_never_below_monte_carlo(batches: int, sigma: float, epochs: int) -> None:
    loss = ratios(batches, sigma, epochs, present=True)
    eps = float(np.quantile(loss, 0.99))
    gains = np.maximum(0.0, -np.expm1(eps - loss))
    error = 4 * gains.std() / math.sqrt(DRAWS)
    assert allocated_epsilon(batches, epochs, sigma, gains.mean() - error) >= eps
    assert allocated_epsilon(batches, epochs, sigma, gains.mean() + error) <= eps * 1.01


# `gaussian_allocation_epsilon_range` of PLD_accounting 2.0, by the theorem's authors: the lower and
# the upper bound that it finds by itself.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "epochs", "sigma", "low", "high"),
    [
        (66, 10, 0.8, 3.6801666627332943, 3.7785510281069987),
        (67, 3, 1.0, 1.2163065080818403, 1.2821251874963429),
        (264, 3, 0.6, 3.22602108135936, 3.2977550597176224),
    ],
)
def test_epsilon_lies_between_the_authors_bounds(
    batches: int, epochs: int, sigma: float, low: float, high: float
) -> None:
    assert low <= allocated_epsilon(batches, epochs, sigma, 7.4e-6) <= high


def test_two_batches_without_the_grid() -> None:
    """t = 2: A's law under Q by one integral over z₁, exact in z₂."""
    s, k = 1 / 0.9, math.exp(0.7)

    def given(z: float) -> float:
        strike = 2 * k - math.exp(s * z - s * s / 2)  # E (Y₂ − strike)_+ by Black and Scholes
        if strike <= 0:
            return 1 - strike
        d = -math.log(strike) / s + s / 2
        return float(stats.norm.cdf(d) - strike * stats.norm.cdf(d - s))

    exact = integrate.quad(lambda z: stats.norm.pdf(z) * given(z) / 2, -10, 10, epsabs=1e-13)[0]
    bound = float(allocation.Law(2, 0.9, 1e-10).forward(np.array([0.7]))[0])
    assert exact <= bound <= exact * (1 + 1e-5)


@pytest.mark.parametrize("points", [2**10, 2**12, 2**14])
def test_coarser_grids_give_larger_curves(points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    eps = np.linspace(0.0, 2.0, 9)
    fine = allocation.Law(8, 1.0, 1e-6)
    monkeypatch.setattr(allocation, "LEAST_POINTS", points)
    monkeypatch.setattr(allocation, "MOST_POINTS", points)
    coarse = allocation.Law(8, 1.0, 1e-6)
    assert (coarse.forward(eps) >= fine.forward(eps) - 1e-12).all()
    assert (coarse.backward(eps) >= fine.backward(eps) - 1e-12).all()


@pytest.mark.parametrize(("batches", "sigma"), CASES)
def test_second_moment_of_the_ratio(batches: int, sigma: float) -> None:
    moments = allocation._log_moments(batches, 1 / sigma, 4)
    assert moments[1] == pytest.approx(0.0, abs=1e-12)
    assert moments[2] == pytest.approx(math.log1p(math.expm1(1 / sigma**2) / batches))


@pytest.mark.parametrize("r", [1, 5, 40])
def test_inverse_moment_of_one_number(r: int) -> None:
    assert allocation._log_inverse_moment(1, 0.8, r) == pytest.approx(0.8**2 * (r + r * r) / 2)


def test_inverse_moment_of_a_mean() -> None:
    ratio = np.exp(-ratios(10, 1.5, 1, present=False) * 3)
    error = ratio.std() / math.sqrt(DRAWS)
    assert math.exp(allocation._log_inverse_moment(10, 1 / 1.5, 3)) == pytest.approx(
        ratio.mean(), abs=4 * error
    )


def test_renyi_curve_of_one_batch_is_the_gaussians() -> None:
    curve = allocation.renyi_curve(1, 1.3, (2.0, 8.0, 32.0))
    assert curve == pytest.approx([order / (2 * 1.3**2) for order in (2, 8, 32)])


def test_renyi_is_never_below_the_distribution() -> None:
    assert allocation.rdp_epsilon(20, 3, 0.9, 1e-5) >= allocated_epsilon(20, 3, 0.9, 1e-5)


# --- the sampler -------------------------------------------------------------------------------


def test_each_record_is_in_exactly_one_batch_of_an_epoch() -> None:
    sampler = AllocationSampler(1000, 7, seed=1)
    for epoch in range(3):
        rows = np.concatenate([sampler.draw(7 * epoch + batch) for batch in range(7)])
        assert sorted(rows) == list(range(1000))


def test_batches_of_a_record_are_uniform_and_independent() -> None:
    epochs, batches = 400, 4
    sampler = AllocationSampler(40, batches, seed=3)
    chosen = np.empty((epochs, 40), int)
    for step in range(epochs * batches):
        chosen[step // batches, sampler.draw(step)] = step % batches
    pairs = np.bincount((chosen[:, ::2] * batches + chosen[:, 1::2]).ravel(), minlength=16)
    again = np.bincount((chosen[:-1] * batches + chosen[1:]).ravel(), minlength=16)
    assert stats.chisquare(pairs).pvalue > 1e-4
    assert stats.chisquare(again).pvalue > 1e-4


def test_a_step_is_drawn_alike_in_any_order() -> None:
    steps = [5, 0, 5, 2, 9]
    alone = [AllocationSampler(50, 4, seed=2).draw(step) for step in steps]
    sampler = AllocationSampler(50, 4, seed=2)
    assert all((sampler.draw(s) == rows).all() for s, rows in zip(steps, alone, strict=True))


# --- plans, statements and the ledger ------------------------------------------------------------


def plan(**fields: object) -> Plan:
    values = {"method": "dpsgd", "batch_size": 100, "epochs": 3, "sampling": "allocation"}
    return Plan(**{**values, "records": 1040, **fields})  # type: ignore[arg-type]


def test_plan_draws_whole_epochs_of_batches() -> None:
    drawn = plan()
    assert (drawn.batches, drawn.steps, drawn.p) == (10, 30, 0.1)
    assert drawn.epoch_ends() == [10, 20, 30]
    assert isinstance(make_sampler(drawn, 1), AllocationSampler)


def test_plans_of_poisson_samples_keep_their_hash() -> None:
    before = Plan(method="dpsgd", records=1040).hash
    assert before == Plan(method="dpsgd", records=1040, sampling="poisson").hash
    assert before != Plan(method="dpsgd", records=1040, sampling="allocation").hash


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"accountant": "gdp"}, "gdp has no limit theorem"), ({"method": "dpfp"}, "sampling is")],
)
def test_what_has_no_theorem_is_refused(fields: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan(**fields)


def test_calibration_needs_less_noise_than_poisson_samples() -> None:
    allocated, poisson = calibrate(plan()), calibrate(plan(sampling="poisson"))
    assert allocated.noise_multiplier < poisson.noise_multiplier
    assert allocated.epsilon["pld"] == pytest.approx(3, rel=2e-3)
    assert (allocated.epsilon["pld"] or 9) <= 3


def test_an_epoch_that_was_begun_is_charged_whole() -> None:
    mechanism = accounting.mechanism(plan(), 1.0, steps=11)
    assert mechanism.epochs == 2
    after_two = accounting.mechanism(plan(), 1.0, steps=20)
    assert accounting.epsilon(mechanism, 1e-5, "pld") == accounting.epsilon(after_two, 1e-5, "pld")


def test_known_draws_cost_a_gaussian_release_an_epoch() -> None:
    mechanism = Mechanism(0.1, 30, 2.0, "add_remove", batches=10)
    assert shown_epsilon(mechanism, 1e-5) == accounting.gdp_epsilon(math.sqrt(3) / 2, 1e-5)


def test_ledger_counts_epochs_and_composes_them() -> None:
    use = use_of(plan(), 0.9, people="p", run="r")
    (part,) = use.parts
    assert part == Allocated(10, 0.9)
    counts = count_parts(use.parts, 11)
    assert counts == {part: 2}
    assert composed_epsilon(counts, 1e-5) == pytest.approx(
        allocated_epsilon(10, 2, 0.9, 1e-5), rel=2e-3
    )


def test_a_part_is_read_as_it_was_written() -> None:
    assert part_from_json(vars(Allocated(10, 0.9))) == Allocated(10, 0.9)


@pytest.mark.parametrize("values", [(1, 1.0), (5, 0.0), (5, math.inf)])
def test_no_part_without_sense(values: tuple[int, float]) -> None:
    with pytest.raises(ValueError, match="no random allocation"):
        Allocated(*values)


def test_several_records_of_a_person_are_bounded_by_a_plain_gaussian_an_epoch() -> None:
    """Two records in the same batch move its sum by twice as much: the worst of all cases."""
    two = for_group(Allocated(10, 0.9), 2)
    assert count_parts([two], 25) == {Gaussian(1.0, 0.45): 3}
    assert count_parts([for_group(two, 2)], 30) == {Gaussian(1.0, 0.225): 3}
