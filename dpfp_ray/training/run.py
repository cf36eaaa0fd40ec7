"""One run in one process: the events of its training, and at the end the result's record."""

import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from dpfp_ray.data.cache import version
from dpfp_ray.methods.parts.one_release import release_id
from dpfp_ray.models.activations import with_activations
from dpfp_ray.models.classifier import Classifier, count_parameters
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.privacy.statement import guarantee, statement
from dpfp_ray.training import machine
from dpfp_ray.training.checkpoints import refuse_earlier_version
from dpfp_ray.training.dev_scores import kept_predictions, quote, without_answers
from dpfp_ray.training.loop import Event, Finished, Progress, make_release, train_steps
from dpfp_ray.training.machine import Comm, SoloComm
from dpfp_ray.training.prepare import Run

SCHEMA = 1


def run_events(run: Run, model: Classifier, comm: Comm | None = None) -> Iterator[Event]:
    """Train `model` in place as planned. The last event is `Finished`, with the result's record.

    `model` is what `build_model` gives for the run's seed. `comm` says which of several workers
    this process is.
    """
    prepared, plan = run.prepared, run.plan
    if run.state is not None:
        refuse_earlier_version(run.state, plan)
    machine.reset_peak_memory(next(model.parameters()).device)
    started = time.perf_counter()
    data = replace(prepared.data, train=with_activations(prepared.data.train, model, plan))
    prepared.build_seconds += time.perf_counter() - started
    training = make_release if plan.one_release else train_steps
    progress = yield from training(run, model, data, comm or SoloComm())
    record = result_record(run, progress, model)
    train_table = prepared.data.train
    if plan.one_release and isinstance(train_table, RepresentationTable):
        release = release_id(plan, prepared.noise_multiplier, train_table, run.seed)
        record["privacy"]["release_id"] = release
    yield Finished(record)


def result_record(run: Run, progress: Progress, model: Classifier) -> dict[str, Any]:
    """Everything a reader of the result may know, finished or so far; the seed is not among it."""
    prepared, plan, select = run.prepared, run.plan, run.select
    device = next(model.parameters()).device
    return {
        "schema": SCHEMA,
        "plan": plan.to_dict(),
        "plan_hash": plan.hash,
        "finished": progress.step == plan.steps,
        "labels": list(prepared.inputs.label_names),
        **({"columns": dict(prepared.inputs.columns)} if prepared.inputs.columns else {}),
        "dev_records": {name: len(table) for name, table in prepared.data.dev.items()},
        **({} if select == "last" else {"select": select}),  # whose weights are saved
        "metrics": quote(progress.history, select),
        "history": without_answers(progress.history),
        "predictions": kept_predictions(
            progress.history,
            {name: table.labels for name, table in prepared.data.dev.items()},
            prepared.inputs.fingerprints,
            len(prepared.inputs.label_names),
        ),
        "privacy": {
            "guarantee": guarantee(plan),
            "epsilon": progress.history[-1]["epsilon"] if progress.history else {},
            "delta": plan.delta,
            "noise_multiplier": prepared.noise_multiplier,
            "sigma": prepared.noise_multiplier * plan.C,
            "p": plan.p,
            "steps": progress.step,
            "draws": progress.step * plan.M,
            "noise_coordinates": progress.noise_coordinates,
        },
        "statement": statement(
            plan,
            prepared.noise_multiplier,
            steps=progress.step,
            seed_known=run.seed_known,
            loss_shown=any(entry["train_loss"] is not None for entry in progress.history),
        ),
        "cost": {
            "prepare_seconds": prepared.inputs.seconds + prepared.build_seconds,
            "train_seconds": progress.train_seconds,
            "eval_seconds": progress.eval_seconds,
            "examples_per_second": progress.rows / max(progress.train_seconds, 1e-9),
            "peak_memory_bytes": machine.peak_memory(device),
            "parameters": count_parameters(model),
            "trainable_parameters": count_parameters(model, trainable_only=True),
        },
        "environment": {
            "device": str(device),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": version("torch"),
            "transformers": version("transformers"),
            "dpfp_ray": version("dpfp-ray"),
        },
    }
