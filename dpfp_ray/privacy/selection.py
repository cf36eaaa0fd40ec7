"""What it costs to release the best trial of a sweep instead of one run fixed in advance.

Choosing by a score that depends on private training is itself a use of the data. Two prices:

    repeat-and-select  The number of trials K is random (logarithmic, geometric or Poisson), every
                       trial is an independent draw of hyperparameters followed by a private run,
                       and only the best is released. Costs about twice one run, almost whatever
                       the expected number of trials (Liu & Talwar 2019; Papernot & Steinke 2022,
                       theorems 2 and 6, which dp-accounting implements for RDP).
    composition        All trials are paid for. The price of anything adaptive, of a grid, of early
                       stopping, and of publishing more than the best trial.

(Trials that only read one and the same noisy release, as those of `moments` do, are
post-processing: they need no selection, and composition charges the release once.)

What repeat-and-select covers is one output: the best trial. K itself and the other trials' models
and scores must stay private, and so must whatever shows which of the draws has won: the theorem is
about trials that are independent and identically distributed given the data. With K known, the best
of K has no such guarantee; a table of all trials is composition. `sweeps/selection.py` keeps to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import dp_accounting
import numpy as np
from dp_accounting import rdp
from dp_accounting.rdp import rdp_privacy_accountant
from numpy.typing import NDArray
from scipy import optimize

from dpfp_ray.privacy.accounting import unconverged_orders_left_out
from dpfp_ray.privacy.ledger_cost import WIDE_ORDERS, RdpCurve
from dpfp_ray.system.errors import UserError

# dp-accounting's shape of the truncated negative binomial; Poisson is its limit.
_SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
_KINDS = (*_SHAPES, "composition")
_ADD_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
# Where dp-accounting looks for the best order, and where ledgers ask (`ledger_cost`).
_ORDERS = tuple(
    sorted({*map(float, rdp_privacy_accountant.DEFAULT_RDP_ORDERS), *map(float, WIDE_ORDERS)})
)


@dataclass(frozen=True)
class Selection:
    """How the number of trials is chosen; `expected` is its mean, None for composition."""

    kind: str
    expected: float | None = None

    @property
    def repeats(self) -> bool:
        return self.kind in _SHAPES

    def __str__(self) -> str:
        return self.kind if self.expected is None else f"{self.kind}:{self.expected:g}"


def parse_selection(text: str) -> Selection:
    """`logarithmic:30`, `geometric:30`, `poisson:30` or `composition`."""
    kind, colon, number = text.strip().lower().partition(":")
    if kind not in _KINDS:
        raise UserError(f"unknown selection {text!r}: use one of {', '.join(_KINDS)}")
    if kind == "composition":
        if colon:
            raise UserError(
                f"selection {text!r}: composition charges the trials that there are; write "
                "'composition', and give their number with --samples"
            )
        return Selection(kind)
    try:
        expected = float(number)
    except ValueError:
        expected = math.nan
    if not 1.0 <= expected < math.inf:
        raise UserError(
            f"selection {text!r}: add the expected trials, a number >= 1, as in '{kind}:30'"
        )
    return Selection(kind, expected)


def check_search(selection: Selection, search: str, scheduler: str | None) -> None:
    """Refuse repeat-and-select for a search to which its theorem does not apply.

    The theorem needs trials that are independent and identically distributed given the data:
    an adaptive search looks at earlier scores, a grid is not a draw, and a scheduler that stops
    trials early compares them while they run.
    """
    if not selection.repeats:
        return
    wrong = None if search == "random" else f"search {search!r}"
    if wrong is None and scheduler not in (None, "none", "fifo"):
        wrong = f"scheduler {scheduler!r}"
    if wrong:
        fix = "use --search random without a scheduler, or --selection composition"
        raise UserError(f"selection '{selection}' is not valid with {wrong}: {fix}")


def draw_trials(selection: Selection, rng: np.random.Generator) -> int:
    """Draw the number of trials. Keep it secret, and never draw again because you dislike it.

    Poisson may give 0: then no trial runs and nothing that depends on the data is released. The
    theorem counts on that, and on tails that are not truncated: K may be many times its mean.
    """
    if selection.expected is None:
        raise ValueError(f"selection '{selection}' has no number of trials to draw")
    if selection.kind == "geometric":
        return int(rng.geometric(1.0 / selection.expected))
    if selection.kind == "poisson":
        return int(rng.poisson(selection.expected))
    gamma = logarithmic_gamma(selection.expected)
    return int(rng.logseries(1.0 - gamma)) if gamma < 1.0 else 1


def logarithmic_gamma(mean: float) -> float:
    """γ of P[K = k] = (1 − γ)^k / (k ln(1/γ)), whose mean is (1/γ − 1) / ln(1/γ).

    Papernot & Steinke 2022, definition 1 with η = 0. With x = ln(1/γ): expm1(x)/x = mean.
    """
    if mean <= 1.0 + 1e-12:
        return 1.0
    top = 2.0 * math.log(mean) + 2.0
    return math.exp(-optimize.brentq(lambda x: math.expm1(x) / x - mean, 1e-13, top, xtol=1e-14))


def selection_curve(
    events: Sequence[dp_accounting.DpEvent],
    selection: Selection,
    relation: dp_accounting.NeighboringRelation = _ADD_REMOVE,
) -> RdpCurve:
    """The Rényi curve of releasing the best trial: what a ledger is charged for a whole selection.

    `events` are all mechanisms that the search space can draw, not only those that it drew; the
    worst of them is charged at every order. Orders at which no finite bound is known are left out.

    A ledger's entry for a selection is one `Use` with this curve as its only part, one step, begun
    before the first trial; its trials are no entries of their own. K must not be in it.
    """
    if not selection.repeats or selection.expected is None:
        raise ValueError(f"selection '{selection}' is none of {', '.join(_SHAPES)}")
    if not events:
        raise ValueError("events must not be an empty sequence")
    orders = np.array(_ORDERS)
    with unconverged_orders_left_out():
        # A trial that first draws its mechanism has, at every order, at most the worst one's RDP
        # (Rényi divergence is quasi-convex). The maximum must be taken order by order and *before*
        # the selection: the largest of the final ε's would be too small. dp-accounting has no event
        # for this, hence its inner names; a test holds them to its public event.
        worst = np.max([_trial_rdp(one, orders, selection, relation) for one in events], axis=0)
        values = rdp_privacy_accountant._compute_rdp_repeat_and_select(
            orders, worst, selection.expected, _SHAPES[selection.kind]
        )
    known = np.isfinite(values) & (values >= 0)
    if not known.any():
        raise UserError(f"selection '{selection}' has no finite bound for these trials")
    return RdpCurve(tuple(orders[known].tolist()), tuple(np.asarray(values)[known].tolist()))


def selection_epsilon(
    events: Sequence[dp_accounting.DpEvent],
    selection: Selection,
    delta: float,
    relation: dp_accounting.NeighboringRelation = _ADD_REMOVE,
) -> float:
    """ε at `delta` of releasing the best trial; see `selection_curve`.

    How many trials there were does not enter, and must not.
    """
    curve = selection_curve(events, selection, relation)
    return float(rdp.compute_epsilon(curve.orders, np.array(curve.values), delta)[0])


def _trial_rdp(
    event: dp_accounting.DpEvent,
    orders: NDArray[np.float64],
    selection: Selection,
    relation: dp_accounting.NeighboringRelation,
) -> NDArray[np.float64]:
    accountant = rdp.RdpAccountant(orders, relation)
    if not accountant.supports(event):
        raise UserError(
            f"selection '{selection}' needs RDP, which does not support these trials under "
            f"{relation.name}: use --selection composition"
        )
    found = np.asarray(accountant.compose(event)._rdp, dtype=np.float64)
    return np.where(found >= 0, found, np.inf)  # NaN is no bound
