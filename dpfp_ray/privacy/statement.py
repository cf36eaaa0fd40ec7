"""What a result's ε means: who is protected, from what, on which assumptions, and what is not.

`statement` gives facts as JSON, one for every result; `render` words them for people, `brief` in a
few lines. `verdict` is the one word that tables show:

    proved    (ε, δ) as stated follows from theorems that apply to what the code does
    nominal   the number is what the method's authors' accounting says, and no guarantee
    none      nothing is promised
"""

from collections.abc import Mapping
from typing import Any

from dpfp_ray.plan.plan import ACCOUNTANTS, Plan
from dpfp_ray.privacy import accounting, participation

SCHEMA = 1
RARE = 1e-6  # chance with which a record is drawn more often than "at most" says

NEIGHBOURS = {
    "zero_out": "one record's text is replaced by nothing (its representation by 0)",
    "replace_one": "one record's text is replaced by any other text",
    "add_remove": "one record, text and label, is added or removed",
}
ASSUMES = {
    "gdp": "the central limit theorem of Bu et al. 2020: asymptotic, can be too low",
    "rdp": "Rényi DP (Mironov et al. 2019): an upper bound, not tight",
    "pld": "privacy loss distributions (Doroshenko et al. 2022): an upper bound, tight",
}
EXACT = "the exact profile of one Gaussian release (Balle & Wang 2018; Dong et al. 2022)"
WHY_NOMINAL = (
    "The encoder's update is computed from the raw text (the Jacobian of h is taken at x), not "
    "from the noisy representation alone, so post-processing does not cover it: a token that "
    "occurs in one record shows in the weights whatever the noise.",
    "The accounting counts on the draw of a record being hidden, but the method releases a list of "
    "noisy rows with their labels, which in the worst case shows who was drawn.",
    "Sensitivity C is that of a text replaced by nothing; adding, removing or replacing a record, "
    "and its label, are not covered.",
)
FROZEN = (
    "The encoder is frozen, so all that is learnt comes from noisy rows and public labels, and "
    "post-processing covers it."
)
CENTRAL_LIMIT = (
    "The budget is met by the central-limit accountant, which is no upper bound; the ε of rdp and "
    "pld are."
)


def verdict(plan: Plan) -> str:
    """none | nominal | proved: of the plan's own ε, by its own accountant."""
    if not plan.private:
        return "none"
    if plan.method == "dpfp" and not plan.one_release:
        return "nominal"
    return "nominal" if plan.accountant == "gdp" and plan.p < 1 else "proved"


def statement(
    plan: Plan,
    noise_multiplier: float,
    *,
    steps: int | None = None,
    seed_known: bool = False,
    tuning: Mapping[str, Any] | None = None,
    audit: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Facts about a bound plan after `steps` steps (default: all).

    `tuning` is what choosing this run among others cost (`epsilon`, `text`), `audit` the bound of
    an audit of this plan; both can be set in the result later.
    """
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "verdict": verdict(plan),
        "plan_hash": plan.hash,
        "method": f"{plan.method} {plan.mode}" if plan.method == "dpfp" else plan.method,
        "scope": plan.scope,
        "audit": dict(audit) if audit else None,
    }
    if not plan.private or plan.delta is None:
        return facts | {"not_protected": ["everything in the training data"]}
    mech = accounting.mechanism(plan, noise_multiplier, steps)
    return facts | {
        "trust": _trust(plan),
        "unit": "one training record",
        "adjacency": str(plan.adjacency),
        "neighbours": _neighbours(plan),
        "epsilon": accounting.epsilons(mech, plan.delta),
        "delta": plan.delta,
        "accountant": plan.accountant,
        "accountants": {name: _assumption(plan, name) for name in ACCOUNTANTS},
        "amplification": _amplification(plan, mech),
        "proved": _proved(plan, mech),
        "reasons": _reasons(plan),
        "released": _released(plan),
        "not_protected": _not_protected(plan),
        "assumptions": _assumptions(plan, seed_known),
        "tuning": dict(tuning) if tuning else {"epsilon": None, "text": _tuning(plan)},
    }


def _trust(plan: Plan) -> str:
    if plan.mode == "release_once":
        return "local: each record's owner could add the noise; central, if the holder does"
    return "central: whoever holds the data and runs this is trusted"


def _neighbours(plan: Plan) -> str:
    text = NEIGHBOURS[str(plan.adjacency)]
    if plan.label_epsilon:
        text += f", and its label by any other (randomised response, ε = {plan.label_epsilon:g})"
    return text


def _assumption(plan: Plan, accountant: str) -> dict[str, Any]:
    exact = plan.p == 1 and accountant != "rdp"
    hidden = plan.p == 1 or plan.method != "dpfp"
    return {
        "rests_on": EXACT if exact else ASSUMES[accountant],
        "upper_bound": exact or accountant != "gdp",
        "sampler": "none: every record takes part" if plan.p == 1 else "Poisson, as assumed",
        "applies": hidden,
    }


def _amplification(plan: Plan, mech: accounting.Mechanism) -> dict[str, Any]:
    """ε if nobody counts on draws being hidden: see `participation`."""
    assert plan.delta is not None
    if plan.p == 1:
        same = accounting.epsilon(mech, plan.delta, "pld")
        return {"counted": False, "without_amplification": same}
    return {
        "counted": True,
        "draws_hidden": plan.method != "dpfp",
        "without_amplification": participation.shown_epsilon(mech, plan.delta),
        "expected_rows": mech.n * mech.p,
        "epsilon_for_expected_rows": participation.expected_epsilon(mech, plan.delta),
        "rows_at_most": participation.likely_most_rows(mech, RARE),
        "rows_at_most_chance": 1 - RARE,
    }


def _proved(plan: Plan, mech: accounting.Mechanism) -> dict[str, Any]:
    """The smallest ε that is a theorem for this run, if there is one."""
    assert plan.delta is not None
    if plan.method == "dpfp" and not plan.one_release:
        if plan.scope == "all":
            return {"epsilon": None, "why": "no ε is proved while the encoder is trained"}
        return {
            "epsilon": participation.shown_epsilon(mech, plan.delta),
            "why": f"{FROZEN} Without amplification: a record drawn N times costs √N C/σ in GDP, "
            "averaged over N.",
        }
    known = [accounting.epsilon(mech, plan.delta, name) for name in ("pld", "rdp")]
    least = min((value for value in known if value is not None), default=None)
    return {"epsilon": least, "why": "docs/privacy.md has the proof"}


def _reasons(plan: Plan) -> list[str]:
    if plan.method == "dpfp" and not plan.one_release:
        return list(WHY_NOMINAL if plan.scope == "all" else (FROZEN, *WHY_NOMINAL[1:]))
    return [CENTRAL_LIMIT] if verdict(plan) == "nominal" else []


def _released(plan: Plan) -> list[str]:
    if plan.mode == "release_once" and plan.one_release:
        labels = "its randomised label" if plan.label_epsilon else "its label as it is"
        return [f"every record's bounded representation with noise, once, and {labels}"]
    if plan.mode == "moments" and plan.one_release:
        return ["class counts, class sums and second moment of the representations, with noise"]
    if plan.method == "dpfp":
        return ["the trained weights; labels enter them as they are"]
    return ["the trained weights, and those after every step"]


def _not_protected(plan: Plan) -> list[str]:
    missing = []
    if plan.method == "dpfp" and plan.adjacency != "add_remove" and not plan.label_epsilon:
        missing.append("labels: they are counted as public")
    if plan.adjacency != "add_remove":
        missing.append("the presence of a record: only its content is hidden")
    if plan.method == "dpfp" and not plan.one_release and plan.scope == "all":
        missing.append("texts, from whoever sees the trained encoder: see the reasons")
    if not plan.one_release:
        missing.append(
            "training loss and timings, on screen and in the result: computed from private records "
            "without noise; do not publish them"
        )
    missing.append("dev records: counted as public, their scores are shown as they are")
    if plan.train_file and not plan.dev_file:
        missing[-1] += "; they were held out of your training file"
    if plan.prior == "dev":
        missing.append("dev texts: they shape the head (prior dev), without noise")
    missing.append("persons with several records: the unit is one record")
    return missing


def _assumptions(plan: Plan, seed_known: bool) -> list[str]:
    found = [
        f"public: D = {plan.D:,} (δ and the plan follow from it), class names, the encoder's "
        "pre-trained weights",
        "noise is pseudo-random (Philox) under a secret seed, in floating-point numbers; the "
        "theorems speak of real numbers",
    ]
    if seed_known:
        found.append("the seed was given: whoever knows it can take the noise off again")
    return found


def _tuning(plan: Plan) -> str:
    if plan.one_release:
        return (
            "none: ridge, shrinkage and prior can be tuned on this release at no further cost. "
            "Another ε, clip, scaling or seed is another release, and releases compose."
        )
    return (
        "none counted: right for one run whose hyperparameters were fixed beforehand. Choosing "
        "among runs on these data costs more; `dpfp sweep` states it."
    )


def number(value: Any) -> str:
    """An ε for people; JSON has "inf" for what it cannot say."""
    return "none known" if value is None else "∞" if float(value) > 1e4 else f"{float(value):.3g}"


def one_line(facts: Mapping[str, Any]) -> str:
    """The guarantee in a line, for lists of many results."""
    if "epsilon" not in facts:
        return "none; nothing is promised"
    missing = "; ".join(part.split(":")[0] for part in facts["not_protected"])
    if facts["verdict"] == "nominal":
        proved = facts["proved"]
        known = (
            f"{facts['proved']['why']}"
            if proved["epsilon"] is None
            else (f"proved is ε = {number(proved['epsilon'])}")
        )
        return f"nominal, not a guarantee ({known}); not protected: {missing}"
    spent = number(facts["epsilon"].get(facts["accountant"]))
    return f"proved, ε = {spent}, {facts['adjacency']}; not protected: {missing}"


def brief(facts: Mapping[str, Any]) -> str:
    """At most eight lines, for below a result."""
    if "epsilon" not in facts:
        return "privacy: none. This method promises nothing about the training data."
    nominal = facts["verdict"] == "nominal"
    spent = facts["epsilon"].get(facts["accountant"])
    word = "nominal ε" if nominal else "ε"
    lines = [
        f"privacy: {facts['verdict']}. {word} = {number(spent)} ({facts['accountant']}), "
        f"δ = {facts['delta']:.3g}; neighbours: {facts['neighbours']}"
    ]
    if nominal:
        lines.append(f"  not a guarantee: {facts['reasons'][0]}")
        lines.append(f"  proved ε: {number(facts['proved']['epsilon'])} ({facts['proved']['why']})")
    if facts["amplification"]["counted"]:
        shown = number(facts["amplification"]["without_amplification"])
        lines.append(f"  without amplification by sampling: {word} = {shown}")
    lines.append(f"  not protected: {'; '.join(p.split(':')[0] for p in facts['not_protected'])}")
    lines.append(f"  tuning: {facts['tuning']['text'].split('. ')[0]}")
    if facts.get("audit"):
        lines.append(f"  audit: {_audit(facts['audit'])}")
    return "\n".join(lines)


def render(facts: Mapping[str, Any]) -> str:
    """All of it, for people."""
    lines = [f"Privacy statement for {facts['method']}, scope {facts['scope']}"]
    lines += [f"plan {facts['plan_hash']}", f"verdict: {facts['verdict']}"]
    if "epsilon" in facts:
        mark = "nominal " if facts["verdict"] == "nominal" else ""
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
                f"{number(amplified['without_amplification'])} (a record drawn "
                f"{amplified['expected_rows']:.3g} times, as expected: "
                f"{number(amplified['epsilon_for_expected_rows'])}; more than "
                f"{amplified['rows_at_most']} times with a chance below {RARE:g})"
            )
        lines.append(f"proved: ε = {number(facts['proved']['epsilon'])}. {facts['proved']['why']}")
        titles = (
            ("why nominal", "reasons"),
            ("released", "released"),
            ("not protected", "not_protected"),
            ("assumed", "assumptions"),
        )
        for title, key in titles:
            lines += [f"{title}:", *(f"  - {item}" for item in facts[key])] if facts[key] else []
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
    verdict = f"{audit['verdict']}: " if audit.get("verdict") else ""
    return f"{verdict}ε ≥ {bound} at {100 * float(audit.get('confidence', 0.95)):g}% confidence"
