"""Privacy statements for people: in full (`render`), in a few lines (`brief`), in one."""

from collections.abc import Mapping
from typing import Any

from dpfp_ray.privacy.statement import RARE


def unit_word(facts: Mapping[str, Any]) -> str:
    """record or person: whom a statement protects."""
    return "person" if str(facts.get("unit")).startswith("one person") else "record"


def number(value: Any) -> str:
    """An ε for people; JSON has "inf" for what it cannot say."""
    return "none known" if value is None else "∞" if float(value) > 1e4 else f"{float(value):.3g}"


def one_line(facts: Mapping[str, Any]) -> str:
    """The guarantee in a line, for lists of many results."""
    if "epsilon" not in facts:
        return "none; nothing is promised"
    missing = "; ".join(part.split(":")[0] for part in facts["not_protected"])
    if facts["guarantee"] == "nominal":
        epsilon, why = facts["proved"]["epsilon"], facts["proved"]["why"]
        known = why if epsilon is None else f"proved is ε = {number(epsilon)}"
        return f"nominal, not a guarantee ({known}); not protected: {missing}"
    spent = number(facts["epsilon"].get(facts["accountant"]))
    return f"proved, ε = {spent}, {facts['adjacency']}; not protected: {missing}"


def brief(facts: Mapping[str, Any]) -> str:
    """At most eight lines, for below a result."""
    if "epsilon" not in facts:
        return "privacy: none. This method promises nothing about the training data."
    nominal = facts["guarantee"] == "nominal"
    spent = facts["epsilon"].get(facts["accountant"])
    word = "nominal ε" if nominal else "ε"
    lines = [
        f"privacy: {facts['guarantee']}. {word} = {number(spent)} ({facts['accountant']}), "
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
    lines += [f"plan {facts['plan_hash']}", f"guarantee: {facts['guarantee']}"]
    if "epsilon" in facts:
        mark = "nominal " if facts["guarantee"] == "nominal" else ""
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
    outcome = f"{audit['verdict']}: " if audit.get("verdict") else ""
    return f"{outcome}ε ≥ {bound} at {100 * float(audit.get('confidence', 0.95)):g}% confidence"
