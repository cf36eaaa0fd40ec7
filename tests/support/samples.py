"""Made-up records for tests of the report. No value here was ever measured."""

import copy
import math
import random
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from dpfp_ray.plan.plan import Plan
from dpfp_ray.training import record as training
from dpfp_ray.training.dev_scores import DevPredictions, measure
from tests.support.result_records import make_record

HOSTILE = "<script>alert(1)</script>\"'|$x^2$ \\input{/etc/passwd} =1+1 %_#&~ [r](javascript:0)"
ROWS = 1_000  # dev rows: accuracies are whole thousandths
_RECORDS = {"sst2": 67_349, "qnli": 104_374, "qqp": 384_348, "mnli": 240_942, "demo": 9_512}
# Accuracy without privacy, and what each method loses at ε = 3.
_CEILING = {"sst2": 0.925, "qnli": 0.905, "qqp": 0.908, "mnli": 0.842, "demo": 0.81}
_LOSS = {"non_private": 0.0, "dpfp": 0.012, "dpsgd": 0.055, "rgp": 0.04}
PAPER_METHODS = ("non_private", "dpsgd", "rgp", "dpfp")
_COST = {
    "non_private": (60.0, 900),
    "dpfp": (64.0, 910),
    "dpsgd": (130.0, 1900),
    "opacus": (130.0, 1900),
    "rgp": (400.0, 1300),
    "public": (1.0, 500),
}


def sample(
    identity: str,
    *,
    sweep: str = "compare",
    seed: int = 0,
    accuracy: float | None = None,
    status: str = "finished",
    one_class: bool = False,
    **fields: Any,
) -> Any:
    """A finished trial as a sweep leaves it, with values that look alive."""
    task = fields.get("task", "demo")
    chance = random.Random(f"{identity} {seed}")
    records = min(_RECORDS.get(task, 5_000), fields.get("max_train") or 10**9)
    plan = Plan(**fields).bind(records=records, representation="mean")
    private = plan.private
    budget = plan.epsilon or 0.0
    if accuracy is None:
        loss = _LOSS.get(plan.method, 0.05) * (3 / budget) ** 0.4 if private else 0.0
        accuracy = round(_CEILING.get(task, 0.8) - loss + chance.gauss(0, 0.002), 3)
    kept = answers(f"{plan.method} {seed}", accuracy, one_class)
    scores_now = measure(kept.answers(), kept.truth(), classes=2)
    if one_class:
        accuracy = scores_now["accuracy"]
    details = {name: scores_now[name] for name in ("f1", "matthews", "one_class")}
    details |= {"recall": list(scores_now["recall"]), "calibration_error": 0.04}
    details["majority_accuracy"] = scores_now["majority_accuracy"]
    seconds, memory = _COST[plan.method]
    seconds *= plan.D / 20_000 * chance.uniform(0.95, 1.05)
    splits = ("matched", "mismatched") if task == "mnli" else ("dev",)
    factors = {"gdp": 0.37, "rdp": 1.28, "pld": 1.0}
    base = budget / factors[plan.accountant]
    spent = {name: base * factor for name, factor in factors.items()} if private else {}
    epochs = len(plan.epoch_ends())
    scores = [accuracy - 0.12 * math.exp(-1.2 * e) + chance.gauss(0, 0.002) for e in range(epochs)]
    scores[-1] = accuracy
    history: list[Any] = [
        {
            "epoch": e + 1,
            "step": plan.epoch_ends()[e],
            "train_loss": 0.6 - 0.05 * e,
            "dev": {
                s: {"accuracy": scores[e] + 0.003 * i, "loss": 0.5} for i, s in enumerate(splits)
            },
            "epsilon": {k: v * math.sqrt((e + 1) / epochs) for k, v in spent.items()},
            "train_seconds": seconds * (e + 1) / epochs,
        }
        for e in range(epochs)
    ]
    sigma = {"dpfp": 0.4, "dpsgd": 0.77, "rgp": 0.9}.get(plan.method, 0.0)
    history[-1]["dev"] = {name: {**dev, **details} for name, dev in history[-1]["dev"].items()}
    record = make_record(f"{identity}-{seed}", accuracy=accuracy, records=records, **fields)
    record |= {
        "finished": status == "finished",
        "dev_records": dict.fromkeys(splits, ROWS),
        "history": history,
        "predictions": [{"epoch": epochs, "dev": dict.fromkeys(splits, asdict(kept))}],
    }
    del record["metrics"]["accuracy_dev"]
    record["metrics"] |= {f"accuracy_{s}": accuracy + 0.003 * i for i, s in enumerate(splits)}
    record["metrics"] |= {"epoch": epochs, **details}
    coordinates = {"dpfp": 384, "dpsgd": 22_700_000, "rgp": 60_000}.get(plan.method, 0)
    record["privacy"] |= {"epsilon": spent, "noise_coordinates": coordinates}
    record["privacy"] |= {"noise_multiplier": sigma, "sigma": sigma * plan.C}
    record["cost"] |= {
        "prepare_seconds": 41.0,
        "train_seconds": seconds,
        "examples_per_second": plan.D * (plan.epochs or 1) / seconds,
        "peak_memory_bytes": int(memory * 2**20 * chance.uniform(0.99, 1.01)),
    }
    facts = {"sweep": sweep, "group": "", "seed_index": seed, "status": status}
    record["trial"] |= {**facts, "started_at": 1_000.0 + seed, "seconds": seconds + 5}
    return record


def answers(who: str, accuracy: float, one_class: bool = False) -> DevPredictions:
    """Answers with just that accuracy: rows have a difficulty that all share, and luck of a run."""
    truth = (np.arange(ROWS) % 20 < 11).astype(int)
    given = np.ones_like(truth)
    if not one_class:
        luck = np.random.default_rng(sum(map(ord, who)))
        hard = np.random.default_rng(1).standard_normal(ROWS) + 0.3 * luck.standard_normal(ROWS)
        wrong = np.argsort(-hard)[: round(ROWS * (1 - accuracy))]
        given = truth.copy()
        given[wrong] = 1 - given[wrong]
    return DevPredictions.of(given, truth, classes=2, fingerprint="0123456789abcdef")


def comparison(
    tasks: tuple[str, ...] = ("demo",),
    budgets: tuple[float, ...] = (3.0, 8.0),
    seeds: int = 3,
    **fields: Any,
) -> Iterator[Any]:
    """What `dpfp compare` leaves: the paper's methods, with shorter training than real."""
    for task in tasks:
        for method in PAPER_METHODS:
            for epsilon in (None,) if method == "non_private" else budgets:
                for seed in range(seeds):
                    values: dict[str, Any] = {"task": task, "method": method, **fields}
                    if epsilon is not None:
                        values["epsilon"] = epsilon
                    name = f"{task}-{method}-{epsilon}-{fields.get('model', '')}"
                    yield sample(name, seed=seed, **values)


def grid_sweep() -> Iterator[Any]:
    """The paper's three figures as small sweeps; one trial failed, one was refused, one stopped."""
    rates = (1e-6, 5e-6, 1e-5, 5e-5, 1e-4)
    for b, batch in enumerate((16, 32, 64, 128, 256)):
        for r, rate in enumerate(rates):
            name = f"grid-{batch}-{rate}"
            score = 0.9 - 0.03 * abs(b - 1) - 0.04 * abs(r - 1.3)
            fields: dict[str, Any] = {
                "batch_size": batch,
                "learning_rate": rate,
                "micro_batches": 1,
                "epsilon": 3.0,
            }
            if (b, r) == (4, 4):
                yield failed(name, "figure-batch", "CUDA out of memory")
            else:
                yield sample(name, sweep="figure-batch", accuracy=score, task="sst2", **fields)
    for c, clip in enumerate((0.2, 0.4, 0.6, 0.8, 1.0)):
        for r, rate in enumerate(rates):
            score = 0.88 - (0.2 if c == 0 else 0.08 if c == 1 else 0.0) - 0.03 * abs(r - 1)
            fields = {"batch_size": 32, "learning_rate": rate, "micro_batches": 1, "clip": clip}
            name = f"clip-{clip}-{rate}"
            yield sample(name, sweep="figure-clip", accuracy=score, task="sst2", **fields)
    for seed in range(3):
        for m, count in enumerate((1, 2, 4, 8, 16, 32)):
            fields = {"micro_batches": count, "epsilon": 0.02, "accountant": "gdp"}
            score = 0.55 + 0.05 * m + 0.004 * seed
            name = f"micro-{count}"
            yield sample(
                name, sweep="figure-micro", seed=seed, accuracy=score, task="sst2", **fields
            )
    error = "micro_batches M = 32 is more than batch_size B = 8"
    yield failed("refused-1", "figure-batch", error, status="refused", batch_size=8)
    yield sample("stopped", sweep="figure-batch", status="stopped", task="sst2", method="dpfp")


def failed(name: str, sweep: str, error: str, status: str = "failed", **fields: Any) -> Any:
    return training.make_record(
        plan={"task": "sst2", "method": "dpfp", "epsilon": 3.0, **fields},
        trial={"id": name, "sweep": sweep, "status": status, "error": error},
    )


def audited(record: Any, bound: float, verdict: str) -> Any:
    changed = copy.deepcopy(record)
    changed["trial"]["id"] += "-audit"
    changed["audit"] = {
        "epsilon": bound,
        "stated_epsilon": changed["plan"]["epsilon"],
        "verdict": verdict,
        "canaries": 300,
        "guesses": 128,
        "correct": 128,
        "family": "unused token",
        "access": "white-box",
    }
    return changed


def with_statement(record: Any) -> Any:
    changed = copy.deepcopy(record)
    changed["statement"] = {
        "guarantee": changed["privacy"]["guarantee"],
        "unit": "one record's text",
        "adjacency": changed["plan"]["adjacency"],
        "amplification": {"counted": True, "without_amplification": 17.25},
        "proved": {"epsilon": None, "why": "no"},
        "tuning": {"epsilon": 5.36, "text": "logarithmic:30"},
    }
    return changed


def everything_small() -> list[Any]:
    """A bit of all that a report may meet."""
    records = [with_statement(r) for r in comparison(budgets=(3.0, 8.0), seeds=2)]
    records += grid_sweep()
    by_method = {r["plan"]["method"]: r for r in reversed(records[:12])}
    records.append(audited(by_method["dpfp"], 3.09, "refuted"))
    records.append(audited(by_method["dpsgd"], 0.41, "consistent"))
    return records


def everything() -> list[Any]:
    """The same, and a model that the paper ran, on the paper's tasks."""
    tasks = ("mnli", "qqp", "qnli", "sst2")
    return [
        *everything_small(),
        *comparison(tasks=tasks, budgets=(3.0,), seeds=1, model="roberta-base"),
    ]


def hostile() -> list[Any]:
    """Names, labels, errors, statements and splits that try to break out of where they stand."""
    records = []
    for record in comparison(seeds=1, budgets=(3.0, 8.0)):
        record["plan"]["task"] = record["plan"]["model"] = HOSTILE
        record["trial"]["sweep"] = record["trial"]["node"] = HOSTILE
        record["trial"]["error"] = HOSTILE + "\udcff\u202e\x00\x1b[31m"
        record["labels"] = [HOSTILE, "</script>"]
        record["dev_records"] = {HOSTILE: 100}
        for epoch in record["history"]:
            epoch["dev"] = {HOSTILE: next(iter(epoch["dev"].values()))}
        for kept in record["predictions"]:
            kept["dev"] = {HOSTILE: next(iter(kept["dev"].values()))}
        record["statement"] = {"unit": HOSTILE, "</pre><script>alert(2)</script>": HOSTILE}
        record["environment"]["device"] = HOSTILE
        records.append(record)
    records[1]["plan"]["method"] = HOSTILE
    records[2]["audit"] = {
        "epsilon": 9.0,
        "verdict": "refuted",
        "family": HOSTILE,
        "access": HOSTILE,
    }
    return records
