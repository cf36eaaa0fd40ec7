"""A run's privacy statement in the forms that others ask for.

    json      the reporting list of Ponomareva et al. 2023, "How to DP-fy ML"
    nist      what NIST SP 800-226 (Near et al. 2025) tells evaluators to ask, with answers
    registry  an entry of the OpenDP deployments registry (opendp/deployments-registry-data)

Answers come from the run's record alone. What a run cannot know (who published it, what for, how
the machine is guarded) says so in capitals: someone has to fill it in.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.statement import first_line, number, unit_word
from dpfp_ray.system.errors import UserError

FORMS = ("text", "json", "nist", "registry")
FILL = "TO BE FILLED IN"
DP_FY_ML = "Ponomareva et al. 2023, How to DP-fy ML (arXiv:2303.00654)"
NIST = "Near et al. 2025, NIST SP 800-226, Guidelines for Evaluating DP Guarantees"
Facts = Mapping[str, Any]


def seed_handling(facts: Facts) -> str:
    """Whether anybody can take the noise off again."""
    if any(text.startswith("the seed was given") for text in facts.get("assumptions", ())):
        return "The seed was given by hand: whoever knows it can take the noise off again."
    return "The seed was secret and was deleted when the run ended."


def reporting_list(facts: Facts, plan: Plan, privacy: Facts) -> dict[str, Any]:
    """The items that the guide asks every report of a private model to state, in its order."""
    if "epsilon" not in facts:
        return {"source": DP_FY_ML, "summary": first_line(facts), "guarantee": "none"}
    tuning = "not covered" if facts["tuning"].get("epsilon") is None else "covered"
    return {
        "source": DP_FY_ML,
        "summary": first_line(facts),
        "guarantee": facts["guarantee"],
        "setting": {
            "model_of_trust": facts["trust"],
            "who_sees_what": "the holder sees everything; readers see what is released",
        },
        "definition": {
            "data_accesses_covered": [
                f"training: {'; '.join(facts['released'])}",
                f"choosing hyperparameters: {tuning}",
            ],
            "data_accesses_not_covered": facts["not_protected"],
            "released_output": facts["released"],
            "unit_of_privacy": facts["unit"],
            "adjacency": {"name": facts["adjacency"], "meaning": facts["neighbours"]},
        },
        "accounting": {
            "notion": "approximate DP (ε, δ)",
            "epsilon": facts["epsilon"],
            "delta": facts["delta"],
            "calibrated_by": facts["accountant"],
            "accountants": facts["accountants"],
            "proved": facts["proved"],
            "assumptions": facts["assumptions"],
            "why_nominal": facts["reasons"],
            "sampling": _sampling(facts, plan),
            "mechanism": _mechanism(plan, privacy),
            "formal_statement": {
                "noise_multiplier": privacy.get("noise_multiplier"),
                "clip": plan.C,
                "sampling_probability": plan.p,
                "compositions": privacy.get("draws"),
                "records": plan.records,
            },
        },
        "transparency": {
            "code": "dpfp-ray, with this plan: " + str(facts["plan_hash"]),
            "verification": _audit(facts),
            "tuning": facts["tuning"],
        },
    }


def nist_questions(facts: Facts, plan: Plan, privacy: Facts) -> list[dict[str, str]]:
    """The layers of the publication's pyramid from the top down, each as question and answer."""
    if "epsilon" not in facts:
        return [_qa("guarantee", "Is there a differential privacy guarantee?", first_line(facts))]
    spent = facts["epsilon"].get(facts["accountant"])
    amplified = facts["amplification"]
    unamplified = (
        f" Without amplification by sampling it is {number(amplified['without_amplification'])}."
        if amplified["counted"]
        else ""
    )
    several = " For a person with k records, (ε, δ) becomes (kε, k e^((k−1)ε) δ)."
    if unit_word(facts) == "person":
        several = ""
    return [
        _qa("guarantee", "What is promised, and is it proved?", first_line(facts)),
        _qa(
            "privacy parameters",
            "How large are ε and δ, and for which variant of the definition?",
            f"Approximate DP: ε = {number(spent)}, δ = {facts['delta']:.3g} "
            f"(δ × {plan.unit}s = {facts['delta'] * plan.D:.2g}).{unamplified}",
        ),
        _qa(
            "unit of privacy",
            "Whose contribution is hidden, and how do neighbouring data sets differ?",
            f"{facts['unit']}; {facts['neighbours']}.{several}",
        ),
        _qa(
            "algorithms and correctness",
            "Which mechanism is used, and what shows that it is implemented as stated?",
            f"{_mechanism(plan, privacy)} Audit: {_audit(facts)}.",
        ),
        _qa(
            "accounting",
            "How is the loss of all accesses to the data added up?",
            f"{facts['accountants'][facts['accountant']]['rests_on']}. "
            f"{_sampling(facts, plan)} Tuning: {facts['tuning']['text']}",
        ),
        _qa(
            "utility and bias",
            "What does the noise cost, and whom does it cost more?",
            "Private training fails small classes first: `dpfp predict RUN --dev --evaluate` gives "
            "the scores by class.",
        ),
        _qa("trust model", "Who must be trusted with the raw data?", facts["trust"]),
        _qa(
            "exposure",
            "What else about the data leaves, beside the private output?",
            "; ".join(facts["not_protected"]),
        ),
        _qa(
            "side channels and arithmetic",
            "Can time, memory or floating-point numbers show what noise should hide?",
            f"{facts['assumptions'][1]}. Timings are measured from private records; do not publish "
            f"them.",
        ),
        _qa(
            "security and access control",
            "How are the raw data, the seed and the unfinished run guarded?",
            f"Resume files and cached representations are readable by their owner only. "
            f"{seed_handling(facts)} How this machine is guarded: {FILL}.",
        ),
        _qa(
            "data collection",
            "Were the records collected with consent, and no more of them than needed?",
            f"{FILL}: a run cannot know.",
        ),
    ]


def registry_entry(facts: Facts, plan: Plan, privacy: Facts, name: str = "") -> dict[str, Any]:
    """One deployment, under the registry's own keys; a Draft until someone fills in the rest."""
    if "epsilon" not in facts:
        raise UserError(f"{facts['method']} promises nothing; the registry is for private releases")
    local = facts["trust"].startswith("local")
    texts = "persons' labelled texts" if plan.user_column else "labelled texts"
    today = datetime.now(UTC).date().isoformat()
    return {
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "product": {
                "name": name or f"Text classifier ({plan.task}, {facts['method']})",
                "data_curators": [FILL],
                "intended_use": FILL,
                "data_product_type": "Machine learning model",
                "data_product_region": FILL,
                "description": f"{plan.model} fine-tuned on {plan.task} by {facts['method']}, "
                f"scope {facts['scope']}. {first_line(facts)}",
                "publication_date": today,
                "data_product_sector": FILL,
            },
            "dp_flavor": {
                "name": "Approximate DP",
                "input_metric": facts["adjacency"],
                "bound_on_input_distance": f"1 ({facts['neighbours']})",
                "output_measure": "hockey-stick divergence",
                "bound_on_output_distance": _bound(facts),
                "data_domain": f"{plan.records:,} {texts}" if plan.records else FILL,
                "unprotected_quantities": "\n".join(f"- {item}" for item in facts["not_protected"]),
            },
            "privacy_loss": {
                "privacy_unit": "user-level" if plan.user_column else "record-level",
                "privacy_unit_description": facts["neighbours"],
                "privacy_parameters": _parameters(facts),
                "privacy_parameters_description": first_line(facts),
            },
            "model": {
                "model_name": "Local" if local else "Central",
                "model_name_description": facts["trust"],
                "actors": f"The holder of the data, who trains: {FILL}. Readers of the model.",
                "release_type": "One release",
                "release_type_description": "; ".join(facts["released"]),
                "data_source_type": "Static",
                "data_source_type_description": "one training file, read as it was",
                "access_type": "Non-interactive",
                "access_type_description": "the model is handed out; no questions are answered "
                "from the records",
            },
            "accounting": {
                "post_processing": "whatever is computed from what is released",
                "composition": _sampling(facts, plan),
            },
            "implementation": {
                "pre_processing_eda_hyperparameter_tuning": facts["tuning"]["text"],
                "mechanisms": _mechanism(plan, privacy),
                "justification": FILL,
            },
            "resources": {"sources": FILL, "registry_authors": [FILL]},
        },
    }


def _qa(layer: str, question: str, answer: str) -> dict[str, str]:
    return {"layer": layer, "question": question, "answer": answer}


def _sampling(facts: Facts, plan: Plan) -> str:
    if plan.p == 1:
        return f"Every {plan.unit} takes part once; nothing is sampled."
    hidden = "hidden" if facts["amplification"].get("draws_hidden") else "not hidden"
    if plan.allocates:
        return (
            f"Random allocation: in each epoch every {plan.unit} is in exactly one of "
            f"{plan.batches:,} batches, chosen uniformly; which one is {hidden}."
        )
    return (
        f"Poisson samples, each {plan.unit} with p = {plan.p:.3g}, {plan.draws:,} times; who was "
        f"drawn is {hidden}."
    )


def _mechanism(plan: Plan, privacy: Facts) -> str:
    if plan.spec.own_profile:
        return f"{plan.spec.title}: {plan.spec.own_profile.rests_on}."
    sigma = privacy.get("noise_multiplier")
    shown = "" if sigma is None else f" of standard deviation {float(sigma):.3g} × C"
    return f"{plan.spec.title}: contributions bounded by C = {plan.C:g}, Gaussian noise{shown}."


def _parameters(facts: Facts) -> dict[str, float]:
    """The promised ε only, rounded up: programs that read it take it for a guarantee."""
    refuted = (facts.get("audit") or {}).get("verdict") == "refuted"
    nominal = facts["guarantee"] != "proved"
    spent = facts["epsilon"].get(facts["accountant"])
    epsilon = facts["proved"]["epsilon"] if nominal else spent
    if refuted or epsilon is None or not math.isfinite(float(epsilon)):
        return {}
    return {"epsilon": math.ceil(float(epsilon) * 1e4) / 1e4, "delta": facts["delta"]}


def _bound(facts: Facts) -> str:
    found = _parameters(facts)
    return f"ε = {found['epsilon']:g}, δ = {found['delta']:.3g}" if found else "none is proved"


def _audit(facts: Facts) -> str:
    audit = facts.get("audit")
    if not audit:
        return "none was run on this model"
    return f"{audit.get('verdict', 'done')}, ε ≥ {number(audit.get('epsilon'))}"
