"""A bar of the table: what is asked, what was found, and whether it is met."""

import math
from dataclasses import dataclass
from typing import Literal

from speed.race import Ratio

Outcome = Literal["met", "missed", "not known"]


@dataclass(frozen=True)
class Bar:
    """One line of RESULTS.md. `goal` is "≥ 0.97" or "≤ 2%"; `how` tells what was measured."""

    name: str
    goal: str
    value: str
    outcome: Outcome
    how: str


def ratio_bar(name: str, goal: str, ratio: Ratio, how: str) -> Bar:
    """Met or missed if the whole interval is on one side of the goal."""
    value = f"**{shown(ratio.value)}** ({shown(ratio.low)} to {shown(ratio.high)})"
    few, many = ratio.spread
    told = f"{how}; {ratio.rounds} rounds, of which 80% gave {shown(few)} to {shown(many)}"
    if not ratio.known:
        told += "; not known to ±3%"
    return Bar(name, goal, value, verdict(goal, ratio.low, ratio.high), told)


def number_bar(name: str, goal: str, value: float, text: str, how: str) -> Bar:
    """A number that is counted, or measured once."""
    return Bar(name, goal, f"**{text}**", verdict(goal, value, value), how)


def missing_bar(name: str, goal: str, reason: str) -> Bar:
    return Bar(name, goal, "–", "not known", reason)


def verdict(goal: str, low: float, high: float) -> Outcome:
    sign, number = goal.split()[:2]
    bar = float(number.rstrip("%×").replace(",", "")) / (100 if number.endswith("%") else 1)
    if sign == "≤":
        low, high, bar = -high, -low, -bar
    if low >= bar:
        return "met"
    return "missed" if high < bar else "not known"


def shown(value: float) -> str:
    """Three digits, as many as the ratios are good for."""
    if not math.isfinite(value):
        return "∞"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 10 else f"{value:.3f}"
