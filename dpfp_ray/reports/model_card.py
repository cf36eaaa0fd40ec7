"""The README.md of an exported model: the hub's front matter, and a page for whoever gets it."""

import math
import shlex
from collections.abc import Mapping
from typing import Any

from dpfp_ray.models.download import PRETRAINING_OVERLAP
from dpfp_ray.plan.method_spec import find_spec
from dpfp_ray.plan.plan import FIELDS, FROM_DATA, NOT_HASHED, Plan
from dpfp_ray.privacy.statement import first_line, number, unit_word
from dpfp_ray.privacy.statement_forms import seed_handling
from dpfp_ray.reports.bundle import is_folder, needed_files, own_name
from dpfp_ray.reports.tables import markdown_text
from dpfp_ray.results.predict import CONFIDENCE, wilson
from dpfp_ray.training.dev_scores import saved_epoch
from dpfp_ray.training.record import Record, plan_of

REPOSITORY = "dpfp-ray"
# Names on the hub, of what a plan calls otherwise.
BASE_MODELS = {
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "mpnet": "sentence-transformers/all-mpnet-base-v2",
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
}
WORDS = """\
**ε (epsilon)** says how much one {unit} can change what others learn: whatever can be seen is at \
most e^ε times as likely with the {unit} as without it. Small is private: 1 is strong, 10 is weak. \
**δ (delta)** is the chance with which even that may fail."""


DATA = {"demo": "demo (sentences of film reviews with human ratings, Hutto & Gilbert 2014)"}
TRAINED = {
    "all": "all weights",
    "head": "a linear head on the frozen encoder",
    "bias": "the head, all biases and LayerNorms",
    "lora": "the head, and low-rank changes of attention (LoRA)",
}


# What an onlooker is kept from knowing: of neighbours, each with a chance of one half, which it is.
GUESSES = {
    ("record", "add_remove"): "whether one given record was in the training data",
    ("record", "zero_out"): "whether one given training record had its text or an empty one",
    ("record", "replace_one"): "which of two given texts one training record had",
    ("person", "add_remove"): "whether one given person's records were in the training data",
    ("person", "zero_out"): "whether one given person's training texts were theirs or empty ones",
    ("person", "replace_one"): "which of two given lists of texts one person's training texts were",
}


def model_card(record: Record, name: str = "", *, paid: str = "", adapter: bool = False) -> str:
    """The card; its first line after the front matter says what ε is worth.

    `paid` is what the privacy ledger says of all uses of the training records.
    """
    plan = plan_of(record)
    title = name or f"{own_name(plan.model)} on {plan.task}, {record['statement']['method']}"
    parts = [
        front_matter(record, plan, title),
        f"> {first_line(record['statement'])}",
        f"# {markdown_text(title)}",
        _plainly(record["statement"]),
        _task(record, plan),
        _adapter_usage(plan) if adapter else _usage(plan),
        _scores(record),
        _privacy(record["statement"], paid),
        _reproduce(record, plan),
    ]
    return "\n\n".join(parts) + "\n"


def _plainly(facts: Mapping[str, Any]) -> str:
    """For whoever has never heard of ε: what an onlooker can and cannot find out."""
    if (facts.get("audit") or {}).get("verdict") == "refuted":
        return (
            "**In plain words:** somebody has tried to find out from the trained model which "
            "records it was trained on, and was right more often than the privacy promise below "
            "allows. Treat this model as if it could give away its training data."
        )
    if "epsilon" not in facts:
        return (
            "**In plain words:** nothing keeps this model from remembering its training data. "
            "Whoever has it may find out whether a particular text was in them, or parts of it."
        )
    if facts["guarantee"] == "nominal":
        return (
            "**In plain words:** noise was added in training, but nobody can prove that it is "
            "enough. The number ε is there to compare with papers that count in the same way. Do "
            "not rely on it to protect anybody: treat this model as if it could give away its "
            "training data."
        )
    if facts["guarantee"] == "claimed":
        return (
            "**In plain words:** another library's code added noise in training. If it did what it "
            "says, no single record shows for certain; nobody has proved that it did."
        )
    unit = unit_word(facts)
    guess = GUESSES[unit, facts["adjacency"]]
    epsilon = float(facts["epsilon"].get(facts["accountant"]))
    right = 100 * (1 / (1 + math.exp(-epsilon)) + facts["delta"] / (1 + math.exp(epsilon)))
    return (
        f"**In plain words:** noise was added in training so that no single {unit} shows for "
        f"certain. Somebody who studies this model and guesses {guess} is "
        f"right at most {min(100.0, math.ceil(right * 10) / 10):g} times in 100; a coin is right "
        "50 times. What this does not cover is listed under *Not protected*."
    )


def front_matter(record: Record, plan: Plan, title: str) -> str:
    """What the hub indexes; numbers are those of the weights in the folder."""
    import yaml

    data = "glue" if plan.task not in ("demo", "custom") else None
    facts = record["statement"]
    tags = ["text-classification", "differential-privacy", REPOSITORY, plan.method]
    tags += [] if "epsilon" not in facts else [f"privacy-{facts['guarantee']}"]
    split, score = _saved(record)
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
        "base_model": base_model(plan),
        "tags": list(dict.fromkeys(tags)),
        "datasets": ["nyu-mll/glue"] if data else None,
        "metrics": ["accuracy"],
        "model-index": [{"name": title, "results": [result]}],
    }
    kept = {key: value for key, value in fields.items() if value is not None}
    text: str = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
    return f"---\n{text}---"


def base_model(plan: Plan) -> str | None:
    """The encoder's name on the hub; a folder has none."""
    name = BASE_MODELS.get(plan.model)
    return name or (None if is_folder(plan.model) else plan.model)


def _saved(record: Record) -> tuple[str, float]:
    """The dev set and accuracy of the epoch whose weights are saved."""
    split, score = next(iter(saved_epoch(record)["dev"].items()))
    return split, float(score["accuracy"])


def _task(record: Record, plan: Plan) -> str:
    labels = ", ".join(f"`{label}`" for label in record["labels"])
    source = own_name(plan.train_file) if plan.train_file else DATA.get(plan.task, plan.task)
    trained = TRAINED.get(plan.scope, f"the head and the last layers ({plan.scope})")
    spec = find_spec(plan.method, plan.mode)
    lines = [
        "## What it does",
        f"It gives a text one of {len(record['labels'])} labels: {labels}.",
        f"- encoder: `{own_name(plan.model)}`, {plan.representation} representation, "
        f"texts truncated to {plan.max_length} tokens",
        f"- trained: {trained}, by {spec.label if spec else plan.method}",
        f"- data: {source}, {plan.records:,} training {plan.unit}s",
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
model's class: read it first, it is one short file."""


def _adapter_usage(plan: Plan) -> str:
    base = base_model(plan)
    encoder = base or own_name(plan.model)
    given = "" if base else ', base="FOLDER_OF_THE_ENCODER"'
    return f"""## How to use it

This folder holds what training has changed: a LoRA adapter (`adapter_model.safetensors`, for
[peft](https://huggingface.co/docs/peft)) and the head. The encoder, `{encoder}`, is taken
from elsewhere. In this folder:

```python
from modeling_dpfp import pipeline_from_adapter

classify = pipeline_from_adapter("."{given})
classify("a text")
```"""


def _scores(record: Record) -> str:
    lines = [
        "## Scores",
        "",
        f"On dev rows, which training did not see. Intervals: {100 * CONFIDENCE:g}%, Wilson, over "
        f"rows of one run.",
        "",
        "| dev set | rows | accuracy | interval |",
        "| --- | ---: | ---: | --- |",
    ]
    if record["select"] == "best":
        lines[2] += " These weights are of the epoch that did best on these very rows: it flatters."
    for name, score in saved_epoch(record)["dev"].items():
        rows = int(record["dev_records"][name])
        accuracy = float(score["accuracy"])
        low, high = wilson(round(accuracy * rows), rows) or (0.0, 1.0)
        lines.append(f"| {name} | {rows:,} | {accuracy:.4f} | {low:.4f} to {high:.4f} |")
    quoted = record["metrics"]
    if quoted.get("accuracy") != quoted.get("accuracy_last"):
        lines += ["", f"The run quotes {quoted['accuracy']:.4f} ({quoted['rule']}); the weights "
                  "here are those of its last epoch, and so are the scores above."]  # fmt: skip
    return "\n".join(lines)


def _privacy(facts: Mapping[str, Any], paid: str) -> str:
    lines = ["## Privacy", "", first_line(facts)]
    if "epsilon" not in facts:
        return "\n".join([*lines, "", "Whoever holds this model may learn about single records."])
    lines += ["", WORDS.format(unit=unit_word(facts)), ""]
    spent = ", ".join(f"{name} {number(value)}" for name, value in facts["epsilon"].items())
    rows = [
        ("guarantee", facts["guarantee"]),
        ("ε", f"{number(facts['epsilon'].get(facts['accountant']))} (by accountant: {spent})"),
        ("δ", f"{facts['delta']:.3g}"),
        ("ε that is proved", f"{number(facts['proved']['epsilon'])}. {facts['proved']['why']}"),
        ("accountant", facts["accountants"][facts["accountant"]]["rests_on"]),
        ("unit", facts["unit"]),
        ("what is hidden", f"{facts['neighbours']} ({facts['adjacency']})"),
        ("who is trusted", facts["trust"]),
        ("tuning", facts["tuning"]["text"]),
        ("all uses of these records", paid or "not known: no ledger was at hand"),
        ("audit", _audit(facts.get("audit"))),
    ]
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows)]
    if facts["reasons"]:
        title = f"**Why ε is {facts['guarantee']}**"
        lines += ["", title, "", *(f"- {reason}" for reason in facts["reasons"])]
    lines += ["", "**Not protected**", "", *(f"- {item}" for item in facts["not_protected"])]
    lines += ["", "**Assumed**", "", *(f"- {item}" for item in facts["assumptions"])]
    return "\n".join(lines)


def _audit(audit: Mapping[str, Any] | None) -> str:
    if not audit:
        return "none: nobody has measured what this model leaks"
    sure = 100 * float(audit.get("confidence", 0.95))
    return f"{audit['verdict']}: it leaks at least ε = {number(audit['epsilon'])}, at {sure:g}%"


def _reproduce(record: Record, plan: Plan) -> str:
    versions = ", ".join(
        f"{name} {record['environment'][name]}"
        for name in ("dpfp_ray", "torch", "transformers", "python")
        if name in record["environment"]
    )
    return f"""## How to reproduce it

```bash
{train_command(plan)}
```

{seed_handling(record["statement"])} Another run has another seed: expect a score within the spread
of such runs, not the same weights. Made with {versions}; plan `{record["plan_hash"]}`."""


def train_command(plan: Plan) -> str:
    """The `dpfp train` that makes a run of this plan: what differs from the defaults.

    Of files and folders it has the names alone: cards are published.
    """
    usual = Plan(
        method=plan.method,
        mode=plan.mode,
        scope=plan.scope,
        task=plan.task if plan.task != "custom" else "demo",
        records=plan.records,
        classes=plan.classes,
    )
    flags = []
    files = needed_files(plan.to_dict())
    for name in FIELDS:
        value = getattr(plan, name)
        implied = name in (*FROM_DATA, "task", "method") or name in NOT_HASHED
        same = value == getattr(usual, name) and name not in ("mode", "scope")
        if implied or value is None or same or name in plan.spec.unused:
            continue
        value = own_name(value) if name in files else value
        flag_value = ",".join(value) if isinstance(value, tuple) else str(value)
        flags.append(f"--{name.replace('_', '-')} {shlex.quote(flag_value)}")
    task = [] if plan.task == "custom" else [f"--task {plan.task}"]
    words = [*task, f"--method {plan.method}", *flags, "--output runs/again"]
    return "dpfp train " + " ".join(words)
