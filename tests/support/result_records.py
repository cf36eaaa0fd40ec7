"""Records as runs write them, for tests of what reads records."""

from typing import Any

from dpfp_ray.plan.plan import Plan
from dpfp_ray.training import record as training


def make_record(
    trial: str | None = None,
    *,
    accuracy: float = 0.8,
    seconds: float = 10.0,
    records: int = 10_000,
    **fields: Any,
) -> Any:
    """The shape of `run.result_record`, with a trial if an id is given."""
    plan = Plan(**fields).bind(records=records, representation="mean")
    epsilon = {"gdp": 1.0, "rdp": 3.9, "pld": 3.0} if plan.private else {}
    guarantee = {"non_private": "none", "dpfp": "nominal"}.get(plan.method, "proved")
    facts: dict[str, Any] = {
        "plan": plan.to_dict(),
        "plan_hash": plan.hash,
        "finished": True,
        "labels": ["negative", "positive"],
        "dev_records": {"dev": 100},
        "metrics": {
            "accuracy": accuracy,
            "accuracy_last": accuracy,
            "epoch": 3,
            "rule": "last epoch",
            "accuracy_dev": accuracy,
        },
        "history": [
            {
                "epoch": epoch,
                "step": 300 * epoch,
                "train_loss": 0.5,
                "dev": {"dev": {"accuracy": accuracy, "loss": 0.5}},
                "epsilon": epsilon,
                "train_seconds": seconds * epoch / 3,
            }
            for epoch in (1, 2, 3)
        ],
        "privacy": {
            "guarantee": guarantee,
            "epsilon": epsilon,
            "delta": plan.delta,
            "noise_multiplier": 0.4,
            "sigma": 0.4,
            "p": plan.p,
            "steps": plan.steps,
            "draws": plan.draws,
            "noise_coordinates": 384,
        },
        "cost": {
            "train_seconds": seconds,
            "eval_seconds": 1.0,
            "examples_per_second": 1234.5,
            "peak_memory_bytes": 300 * 2**20,
            "parameters": 22_000_000,
            "trainable_parameters": 22_000_000,
        },
        "environment": {"device": "cpu", "threads": 1},
    }
    if trial is not None:
        facts["trial"] = {
            "id": trial,
            "sweep": "s",
            "seed_index": 0,
            "status": "finished",
            "error": None,
            "node": "10.0.0.1",
            "started_at": 1_000.0,
            "seconds": seconds,
        }
    return training.make_record(**facts)
