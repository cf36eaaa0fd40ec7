"""The first screen: who wins at which ε, by how much, at what cost, and what the ε is worth.

A winner is named only where a paired test says so (`results.contests`); all else is a tie, or says
why nothing can be said.
"""

from collections import Counter
from collections.abc import Sequence

from dpfp_ray.reports.cost_tables import guarantee_text
from dpfp_ray.reports.formats import duration
from dpfp_ray.reports.plots import cell_label
from dpfp_ray.results.cells import Cell, relative
from dpfp_ray.results.contests import Contest, Outcome
from dpfp_ray.results.runs import Run
from dpfp_ray.results.statistics import Pair

MORE_SEEDS = "run with --seeds 5"
OUTCOMES: dict[Outcome, str] = {
    "tie": "a tie",
    "one seed": "one seed only",
    "one class": "one class only",
    "tuned": "tuned, not compared",
    "untested": "not tested",
}


class Card:
    """A contest in words; the templates of the report and of the service show it."""

    def __init__(self, contest: Contest) -> None:
        self.contest = contest
        self.budget = contest.budget or "without privacy"
        self.task, self.model = contest.task, contest.model
        self.first = contest.ranked[0]
        self.guarantee = self._guarantee()

    def _guarantee(self) -> str:
        shown = [self.contest.winner] if self.contest.winner else self.contest.leaders
        found = {cell.guarantee for cell in shown if cell is not None}
        return found.pop() if len(found) == 1 else ""

    @property
    def title(self) -> str:
        """The winner's name, or why there is none."""
        names = joined([cell_label(cell) for cell in self.contest.leaders])
        outcome = self.contest.outcome
        if outcome == "won":
            return cell_label(self.contest.winner or self.first)
        if outcome == "alone":
            return cell_label(self.first)
        if outcome == "tie":
            return f"Tie: {names}"
        return {
            "one seed": "No winner: one seed",
            "one class": "No winner: one class",
            "tuned": "No winner: tuned settings",
        }.get(outcome, "No winner: not tested")

    @property
    def scores(self) -> list[tuple[str, str]]:
        """Every method's accuracy with its interval, best mean first."""
        return [
            (cell_label(cell) + (" (one class)" if cell.one_class else ""), accuracy_text(cell))
            for cell in self.contest.ranked
        ]

    @property
    def lead_text(self) -> str:
        contest = self.contest
        if contest.outcome == "alone":
            return "no other private method was run"
        if contest.outcome == "tuned":
            return f"each is the best of several settings; {MORE_SEEDS} of one setting to compare"
        if contest.outcome == "untested":
            return contest.why_not or "nothing was tested"
        if contest.outcome == "one seed":
            return f"the spread over seeds is unknown; {MORE_SEEDS} to compare methods"
        if contest.outcome == "one class":
            return "every model answers one class, whatever the row"
        rival = next(cell for cell in contest.ranked if cell is not self.first)
        return f"{difference_text(contest.pair(self.first, rival))} against {cell_label(rival)}"

    @property
    def _whose(self) -> str:
        """Where no title names the method that is meant: the one with the highest mean."""
        return "" if self.contest.outcome in ("won", "alone") else f"{cell_label(self.first)}: "

    @property
    def price_text(self) -> str:
        plain = self.contest.plain
        if plain is None:
            return "no run without privacy to compare with"
        pair = self.contest.pair(self.first, plain)
        if pair is None:
            return f"Non-DP has {accuracy_text(plain)}"
        return f"{self._whose}{difference_text(pair)} against Non-DP"

    @property
    def majority_text(self) -> str:
        share = self.first.majority
        return "" if share is None else f"{100 * share:.2f}% by always answering the largest class"

    @property
    def cost_text(self) -> str:
        seconds, before = self.first.average("train_seconds"), self.first.average("prepare_seconds")
        memory = self.first.average("peak_memory_bytes")
        parts = [f"{duration(seconds).text} of training"] if seconds is not None else []
        parts += [f"{duration(before).text} before it"] if before is not None else []
        parts += [f"{memory / 2**20:,.0f} MiB"] if memory is not None else []
        times, share = self.relative("train_seconds"), self.relative("peak_memory_bytes")
        shown = [
            f"{ratio:.2f}× {what}"
            for ratio, what in ((times, "the training time"), (share, "the memory"))
            if ratio is not None
        ]
        tail = f" ({', '.join(shown)} of Non-DP)" if shown else ""
        return self._whose + (", ".join(parts) or "cost not recorded") + tail

    def relative(self, column: str) -> float | None:
        """A measured column over that of training without privacy."""
        plain = self.contest.plain
        return None if self.first is plain else relative(self.first, plain, column)

    @property
    def guarantee_text(self) -> str:
        words = {
            "proved": "a theorem covers this ε",
            "nominal": "what the accounting says; no guarantee",
            "unknown": "the record does not say",
        }
        said = [
            f"{cell_label(cell)}: {words.get(cell.guarantee, guarantee_text(cell))}"
            for cell in ([self.first] if self.contest.outcome == "won" else self.contest.leaders)
        ]
        return "; ".join(said)

    @property
    def proved(self) -> Cell | None:
        """The method with the best mean whose guarantee is a theorem that no audit refuted."""
        return next((cell for cell in self.contest.ranked if cell.guarantee == "proved"), None)


def accuracy_text(cell: Cell) -> str:
    shown = f"{100 * cell.accuracy:.2f}%"
    if cell.interval is None:
        return shown
    return f"{shown} [{100 * cell.interval[0]:.1f}, {100 * cell.interval[1]:.1f}]"


def difference_text(pair: Pair | None) -> str:
    if pair is None:
        return "not tested"
    low, high = pair.simultaneous
    shown = f"{_points(pair.difference)} [{signed_text(low)}, {signed_text(high)}]"
    return f"{shown}, a tie" if pair.call == "tie" else shown


def headline(found: Sequence[Contest], refuted: Sequence[Run]) -> str:
    """One sentence or two; all else on the page is detail."""
    contests = [contest for contest in found if len(contest.ranked) > 1]
    if not any(contest.budget for contest in found):
        return "No private run has finished yet."
    if not contests:
        names = joined(list(dict.fromkeys(cell_label(one.ranked[0]) for one in found)))
        return f"Nothing to compare: {names} ran without another private method beside it."
    if len(contests) == 1:
        return _one(contests[0], refuted)
    outcomes = Counter(contest.outcome for contest in contests)
    rest = ", ".join(
        f"{outcomes[outcome]} {words.removeprefix('a ') + ('s' if outcomes[outcome] > 1 else '')}"
        if outcome == "tie"
        else f"{outcomes[outcome]} {words}"
        for outcome, words in OUTCOMES.items()
        if outcomes[outcome]
    )
    if not outcomes["won"]:
        advice = f"; {MORE_SEEDS}" if outcomes["one seed"] == len(contests) else ""
        return f"No winner in {len(contests)} comparisons: {rest}{advice}."
    wins: dict[str, list[Contest]] = {}
    for contest in contests:
        if contest.winner is not None:
            wins.setdefault(contest.winner.key.method, []).append(contest)
    said = []
    for won in sorted(wins.values(), key=len, reverse=True):
        winners = [contest.winner for contest in won if contest.winner is not None]
        name = max((cell_label(cell) for cell in winners), key=len)
        count = f"all {len(won)}" if len(won) == len(contests) else f"{len(won)}"
        said.append(f"{name} is best in {count}{worth(winners, refuted)}")
    tail = f" ({rest})" if rest else ""
    return f"Of {len(contests)} comparisons, {'; '.join(said)}{tail}."


def _one(contest: Contest, refuted: Sequence[Run]) -> str:
    card = Card(contest)
    at = f"at {contest.budget} on {contest.task}" if contest.budget else f"on {contest.task}"
    names = joined([cell_label(cell) for cell in contest.leaders])
    if contest.winner is not None:
        lead = f"{cell_label(contest.winner)} is best {at}"
        return f"{lead}{worth([contest.winner], refuted)}."
    if contest.outcome == "tie":
        return f"{names} tie {at}: these seeds and dev rows do not tell them apart."
    return f"No winner {at}: {card.lead_text}."


def worth(winners: Sequence[Cell], refuted: Sequence[Run]) -> str:
    guarantees = {cell.guarantee for cell in winners}
    if "refuted" in guarantees or any(
        run.method == cell.key.method for run in refuted for cell in winners
    ):
        return ", but an audit refuted its ε"
    if guarantees == {"nominal"}:
        return ", but its ε is only nominal"
    return ", and its guarantee is proved" if guarantees == {"proved"} else ""


def joined(names: Sequence[str]) -> str:
    """A, B and C."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def signed_text(share: float) -> str:
    return f"{100 * share:+.2f}".replace("-", "−")


def _points(share: float) -> str:
    return f"{signed_text(share)} points"
