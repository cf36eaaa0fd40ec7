"""From a finished run back to a model that answers: `load_model("runs/one").predict(texts)`."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpfp_ray.models.classifier import Classifier
from dpfp_ray.models.export import Predictor
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer
from dpfp_ray.models.representations import CUSTOM, HeadClassifier, OwnEncoder
from dpfp_ray.models.scopes import Lora, merge_lora, weights_to_keep
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.record import Record, plan_of
from dpfp_ray.training.run_folder import RESULT, RESUME, WEIGHTS, read_result, read_weights


def load_model(run: Any, *, encoder: Any = None, tokenizer: Any = None) -> Predictor:
    """The model of a finished run, of any method and scope.

    run        what `train` gave, or the folder that it wrote
    encoder    the module that the run was given, with its tokenizer, if it was given one
    """
    own = OwnEncoder(encoder, tokenizer) if encoder is not None and tokenizer is not None else None
    if isinstance(model := getattr(run, "model", None), Predictor):
        return model
    folder = folder_of(run)
    record = read_run(folder)
    return predictor(plan_of(record), record["labels"], weights_of(folder, record), own)


def folder_of(run: Any) -> Path:
    folder = getattr(run, "folder", run)
    if folder is None:
        raise UserError("this run was not written anywhere; give output= to train()")
    if "://" in str(folder):
        raise UserError(f"{folder} is not on this machine; copy the run's folder here and name it")
    return Path(folder).expanduser()


def record_of(run: Any) -> Record:
    record: Record | None = getattr(run, "record", None)
    return record or read_run(run)


def read_run(folder: str | Path) -> Record:
    """The record of the finished run in `folder`; anything else is refused in a line."""
    path = folder_of(folder)
    unfinished = f"{path} holds an unfinished run; the same dpfp train command ends it"
    if not (path / RESULT).is_file():
        if (path / RESUME).exists():
            raise UserError(unfinished)
        if (path / "records").is_dir():
            raise UserError(
                f"{path} holds a sweep or a comparison, which keeps no weights; run the trial that "
                f"you want with dpfp train"
            )
        what = f"no {RESULT}" if path.is_dir() else "there is no such folder"
        raise UserError(f"{path}: {what}; give the --output of a finished dpfp train")
    record = read_result(path)
    if record["audit"]:
        raise UserError(
            f"{path} holds an audit: its model learnt canaries and was not kept; give the folder "
            f"of a run"
        )
    if not record["finished"]:
        raise UserError(unfinished)
    return record


def weights_of(folder: Path, record: Record) -> dict[str, Tensor]:
    if not (folder / WEIGHTS).is_file():
        raise UserError(
            f"{folder} has no {WEIGHTS}; restore it from a backup, or run again with "
            f"--overwrite, without --no-weights"
        )
    return read_weights(folder / WEIGHTS, record["plan_hash"])


def predictor(
    plan: Plan, labels: Sequence[str], weights: Mapping[str, Tensor], own: OwnEncoder | None = None
) -> Predictor:
    """The plan's encoder, as it was before training, with the weights that training gave."""
    if own is None and plan.model.startswith(CUSTOM):
        raise UserError(
            f"model {plan.model} was a module in memory; give encoder= and tokenizer= to load_model"
        )

    def build() -> Classifier:
        # Seed 0 is the one that frozen encoders were run with (`representations.represent`): what a
        # checkpoint lacks is the same here. Whatever else is random here, training has saved.
        parts: dict[str, Any] = {"scope": plan.scope, "lora": Lora.of(plan)}
        if own is not None:
            model = own.classifier(
                plan.representation, len(labels), dropout=0.0, head_seed=0, **parts
            )
        else:
            with warnings.catch_warnings():  # training has said what the checkpoint lacks
                warnings.simplefilter("ignore")
                model = build_classifier(plan.model, plan.representation, len(labels), **parts)
        model.bounded = (plan.scaling, plan.C) if plan.one_release else None
        centre = weights.get("centre")
        model.centre = None if centre is None else centre.detach().clone()
        put_weights(model, {name: value for name, value in weights.items() if name != "centre"})
        merge_lora(model)
        return model

    return _answering(build, plan, labels, own)


def predictor_of(
    plan: Plan, labels: Sequence[str], trained: Classifier, own: OwnEncoder | None
) -> Predictor:
    """For a model in memory; a head that was trained on representations gets its encoder back."""
    if isinstance(trained, HeadClassifier):
        weights = {name: value.detach() for name, value in weights_to_keep(trained).items()}
        return predictor(plan, labels, weights, own)
    return _answering(lambda: trained, plan, labels, own)


def _answering(
    build: Callable[[], Classifier], plan: Plan, labels: Sequence[str], own: OwnEncoder | None
) -> Predictor:
    tokenizer, length = own.tokenizer if own else load_tokenizer(plan.model), plan.max_length
    return Predictor(build, tokenizer, labels, max_length=length, precision=plan.precision)


@torch.no_grad()
def put_weights(model: Classifier, weights: Mapping[str, Tensor]) -> None:
    """Every saved weight into its place; a head is always among them."""
    places = dict(model.named_parameters())
    for name in ("head.weight", "head.bias", *weights):
        if name not in weights or name not in places or places[name].shape != weights[name].shape:
            raise UserError(
                f"the saved weights do not fit the model at {name!r}; is the encoder still the one "
                f"that was trained? run again with --overwrite"
            )
    for name, value in weights.items():
        places[name].copy_(value)
