"""What came out, in a sentence or two; all else on a page is detail.

A winner is named only where a paired test says so (`results.contests`); all else is a tie, or says
why nothing can be said. What was measured leads all the same.
"""

from collections import Counter
from collections.abc import Sequence

from dpfp_ray.results.cells import Cell
from dpfp_ray.results.contests import Contest, Outcome
from dpfp_ray.results.runs import Run

MOST_SENTENCES = 4  # comparisons that are told one by one; more are counted
NAMED = 3  # methods of a tie that are all named
PLACE = "{place}"
MORE_SEEDS = "run with --seeds 5"
OUTCOMES: dict[Outcome, str] = {
    "tie": "ties",
    "few seeds": "too few seeds to tell",
    "one class": "one class only",
    "tuned": "tuned, not compared",
    "untested": "not tested",
}


def headline(contests: Sequence[Contest], refuted: Sequence[Run]) -> str:
    compared = [contest for contest in contests if len(contest.ranked) > 1]
    if not any(contest.budget for contest in contests):
        return "No private run has finished yet."
    if not compared:
        alone = [f"{measured(c.ranked[0])} {place(c)}" for c in contests[:MOST_SENTENCES]]
        return f"{joined(alone)}; no other private method ran beside it."
    if {contest.outcome for contest in compared} == {"few seeds"}:
        leads = [f"{measured(c.ranked[0])} {place(c)}" for c in compared[:MOST_SENTENCES]]
        more = len(compared) - MOST_SENTENCES
        leads += [f"{more} more comparisons"] if more > 0 else []
        return f"Too few seeds to tell methods apart ({MORE_SEEDS}). Highest: {joined(leads)}."
    if len(compared) <= MOST_SENTENCES:
        # What holds at several ε is said once.
        templates: dict[str, list[Contest]] = {}
        for contest in compared:
            templates.setdefault(sentence(contest, refuted), []).append(contest)
        return " ".join(text.replace(PLACE, places(same)) for text, same in templates.items())
    return counts(compared, refuted)


def sentence(contest: Contest, refuted: Sequence[Run]) -> str:
    """What came out, with PLACE for the task and the ε."""
    lead = f"{measured(contest.ranked[0])} has the highest accuracy {PLACE}"
    if contest.winner is not None:
        return f"{contest.winner.title} is best {PLACE}{worth([contest.winner], refuted)}."
    if contest.outcome == "tie":
        names = sorted(cell.title for cell in contest.leaders)
        if len(names) > NAMED:  # what they are stands in the table
            first = contest.ranked[0].title
            return f"{first} has the highest mean {PLACE}, but others tie with it."
        return f"{joined(names)} tie {PLACE}: these seeds and dev rows do not tell them apart."
    reason = {
        "few seeds": f"too few seeds to tell methods apart; {MORE_SEEDS}",
        "one class": "every model answers one class, whatever the row",
        "tuned": f"each is the best of several settings; {MORE_SEEDS} of one setting to compare",
        "untested": contest.why_not or "nothing was tested",
    }[contest.outcome]
    return f"{lead}: {reason}."


def idle(contests: Sequence[Contest]) -> list[str]:
    """Which methods' ε bought nothing that can be told from no private data at all."""
    lines = []
    for contest in contests:
        names = [
            cell.title
            for cell in contest.ranked
            if (pair := contest.pair(cell, contest.floor)) and pair.call in ("tie", "worse")
        ]
        if names:
            lines.append(
                f"{joined(names)} {place(contest)}: the private records added nothing that can be "
                "told from noise, so this ε was spent for nothing."
            )
    return lines


def counts(contests: Sequence[Contest], refuted: Sequence[Run]) -> str:
    outcomes = Counter(contest.outcome for contest in contests)
    rest = ", ".join(
        "a tie" if outcome == "tie" and outcomes[outcome] == 1 else f"{outcomes[outcome]} {words}"
        for outcome, words in OUTCOMES.items()
        if outcomes[outcome]
    )
    if not outcomes["won"]:
        return f"No winner in {len(contests)} comparisons: {rest}."
    wins: dict[str, list[Cell]] = {}
    for contest in contests:
        if contest.winner is not None:
            wins.setdefault(contest.winner.key.method, []).append(contest.winner)
    parts = []
    for winners in sorted(wins.values(), key=len, reverse=True):
        name = max((cell.title for cell in winners), key=len)
        count = f"all {len(winners)}" if len(winners) == len(contests) else f"{len(winners)}"
        parts.append(f"{name} is best in {count}{worth(winners, refuted)}")
    tail = f" ({rest})" if rest else ""
    return f"Of {len(contests)} comparisons, {'; '.join(parts)}{tail}."


def place(contest: Contest) -> str:
    return f"on {contest.task}" + (f" at {contest.budget}" if contest.budget else "")


def places(contests: Sequence[Contest]) -> str:
    """Such as: on demo at ε = 1, 3 and 8 (PLD)."""
    first = contests[0]
    same = {(c.task, c.budget.accountant if c.budget else None) for c in contests}
    if len(same) > 1 or first.budget is None:
        return joined([place(contest) for contest in contests])
    epsilons = joined([f"{c.budget.epsilon:g}" for c in contests if c.budget])
    return place(first).replace(f"ε = {first.budget.epsilon:g}", f"ε = {epsilons}")


def measured(cell: Cell) -> str:
    return f"{cell.title} with {accuracy_text(cell)}"


def accuracy_text(cell: Cell) -> str:
    """With its interval over rows and seeds, where one is known."""
    ends = cell.interval
    interval = f" [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]" if ends else ""
    return f"{100 * cell.accuracy:.1f}%{interval}"


def worth(winners: Sequence[Cell], refuted: Sequence[Run]) -> str:
    guarantees = {cell.guarantee for cell in winners}
    if "refuted" in guarantees or any(
        run.method == cell.key.method for run in refuted for cell in winners
    ):
        return ", but an audit refuted its ε"
    if guarantees == {"nominal"}:
        return ", but its ε is only nominal"
    if guarantees == {"claimed"}:
        return ", with an ε that its library claims"
    return ", and its guarantee is proved" if guarantees == {"proved"} else ""


def joined(names: Sequence[str]) -> str:
    """A, B and C."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
