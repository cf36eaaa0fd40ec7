"""From a plan to a finished result in one plain process: load, calibrate, train, write down.

DIR/result.json      the result: public facts and measurements, no secrets
DIR/weights.safetensors   the trained weights (with their plan), if asked for
DIR/resume.pt        only while unfinished, see `checkpoints.py`
"""

import dataclasses
import hashlib
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from dpfp_ray.data import Split, Table, Task
from dpfp_ray.data.tasks import load_task
from dpfp_ray.data.tokens import tokenise
from dpfp_ray.data.whole_files import read_json, write_json
from dpfp_ray.methods.parts.one_release import release_id
from dpfp_ray.models.classifier import Classifier, count_parameters, trainable_parameters
from dpfp_ray.models.own_encoder import CUSTOM, OwnEncoder
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer, resolve_representation
from dpfp_ray.models.representations import HeadClassifier, RepresentationTable, represent
from dpfp_ray.models.scopes import Lora, weights_to_keep
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.sampling import derived_seed, fresh_seed, keyed_integer
from dpfp_ray.privacy.statement import guarantee, statement
from dpfp_ray.training import machine, one_release
from dpfp_ray.training.checkpoints import forget_state, refuse_changed_files, refuse_other_rows
from dpfp_ray.training.comm import Comm, SoloComm
from dpfp_ray.training.dev_scores import kept_predictions, quote, without_answers
from dpfp_ray.training.loop import Data, Progress, Reporter, State, train
from dpfp_ray.training.predictions import fingerprint_rows

SCHEMA = 1
RESULT, WEIGHTS = "result.json", "weights.safetensors"


@dataclass
class Inputs:
    """What many plans can share: the task as tokens, and the encoder's initial weights."""

    data: Data
    label_names: tuple[str, ...]
    representation: str
    # Set when the encoder is not on this machine's disk: in Ray's object store, or the caller's.
    make_model: Callable[[Plan, int], Classifier] | None = None
    # The private records as they were read, for the ledger; not on Ray's workers.
    records: Split | None = None
    # What tells dev sets apart, by split (`predictions.fingerprint_rows`).
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0  # reading, tokenising and encoding, as far as no cache had it


@dataclass
class Prepared:
    """A plan bound to its data, calibrated, ready for the first step."""

    plan: Plan
    inputs: Inputs
    noise_multiplier: float
    build_seconds: float = 0.0  # calibration and building the model

    @property
    def data(self) -> Data:
        return self.inputs.data


def load_inputs(plan: Plan, task: Task | None = None, own: OwnEncoder | None = None) -> Inputs:
    """Load and tokenise; with a frozen encoder, also encode (`representations.py`).

    `task` and `own` are what the caller holds in memory, in place of what the plan would load.
    Nothing here depends on method, budget or seed.
    """
    started = time.perf_counter()
    if own is None and plan.model.startswith(CUSTOM):
        raise UserError(
            f"model {plan.model} is a module in the memory of another call; give encoder= to "
            f"train(), or save it to a folder with save_pretrained and name that"
        )
    resolve = own.resolve_representation if own else partial(resolve_representation, plan.model)
    representation = resolve(plan.representation)
    task = task or load_task(plan)
    tokenizer = own.tokenizer if own else load_tokenizer(plan.model)

    def table(split: Split, name: str) -> Table:
        tokens = tokenise(split, tokenizer, plan.max_length, name)
        if plan.scope != "head":
            return tokens
        if own:
            return own.represent(tokens, representation, plan.precision)
        return represent(tokens, plan.model, representation, plan.precision, name)

    data = Data(
        table(task.train, f"{task.name} train"),
        {name: table(split, name) for name, split in task.dev.items()},
    )
    make_model = partial(_own_classifier, own, data, len(task.label_names)) if own else None
    return Inputs(
        data,
        task.label_names,
        representation,
        make_model,
        task.train,
        {name: fingerprint_rows(rows_of(split), split.labels) for name, split in task.dev.items()},
        time.perf_counter() - started,
    )


def rows_of(split: Split) -> list[str] | list[tuple[str, str]]:
    if split.pairs is None:
        return split.texts
    return list(zip(split.texts, split.pairs, strict=True))


def _own_classifier(
    own: OwnEncoder, data: Data, classes: int, plan: Plan, head_seed: int
) -> Classifier:
    model = own.classifier(
        plan.representation,
        classes,
        dropout=plan.dropout,
        head_seed=head_seed,
        scope=plan.scope,
        lora=Lora.of(plan),
    )
    if plan.scope != "head":
        freeze_unreached(model, data)
    return model


def prepare(plan: Plan, inputs: Inputs | None = None) -> Prepared:
    """Bind the plan to its data and calibrate its noise."""
    inputs = inputs or load_inputs(plan)
    started = time.perf_counter()
    bound = plan.bind(
        records=len(inputs.data.train),
        representation=inputs.representation,
        classes=len(inputs.label_names),
    )
    noise = noise_multiplier(bound)
    return Prepared(bound, inputs, noise, time.perf_counter() - started)


def build_model(prepared: Prepared, seed: int, device: torch.device) -> Classifier:
    started = time.perf_counter()
    plan, head_seed = prepared.plan, keyed_integer(seed, "head")
    classes = len(prepared.inputs.label_names)
    train_table = prepared.data.train
    if isinstance(train_table, RepresentationTable):
        # The encoder has done its work: no trial needs to load it.
        model: Classifier = HeadClassifier(
            train_table.width, classes, plan.representation, head_seed
        )
        model.bounded = (plan.scaling, plan.C) if plan.one_release else None
    elif prepared.inputs.make_model is not None:
        model = prepared.inputs.make_model(plan, head_seed)
    else:
        model = build_classifier(
            plan.model,
            plan.representation,
            classes,
            dropout=plan.dropout,
            head_seed=head_seed,
            scope=plan.scope,
            lora=Lora.of(plan),
        )
        if plan.scope != "head":
            freeze_unreached(model, prepared.data)
    model = model.to(device)
    prepared.build_seconds += time.perf_counter() - started
    return model


def freeze_unreached(model: Classifier, data: Data) -> None:
    """Freeze weights on which the output does not depend (some encoders carry unused ones).

    Asked of one dev row, which is public; such weights could neither learn nor leak.
    """
    table = next(iter(data.dev.values()))
    model(table.collate(np.arange(1))).sum().backward()
    unreached = [(name, p) for name, p in trainable_parameters(model) if p.grad is None]
    for _, parameter in unreached:
        parameter.requires_grad_(False)
    model.zero_grad(set_to_none=True)
    if unreached:
        names = ", ".join(name for name, _ in unreached[:3])
        warnings.warn(
            f"{len(unreached)} weights do not affect the output and stay as they are: {names}",
            stacklevel=2,
        )


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
    on_release: Callable[[Any], None] | None = None,
) -> tuple[dict[str, Any], Classifier]:
    """Train as planned; the result's record and the trained model.

    `model` is what `build_model` gives for the same seed, for callers who need it beforehand.
    `on_release` is told the release that a method of one release has made, before it is used.
    """
    plan = prepared.plan
    seed = fresh_seed() if seed is None else seed
    if state is not None:
        refuse_other_rows(state, plan)
        # The noise that the first steps really had, should calibration come out otherwise by now.
        prepared = replace(prepared, noise_multiplier=state["noise_multiplier"])
    device = device or default_device()
    machine.reset_peak_memory(device)
    model = model or build_model(prepared, seed, device)
    comm = comm or SoloComm()
    described = (plan, prepared.noise_multiplier, model, prepared.data)
    if plan.one_release:  # done at once, the same from the start whenever it is done again
        progress = one_release.fit(
            *described, seed=seed, comm=comm, reporter=reporter, on_release=on_release
        )
    else:
        progress = train(
            *described,
            seed=seed,
            comm=comm,
            reporter=reporter,
            state=state,
            show_training_loss=show_training_loss,
        )
    record = result_record(prepared, progress, model, device, seed_known=seed_known)
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
) -> dict[str, Any]:
    """Everything a reader of the result may know, finished or so far; the seed is not among it."""
    plan = prepared.plan
    return {
        "schema": SCHEMA,
        "plan": plan.to_dict(),
        "plan_hash": plan.hash,
        "finished": progress.step == plan.steps,
        "labels": list(prepared.inputs.label_names),
        "dev_records": {name: len(table) for name, table in prepared.data.dev.items()},
        "metrics": headline(plan, progress.history),
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


def headline(plan: Plan, history: list[dict[str, Any]]) -> dict[str, Any]:
    """The score to quote: the last epoch's, whose weights are saved, private or not."""
    return quote(history)


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_folder(name: str | Path) -> Path:
    folder = Path(name).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; use another --output"
        ) from None
    return folder


def discard(folder: Path) -> None:
    """Remove what an earlier run left in `folder`."""
    for name in (RESULT, WEIGHTS):
        (folder / name).unlink(missing_ok=True)
    forget_state(folder)


def finished_result(folder: Path, plan: Plan, *, with_audit: bool = False) -> dict[str, Any] | None:
    """The result in `folder` if this very plan was finished there, on data as they are now."""
    if not (folder / RESULT).exists():
        return None
    found = read_json(folder / RESULT)
    if "audit" in found and not with_audit:
        raise UserError(f"{folder} holds an audit; use another --output, or --overwrite")
    if found.get("plan_hash") != plan.hash:
        raise UserError(
            f"{folder} holds the result of another plan ({found.get('plan_hash')}, this is "
            f"{plan.hash}); use another --output, or --overwrite"
        )
    refuse_changed_files(plan, folder / RESULT)
    forget_state(folder)  # still there if the run was killed right after its result
    return dict(found)


def data_mark(data: Data, own: OwnEncoder | None, seed: int) -> str:
    """Whether data (and an encoder) in memory are the same as before, for the resume file only.

    Keyed by the secret seed and gone with it: a plain hash of private records would be a release.
    """
    key = derived_seed(seed, "data mark").to_bytes(16, "big")
    digest = hashlib.blake2b(digest_size=16, key=key)

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for part in sorted(value):
                add(f"{name} {part}", value[part])
        elif isinstance(value, np.ndarray):
            digest.update(f"{name} {value.dtype} {value.shape}".encode())
            digest.update(np.ascontiguousarray(value).data)

    for split, table in {"": data.train, **data.dev}.items():
        for field in dataclasses.fields(cast(Any, table)):
            add(f"{split} {field.name}", getattr(table, field.name))
    if own is not None:
        add("encoder", {k: v.cpu().double().numpy() for k, v in own.module.state_dict().items()})
    return digest.hexdigest()


def write_result(
    folder: Path, record: dict[str, Any], model: Classifier | None, plan: Plan
) -> None:
    """Result and weights into `folder`; the resume file, and the seed in it, go."""
    if model is not None:
        from safetensors.torch import save_file

        kept = weights_to_keep(model)
        weights = {name: p.detach().cpu().contiguous() for name, p in kept.items()}
        save_file(weights, folder / WEIGHTS, metadata={"plan_hash": plan.hash})
    write_json(folder / RESULT, record)
    forget_state(folder)
