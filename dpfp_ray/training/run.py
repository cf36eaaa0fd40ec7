"""One run in one plain process: train as prepared, and the record of what came of it."""

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dpfp_ray.data.cache import version
from dpfp_ray.methods.parts.one_release import release_id
from dpfp_ray.models.activations import with_activations
from dpfp_ray.models.classifier import Classifier, count_parameters
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.privacy.sampling import fresh_seed
from dpfp_ray.privacy.statement import guarantee, statement
from dpfp_ray.training import machine, one_release
from dpfp_ray.training.checkpoints import refuse_earlier_version
from dpfp_ray.training.dev_scores import Select, kept_predictions, quote, without_answers
from dpfp_ray.training.loop import Progress, Reporter, State, train
from dpfp_ray.training.machine import Comm, SoloComm
from dpfp_ray.training.prepare import Prepared, build_model

SCHEMA = 1


def run(
    prepared: Prepared,
    reporter: Reporter,
    *,
    seed: int | None = None,
    state: State | None = None,
    comm: Comm | None = None,
    device: torch.device | None = None,
    model: Classifier | None = None,
    seed_known: bool = False,
    show_training_loss: bool = False,
    select: Select = "last",
    on_release: Callable[[Any], None] | None = None,
    before_draws: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], Classifier]:
    """Train as planned; the result's record and the trained model.

    `model` is what `build_model` gives for the same seed, for callers who need it beforehand.
    `on_release` is told the release that a method of one release has made, before it is used.
    `before_draws` is called once, before the first use of private records that must be paid.
    """
    plan = prepared.plan
    seed = fresh_seed() if seed is None else seed
    if state is not None:
        refuse_earlier_version(state, plan)
        # The noise that the first steps really had, should calibration come out otherwise by now.
        prepared = replace(prepared, noise_multiplier=state["noise_multiplier"])
    device = device or default_device()
    machine.reset_peak_memory(device)
    model = model or build_model(prepared, seed, device)
    comm = comm or SoloComm()
    started = time.perf_counter()
    data = replace(prepared.data, train=with_activations(prepared.data.train, model, plan))
    prepared.build_seconds += time.perf_counter() - started
    described = (plan, prepared.noise_multiplier, model, data)
    if plan.one_release:  # done at once, the same from the start whenever it is done again
        progress = one_release.fit(
            *described,
            seed=seed,
            comm=comm,
            reporter=reporter,
            on_release=on_release,
            before_draws=before_draws,
        )
    else:
        progress = train(
            *described,
            seed=seed,
            comm=comm,
            reporter=reporter,
            state=state,
            show_training_loss=show_training_loss,
            select=select,
            before_draws=before_draws,
        )
    record = result_record(prepared, progress, model, device, seed_known=seed_known, select=select)
    train_table = prepared.data.train
    if plan.one_release and isinstance(train_table, RepresentationTable):
        record["privacy"]["release_id"] = release_id(
            plan, prepared.noise_multiplier, train_table, seed
        )
    return record, model


def result_record(
    prepared: Prepared,
    progress: Progress,
    model: Classifier,
    device: torch.device,
    *,
    seed_known: bool = False,
    select: Select = "last",
) -> dict[str, Any]:
    """Everything a reader of the result may know, finished or so far; the seed is not among it."""
    plan = prepared.plan
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
            seed_known=seed_known,
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


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
