"""Selection cost against dp-accounting, the theorems written out, and golden numbers."""

import json
import math
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import stats

from dpfp_ray.privacy.ledger_cost import composed_epsilon, part_from_json
from dpfp_ray.privacy.selection import (
    Selection,
    check_search,
    draw_trials,
    logarithmic_gamma,
    parse_selection,
    selection_curve,
    selection_epsilon,
)
from dpfp_ray.system.errors import UserError

D = 67_349
DELTA = 1 / (2 * D)


def dpsgd(batch: int = 1024, epochs: int = 10, sigma: float = 0.959) -> dp_accounting.DpEvent:
    step = dp_accounting.PoissonSampledDpEvent(batch / D, dp_accounting.GaussianDpEvent(sigma))
    return dp_accounting.SelfComposedDpEvent(step, epochs * D // batch)


# --- cost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "epsilon"), [("logarithmic:30", 5.36), ("geometric:30", 6.34), ("poisson:30", 11.10)]
)
def test_golden_repeat_and_select(text: str, epsilon: float) -> None:
    assert selection_epsilon([dpsgd()], parse_selection(text), DELTA) == pytest.approx(
        epsilon, abs=0.006
    )


def test_golden_base_run() -> None:
    accountant = rdp.RdpAccountant().compose(dpsgd())
    assert accountant.get_epsilon(DELTA) == pytest.approx(3.0, abs=0.005)


def test_golden_composition_by_rdp() -> None:
    accountant = rdp.RdpAccountant().compose(dpsgd(), 30)
    assert accountant.get_epsilon(DELTA) == pytest.approx(18.21, rel=2e-3)


def theorem_2(mean: float, shape: float, sigma: float, delta: float) -> float:
    """Papernot & Steinke's theorem 2 on a plain Gaussian (RDP of order a: a / (2 sigma^2))."""
    orders = np.array(rdp_privacy_accountant.DEFAULT_RDP_ORDERS, dtype=float)
    gamma = 1 / mean if shape == 1 else logarithmic_gamma(mean)
    one = orders / (2 * sigma**2)
    best_hat = min((1 - 1 / a) * e - math.log(gamma) / a for a, e in zip(orders, one, strict=True))
    curve = one + (1 + shape) * best_hat + math.log(mean) / (orders - 1)
    return min(
        e + math.log1p(-1 / a) - math.log(delta * a) / (a - 1)
        for a, e in zip(orders, curve, strict=True)
    )


@pytest.mark.parametrize(("kind", "shape"), [("logarithmic", 0.0), ("geometric", 1.0)])
def test_repeat_and_select_equals_the_theorem_written_out(kind: str, shape: float) -> None:
    found = selection_epsilon([dp_accounting.GaussianDpEvent(2.0)], Selection(kind, 12.0), 1e-5)
    assert found == pytest.approx(theorem_2(12.0, shape, 2.0, 1e-5), rel=1e-6)


@pytest.mark.parametrize("text", ["logarithmic:30", "geometric:30", "poisson:30"])
@pytest.mark.parametrize("event", [dpsgd(), dp_accounting.GaussianDpEvent(2.0)])
def test_the_curve_is_that_of_dp_accounting(text: str, event: dp_accounting.DpEvent) -> None:
    selection = parse_selection(text)
    curve = selection_curve([event], selection)
    repeated = dp_accounting.dp_event.RepeatAndSelectDpEvent(
        event, selection.expected, {"l": 0.0, "g": 1.0, "p": math.inf}[text[0]]
    )
    theirs = rdp.RdpAccountant(list(curve.orders)).compose(repeated)
    assert curve.values == pytest.approx(theirs._rdp, rel=1e-12)
    assert selection_epsilon([event], selection, DELTA) == theirs.get_epsilon(DELTA)


def test_a_ledger_adds_the_curve_up_as_the_selection_alone_says() -> None:
    selection = parse_selection("logarithmic:30")
    together = composed_epsilon({selection_curve([dpsgd()], selection): 1}, DELTA)
    alone = selection_epsilon([dpsgd()], selection, DELTA)
    assert alone * (1 - 1e-9) <= together <= 1.02 * alone


def test_the_curve_survives_a_ledger_s_files() -> None:
    curve = selection_curve([dpsgd(sigma=0.45)], parse_selection("geometric:5"))
    assert part_from_json(json.loads(json.dumps(asdict(curve)))) == curve


def test_orders_without_a_bound_are_left_out() -> None:
    curve = selection_curve([dpsgd(sigma=0.05)], parse_selection("poisson:5"))
    assert all(math.isfinite(value) for value in curve.values)


def test_only_repeat_and_select_has_a_curve() -> None:
    with pytest.raises(ValueError, match="logarithmic"):
        selection_curve([dpsgd()], Selection("composition"))


@pytest.mark.parametrize("others", [[], [dpsgd()]])
def test_unsupported_trials_are_a_user_error(others: list[dp_accounting.DpEvent]) -> None:
    events = [*others, dp_accounting.dp_event.UnsupportedDpEvent()]
    with pytest.raises(UserError, match="composition"):
        selection_epsilon(events, Selection("geometric", 3.0), 1e-5)


# --- random search over different mechanisms ----------------------------------------------------


@pytest.mark.parametrize("kind", ["logarithmic", "geometric", "poisson"])
def test_a_dominated_candidate_adds_nothing(kind: str) -> None:
    strong, weak = dp_accounting.GaussianDpEvent(1.0), dp_accounting.GaussianDpEvent(3.0)
    selection = Selection(kind, 10.0)
    alone = selection_epsilon([strong], selection, 1e-5)
    assert selection_epsilon([weak, strong], selection, 1e-5) == pytest.approx(alone)


def test_candidates_whose_curves_cross_cost_more_than_the_worse_of_the_two() -> None:
    steep = dpsgd(batch=32, epochs=3, sigma=0.45)
    flat = dp_accounting.GaussianDpEvent(1.2)
    selection = Selection("geometric", 10.0)
    each = [selection_epsilon([event], selection, DELTA) for event in (steep, flat)]
    assert selection_epsilon([steep, flat], selection, DELTA) > max(each) + 1e-3


# --- the draw -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [1.001, 2.0, 30.0, 1000.0])
def test_gamma_agrees_with_dp_accounting(mean: float) -> None:
    theirs = rdp_privacy_accountant._gamma_truncated_negative_binomial(0, mean)
    assert logarithmic_gamma(mean) == pytest.approx(theirs, rel=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["logarithmic", "geometric", "poisson"])
def test_draws_follow_the_distribution(kind: str) -> None:
    mean, size = 6.0, 20_000
    rng = np.random.default_rng(5)
    drawn = Counter(draw_trials(Selection(kind, mean), rng) for _ in range(size))
    gamma = logarithmic_gamma(mean)
    probability = {
        "logarithmic": lambda k: (1 - gamma) ** k / (k * math.log(1 / gamma)) if k else 0.0,
        "geometric": lambda k: (1 - 1 / mean) ** (k - 1) / mean if k else 0.0,
        "poisson": lambda k: math.exp(-mean) * mean**k / math.factorial(k),
    }[kind]
    expected = {k: size * probability(k) for k in range(60) if size * probability(k) > 20}
    rest = size - sum(expected.values())
    seen = [drawn[k] for k in expected]
    chi2 = stats.chisquare([*seen, size - sum(seen)], [*expected.values(), rest])
    assert chi2.pvalue > 1e-3
    assert kind == "poisson" or drawn[0] == 0


@pytest.mark.parametrize("kind", ["logarithmic", "geometric", "poisson"])
def test_a_number_of_trials_far_above_its_mean_is_not_truncated(kind: str) -> None:
    def many(_: float) -> int:
        return 1000

    rng: Any = SimpleNamespace(logseries=many, geometric=many, poisson=many)
    assert draw_trials(Selection(kind, 6.0), rng) == 1000


def test_nothing_to_draw_from() -> None:
    with pytest.raises(ValueError, match="no number of trials"):
        draw_trials(Selection("composition"), np.random.default_rng(0))


# --- words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "selection"),
    [
        ("logarithmic:30", Selection("logarithmic", 30.0)),
        (" Geometric:12.5 ", Selection("geometric", 12.5)),
        ("poisson:8", Selection("poisson", 8.0)),
        ("composition", Selection("composition")),
    ],
)
def test_parse(text: str, selection: Selection) -> None:
    assert parse_selection(text) == selection
    assert parse_selection(str(selection)) == selection


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("log:30", "logarithmic"),
        ("", "use one of"),
        ("logarithmic", "'logarithmic:30'"),
        ("geometric:", ">= 1"),
        ("poisson:many", ">= 1"),
        ("poisson:0.5", ">= 1"),
        ("poisson:nan", ">= 1"),
        ("poisson:inf", ">= 1"),
        ("composition:30", "write 'composition'"),
        ("free", "use one of"),
    ],
)
def test_bad_selections_name_the_fix(text: str, fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        parse_selection(text)


@pytest.mark.parametrize(
    ("text", "search", "scheduler"),
    [
        *(("logarithmic:30", "random", scheduler) for scheduler in (None, "none", "fifo")),
        ("composition", "optuna", "asha"),
    ],
)
def test_independent_trials_may_repeat_and_select(
    text: str, search: str, scheduler: str | None
) -> None:
    check_search(parse_selection(text), search, scheduler)


@pytest.mark.parametrize(
    ("search", "scheduler"),
    [
        *(("optuna", None), ("tpe", None), ("grid", None)),
        *(("random", "asha"), ("random", "pbt"), ("random", "median")),
    ],
)
@pytest.mark.parametrize("text", ["logarithmic:30", "geometric:30", "poisson:30"])
def test_searches_that_look_at_scores_and_grids_may_not(
    text: str, search: str, scheduler: str | None
) -> None:
    with pytest.raises(UserError, match="--selection composition"):
        check_search(parse_selection(text), search, scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["logarithmic", "geometric", "poisson"])
def test_a_list_of_the_same_mechanism_costs_what_it_costs_alone(kind: str) -> None:
    selection = Selection(kind, 30.0)
    alone = selection_epsilon([dpsgd()], selection, DELTA)
    listed = selection_epsilon([dpsgd(), dpsgd()], selection, DELTA)
    assert listed == pytest.approx(alone, rel=1e-12)
