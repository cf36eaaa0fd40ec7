"""The README.md of an exported model: the hub's front matter, and a page for whoever gets it."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpfp_ray.models.download import PRETRAINING_OVERLAP
from dpfp_ray.plan.method_spec import find_spec
from dpfp_ray.plan.plan import FIELDS, NOT_HASHED, Plan
from dpfp_ray.privacy.statement_forms import first_line, seed_handling
from dpfp_ray.privacy.statement_text import number, promised
from dpfp_ray.results.evaluation import CONFIDENCE, wilson
from dpfp_ray.training.load_model import plan_of

REPOSITORY = "dpfp-ray"
# Names on the hub, of what a plan calls otherwise.
BASE_MODELS = {
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "mpnet": "sentence-transformers/all-mpnet-base-v2",
}
WORDS = """\
**ε (epsilon)** says how much one record can change what others learn: whatever can be seen is at \
most e^ε times as likely with the record as without it. Small is private: 1 is strong, 10 is weak. \
**δ (delta)** is the chance with which even that may fail."""


def model_card(record: Mapping[str, Any], name: str = "") -> str:
    """The card; its first line after the front matter says what ε is worth."""
    plan = plan_of(record)
    title = name or f"{Path(plan.model).name} on {plan.task}, {record['statement']['method']}"
    parts = [
        front_matter(record, plan, title),
        f"> {first_line(record['statement'])}",
        f"# {title}",
        _task(record, plan),
        _usage(plan),
        _scores(record),
        _privacy(record["statement"]),
        _reproduce(record, plan),
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(record: Mapping[str, Any], plan: Plan, title: str) -> str:
    """What the hub indexes; numbers are those of the weights in the folder."""
    import yaml

    data = "glue" if plan.task not in ("demo", "custom") else None
    facts = record["statement"]
    tags = ["text-classification", "differential-privacy", REPOSITORY, plan.method]
    tags += [] if "epsilon" not in facts else [f"privacy-{promised(facts)}"]
    split, score = _last(record)
    result = {
        "task": {"type": "text-classification"},
        "dataset": {"name": plan.task, "type": data or plan.task, "split": split},
        "metrics": [{"type": "accuracy", "value": round(score, 4), "name": "accuracy"}],
    }
    fields: dict[str, Any] = {
        "license": "other",
        "license_name": "to-be-filled-in",
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "base_model": BASE_MODELS.get(plan.model)
        or (plan.model if not Path(plan.model).expanduser().is_dir() else None),
        "tags": list(dict.fromkeys(tags)),
        "datasets": ["nyu-mll/glue"] if data else None,
        "metrics": ["accuracy"],
        "model-index": [{"name": title, "results": [result]}],
    }
    kept = {key: value for key, value in fields.items() if value is not None}
    text: str = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
    return f"---\n{text}---"


def _last(record: Mapping[str, Any]) -> tuple[str, float]:
    """The dev set and accuracy of the last epoch: the one whose weights are saved."""
    split, score = next(iter(record["history"][-1]["dev"].items()))
    return split, float(score["accuracy"])


def _task(record: Mapping[str, Any], plan: Plan) -> str:
    labels = ", ".join(f"`{label}`" for label in record["labels"])
    source = Path(plan.train_file).name if plan.train_file else plan.task
    trained = "a linear head on the frozen encoder" if plan.scope == "head" else "all weights"
    spec = find_spec(plan.method, plan.mode)
    lines = [
        "## What it does",
        f"It gives a text one of {len(record['labels'])} labels: {labels}.",
        f"- encoder: `{Path(plan.model).name}`, {plan.representation} representation, "
        f"texts truncated to {plan.max_length} tokens",
        f"- trained: {trained}, by {spec.label if spec else plan.method}",
        f"- data: {source}, {plan.records:,} training records",
    ]
    if plan.model in PRETRAINING_OVERLAP:
        lines.append(f"- the encoder was {PRETRAINING_OVERLAP[plan.model]}")
    return "\n".join([lines[0], "", lines[1], "", *lines[2:]])


def _usage(plan: Plan) -> str:
    pair = plan.pair_column or (plan.task in ("qnli", "qqp", "mnli", "mrpc", "rte", "wnli"))
    asked = '{"text": "first text", "text_pair": "second text"}' if pair else '"a text"'
    return f"""## How to use it

```python
from transformers import pipeline

classify = pipeline("text-classification", "FOLDER_OR_HUB_NAME", trust_remote_code=True)
classify({asked})
```

`trust_remote_code=True` lets transformers run `modeling_dpfp.py` of this folder, which holds the
model's class: read it first, it has a hundred lines."""


def _scores(record: Mapping[str, Any]) -> str:
    lines = [
        "## Scores",
        "",
        f"On dev rows, which training did not see. Intervals: {100 * CONFIDENCE:g}%, Wilson, over "
        f"rows of one run.",
        "",
        "| dev set | rows | accuracy | interval |",
        "| --- | ---: | ---: | --- |",
    ]
    for name, score in record["history"][-1]["dev"].items():
        rows = int(record["dev_records"][name])
        accuracy = float(score["accuracy"])
        low, high = wilson(round(accuracy * rows), rows) or (0.0, 1.0)
        lines.append(f"| {name} | {rows:,} | {accuracy:.4f} | {low:.4f} to {high:.4f} |")
    quoted = record["metrics"]
    if quoted.get("accuracy") != quoted.get("accuracy_last"):
        lines += ["", f"The run quotes {quoted['accuracy']:.4f} ({quoted['rule']}); the weights "
                  "here are those of its last epoch, and so are the scores above."]  # fmt: skip
    return "\n".join(lines)


def _privacy(facts: Mapping[str, Any]) -> str:
    lines = ["## Privacy", "", first_line(facts)]
    if "epsilon" not in facts:
        return "\n".join([*lines, "", "Whoever holds this model may learn about single records."])
    lines += ["", WORDS, ""]
    spent = ", ".join(f"{name} {number(value)}" for name, value in facts["epsilon"].items())
    rows = [
        ("guarantee", promised(facts)),
        ("ε", f"{number(facts['epsilon'].get(facts['accountant']))} (by accountant: {spent})"),
        ("δ", f"{facts['delta']:.3g}"),
        ("ε that is proved", f"{number(facts['proved']['epsilon'])}. {facts['proved']['why']}"),
        ("accountant", facts["accountants"][facts["accountant"]]["rests_on"]),
        ("unit", facts["unit"]),
        ("what is hidden", f"{facts['neighbours']} ({facts['adjacency']})"),
        ("who is trusted", facts["trust"]),
        ("tuning", facts["tuning"]["text"]),
        ("audit", _audit(facts.get("audit"))),
    ]
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows)]
    if facts["reasons"]:
        lines += ["", "**Why ε is nominal**", "", *(f"- {reason}" for reason in facts["reasons"])]
    lines += ["", "**Not protected**", "", *(f"- {item}" for item in facts["not_protected"])]
    lines += ["", "**Assumed**", "", *(f"- {item}" for item in facts["assumptions"])]
    return "\n".join(lines)


def _audit(audit: Mapping[str, Any] | None) -> str:
    if not audit:
        return "none: nobody has measured what this model leaks"
    sure = 100 * float(audit.get("confidence", 0.95))
    return f"{audit['verdict']}: it leaks at least ε = {number(audit['epsilon'])}, at {sure:g}%"


def _reproduce(record: Mapping[str, Any], plan: Plan) -> str:
    versions = ", ".join(
        f"{name} {record['environment'][name]}"
        for name in ("dpfp_ray", "torch", "transformers", "python")
        if name in record.get("environment", {})
    )
    return f"""## How to reproduce it

```bash
{train_command(plan)}
```

{seed_handling(record["statement"])} Another run has another seed: expect a score within the spread
of such runs, not the same weights. Made with {versions}; plan `{record["plan_hash"]}`."""


def train_command(plan: Plan) -> str:
    """The `dpfp train` that makes a run of this plan: what differs from the defaults."""
    usual = Plan(
        method=plan.method,
        mode=plan.mode,
        scope=plan.scope,
        task=plan.task if plan.task != "custom" else "demo",
        records=plan.records,
        classes=plan.classes,
    )
    flags = []
    for name in FIELDS:
        value = getattr(plan, name)
        known = name in ("records", "classes", "task", "method") or name in NOT_HASHED
        same = value == getattr(usual, name) and name not in ("mode", "scope")
        if known or value is None or same or name in plan.spec.unused:
            continue
        shown = ",".join(value) if isinstance(value, tuple) else str(value)
        flags.append(f"--{name.replace('_', '-')} {shlex.quote(shown)}")
    task = [] if plan.task == "custom" else [f"--task {plan.task}"]
    words = [*task, f"--method {plan.method}", *flags, "--output runs/again"]
    return "dpfp train " + " ".join(words)
