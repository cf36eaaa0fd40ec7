"""What it costs to release the best trial of a sweep instead of one run fixed in advance.

Choosing by a score that depends on private training is itself a use of the data. Three prices:

    repeat-and-select  The number of trials K is random (logarithmic, geometric or Poisson), every
                       trial is an independent draw of hyperparameters followed by a private run,
                       and only the best is released. Costs about twice one run, almost whatever
                       the expected number of trials (Liu & Talwar 2019; Papernot & Steinke 2022,
                       theorems 2 and 6, which dp-accounting implements for RDP).
    composition        All trials are paid for. The price of anything adaptive, of a grid, of early
                       stopping, and of publishing more than the best trial.
    free               Trials only read what was already released (`release_once`, `moments`):
                       post-processing. The price is that of the releases, once.

What repeat-and-select covers is one output: the best trial. K itself and the other trials' models
and scores must stay private. With K known, the best of K has no such guarantee; a table of all
trials is composition.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import dp_accounting
import numpy as np
from dp_accounting import dp_event, pld, rdp
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import optimize

from dpfp_ray.plan.errors import UserError

# dp-accounting's shape of the truncated negative binomial; Poisson is its limit.
_SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
_KINDS = (*_SHAPES, "composition", "free")
_ADD_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
# Privacy losses are rounded up to multiples of this share of ε: about 1% too much at worst.
_PLD_INTERVAL = 5e-5
_HOPELESS_EPSILON = 1e3  # protects nobody, and pld would need gigabytes to say so


@dataclass(frozen=True)
class Selection:
    """How the number of trials is chosen; `expected` is its mean (None: known from the sweep)."""

    kind: str
    expected: float | None = None

    @property
    def repeats(self) -> bool:
        """Is this repeat-and-select, with a random number of trials?"""
        return self.kind in _SHAPES

    def __str__(self) -> str:
        return self.kind if self.expected is None else f"{self.kind}:{self.expected:g}"


@dataclass(frozen=True)
class SelectionCost:
    """ε of the whole selection at the δ asked for, and the accountant that vouches for it."""

    epsilon: float
    accountant: str
    selection: Selection
    trials: int | None


def parse_selection(text: str) -> Selection:
    """`logarithmic:30`, `geometric:30`, `poisson:30`, `composition`, `composition:30` or `free`."""
    kind, colon, number = text.strip().lower().partition(":")
    if kind not in _KINDS:
        raise UserError(f"unknown selection {text!r}: use one of {', '.join(_KINDS)}")
    if kind == "free" and colon:
        raise UserError(f"selection {text!r}: free takes no number of trials; write 'free'")
    if not colon:
        if kind in _SHAPES:
            raise UserError(f"selection {text!r}: add the expected trials, such as '{kind}:30'")
        return Selection(kind)
    try:
        expected = float(number)
    except ValueError:
        expected = math.nan
    if not (math.isfinite(expected) and expected >= 1.0):
        raise UserError(f"selection {text!r}: the trials must be a number >= 1, as in '{kind}:30'")
    if kind == "composition" and not expected.is_integer():
        raise UserError(f"selection {text!r}: composition counts whole trials, as in '{kind}:30'")
    return Selection(kind, expected)


def check_search(selection: Selection, search: str, scheduler: str | None) -> None:
    """Refuse repeat-and-select for a search to which its theorem does not apply.

    The theorem needs trials that are independent and identically distributed given the data:
    an adaptive search looks at earlier scores, a grid is not a draw, and a scheduler that stops
    trials early compares them while they run.
    """
    if not selection.repeats:
        return
    fix = "use --search random without a scheduler, or --selection composition"
    if search != "random":
        raise UserError(f"selection '{selection}' is not valid with search {search!r}: {fix}")
    if scheduler not in (None, "none", "fifo"):
        raise UserError(f"selection '{selection}' is not valid with scheduler {scheduler!r}: {fix}")


def draw_trials(selection: Selection, rng: np.random.Generator) -> int:
    """Draw the number of trials. Keep it secret, and never draw again because you dislike it.

    Poisson may give 0: then no trial runs and nothing that depends on the data is released. The
    theorem counts on that.
    """
    if selection.expected is None:
        raise ValueError(f"selection '{selection}' has no number of trials to draw")
    if selection.kind == "geometric":
        return int(rng.geometric(1.0 / selection.expected))
    if selection.kind == "poisson":
        return int(rng.poisson(selection.expected))
    if selection.kind == "logarithmic":
        gamma = logarithmic_gamma(selection.expected)
        return int(rng.logseries(1.0 - gamma)) if gamma < 1.0 else 1
    return int(selection.expected)


def logarithmic_gamma(mean: float) -> float:
    """γ of P[K = k] = (1 − γ)^k / (k ln(1/γ)), whose mean is (1/γ − 1) / ln(1/γ).

    Papernot & Steinke 2022, definition 1 with η = 0. With x = ln(1/γ): expm1(x)/x = mean.
    """
    if mean <= 1.0 + 1e-12:
        return 1.0
    top = 2.0 * math.log(mean) + 2.0
    return math.exp(-optimize.brentq(lambda x: math.expm1(x) / x - mean, 1e-13, top, xtol=1e-14))


def selection_epsilon(
    base_event: dp_accounting.DpEvent | Sequence[dp_accounting.DpEvent],
    selection: Selection,
    delta: float,
    trials: int | None = None,
    relation: dp_accounting.NeighboringRelation = _ADD_REMOVE,
) -> SelectionCost:
    """ε of releasing the best trial.

    One `base_event` means that all trials are this mechanism. A sequence of events means:
    for repeat-and-select, every mechanism the search space can draw (not only those drawn), and
    the worst of them is charged; for composition, the trials one by one; for free, the distinct
    releases that the trials read (a sweep over the clip makes one for each clip).

    `trials` is how many there were. Only composition needs it, and takes `selection.expected`
    in its absence; repeat-and-select must not use it.
    """
    one = isinstance(base_event, dp_accounting.DpEvent)
    events = [base_event] if one else list(base_event)
    if not events:
        raise ValueError("base_event must not be an empty sequence")
    if selection.repeats:
        epsilon = _repeat_and_select_epsilon(events, selection, delta, relation)
        return SelectionCost(epsilon, "rdp", selection, trials)
    if selection.kind == "composition":
        if trials is None and one and selection.expected is not None:
            trials = int(selection.expected)
        if one and trials is None:
            raise ValueError("trials is needed to charge composition for one base_event")
        trials = len(events) if trials is None else trials
        if not one and trials != len(events):
            raise ValueError(f"trials is {trials}, but base_event lists {len(events)}")
        events = events * trials if one else events
    epsilon, accountant = composition_epsilon(events, delta, relation)
    return SelectionCost(epsilon, accountant, selection, trials)


def composition_epsilon(
    events: Sequence[dp_accounting.DpEvent],
    delta: float,
    relation: dp_accounting.NeighboringRelation = _ADD_REMOVE,
) -> tuple[float, str]:
    """ε of releasing everything in `events`, and the accountant: the lower of pld and rdp.

    Both are upper bounds; pld is tighter wherever it supports the events.
    """
    counts = Counter(events)  # equal trials are composed by one power, not one by one
    bounds: list[tuple[float, str]] = []
    renyi = rdp.RdpAccountant(neighboring_relation=relation)
    if all(renyi.supports(event) for event in counts):
        bounds.append((_composed(renyi, counts, delta), "rdp"))
    scale = bounds[0][0] if bounds else 2.0
    losses = pld.PLDAccountant(
        relation, value_discretization_interval=_PLD_INTERVAL * max(scale, 1e-3)
    )
    if scale < _HOPELESS_EPSILON and all(losses.supports(event) for event in counts):
        bounds.append((_composed(losses, counts, delta), "pld"))
    if not bounds:
        raise UserError(f"no accountant supports these trials under {relation.name}: {events[0]}")
    return min(bounds)


def _composed(
    accountant: dp_accounting.PrivacyAccountant,
    counts: Counter[dp_accounting.DpEvent],
    delta: float,
) -> float:
    for event, count in counts.items():
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def _repeat_and_select_epsilon(
    events: Sequence[dp_accounting.DpEvent],
    selection: Selection,
    delta: float,
    relation: dp_accounting.NeighboringRelation,
) -> float:
    # Both trial and choice are Rényi bounds: no pld version of the theorem is in dp-accounting.
    orders = np.array(rdp_privacy_accountant.DEFAULT_RDP_ORDERS, dtype=float)
    mean, shape = selection.expected, _SHAPES[selection.kind]
    accountants = [rdp.RdpAccountant(orders, relation) for _ in events]
    if not all(a.supports(event) for a, event in zip(accountants, events, strict=True)):
        raise UserError(
            f"selection '{selection}' needs RDP, which does not support these trials under "
            f"{relation.name}: use --selection composition"
        )
    if len(events) == 1:
        repeated = dp_event.RepeatAndSelectDpEvent(events[0], mean, shape)
        return float(accountants[0].compose(repeated).get_epsilon(delta))
    # A trial that first draws its mechanism has, at every order, at most the worst one's RDP
    # (Rényi divergence is quasi-convex). The maximum must be taken order by order and *before* the
    # selection: the largest of the final ε's would be too small. dp-accounting has no event for
    # this, hence its inner names; a test holds them to the public event above.
    curves = [a.compose(event)._rdp for a, event in zip(accountants, events, strict=True)]
    worst = np.max(curves, axis=0)
    best = rdp_privacy_accountant._compute_rdp_repeat_and_select(orders, worst, mean, shape)
    return float(rdp.compute_epsilon(orders, best, delta)[0])
