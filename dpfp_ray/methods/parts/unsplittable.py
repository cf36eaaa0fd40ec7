"""Weights whose gradient cannot be told apart by row: found by trying, and left untrained."""

import warnings

import torch
from torch import Tensor
from torch.nn import Module, functional

from dpfp_ray.data.batches import PLACE, ROW
from dpfp_ray.methods.parts.ghost import GhostClipping, squared_norms
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.scopes import woken
from dpfp_ray.system.errors import UserError

# Three rows of unlike lengths, so that a tensor shared by the batch cannot pass for one row each.
PROBE_LENGTHS = (7, 5, 4)


def freeze_unsplittable(model: Classifier) -> None:
    """Freeze weights whose gradient cannot be told apart by row, and say which.

    Such weights act once for the whole batch (MPNet's and DeBERTa's relative positions), so a row's
    share in their gradient is lost before any hook sees it. An encoder that has no others (XLNet's
    and Longformer's rows are not in the first dimension) is refused.
    """
    found = unsplittable(model)
    # Opacus takes a module that has weights and parts as one. Without the weights (the biases of
    # DeBERTa's first version), its parts are seen one by one.
    while knots := [name for name in found if _has_parts(model, name)]:
        _freeze(model, knots)
        found = sorted({*knots, *unsplittable(model)})
    _freeze(model, found)
    if found and not any(p.requires_grad for p in model.encoder.parameters()):
        raise UserError(
            f"{type(model.encoder).__name__}: none of the weights to train has a gradient per "
            f"example, because rows share them; use scope: head"
        )
    if found:
        warnings.warn(
            f"{len(found)} weights act on all rows of a batch at once and have no gradient per "
            f"example; dpsgd leaves them as they are: {', '.join(found[:3])}"
            f"{' …' if len(found) > 3 else ''}",
            stacklevel=3,
        )


def _freeze(model: Classifier, names: list[str]) -> None:
    for name, parameter in trainable_parameters(model):
        if name in names:
            parameter.requires_grad_(False)


def _has_parts(model: Classifier, name: str) -> bool:
    """Whether the weight's own module has other trained modules in it."""
    module = model.get_submodule(name.rpartition(".")[0])
    return model.get_parameter(name).requires_grad and any(
        p.requires_grad for part in module.children() for p in part.parameters()
    )


def unsplittable(model: Classifier) -> list[str]:
    """Names of trainable weights for which hooks and a row-by-row loop disagree on made-up rows."""
    was_training = model.training
    model.train(not model.dropout)  # the loop must see what the batch saw
    try:
        with torch.enable_grad(), woken(model):
            return _compare(model)
    finally:
        model.train(was_training)


def splits_packed(model: Classifier) -> bool:
    """Whether the gradients of packed rows can be told apart: asked of the encoder, which must give
    the norms that padded rows have."""
    if not model.packs:
        return False
    batch, labels = _probe_rows(model)
    real = batch["attention_mask"].bool()
    number, place = (real.nonzero()[:, side][None] for side in (0, 1))
    beside = {"input_ids": batch["input_ids"][real][None], ROW: number, PLACE: place}
    was_training = model.training
    model.train(not model.dropout)
    try:
        with torch.enable_grad(), woken(model):
            padded, packed = (_norms(model, inputs, labels) for inputs in (batch, beside))
    except (RuntimeError, TypeError, ValueError):  # each architecture fails in its own way
        return False
    finally:
        model.train(was_training)
    if padded.keys() != packed.keys():
        return False
    expected = torch.stack(list(padded.values()), 1)
    found = torch.stack([packed[weight] for weight in padded], 1)
    return not bool(((found - expected).abs() > _margin(expected)).any())


def _margin(norms: Tensor) -> Tensor:
    """(rows, weights): a gradient that is zero but for rounding (a key's bias) may differ by
    rounding of the row's whole gradient."""
    return 0.02 * norms + 1e-6 * norms.norm(dim=1, keepdim=True)


def _norms(model: Classifier, inputs: dict[str, Tensor], labels: Tensor) -> dict[Tensor, Tensor]:
    """Of each row's gradient, by weight."""
    clipping = GhostClipping(model)
    try:
        with clipping.packed(inputs.get(ROW)):
            h = model.represent(inputs)
        clipping.run_hooks(functional.cross_entropy(model.head(h), labels, reduction="none"))
        return {weight: squares.sqrt() for weight, squares in clipping.squares().items()}
    finally:
        clipping.remove()


def _compare(model: Classifier) -> list[str]:
    batch, labels = _probe_rows(model)
    # A row that is taken for another one then has another norm, also where a bias is alike for all.
    weights = 2.0 ** torch.arange(len(labels), device=labels.device)
    named = trainable_parameters(model)
    try:
        clipping = GhostClipping(model)
    except NotImplementedError as error:
        raise UserError(
            f"Opacus cannot split this encoder's gradients: {error}; use scope: head"
        ) from error
    try:
        losses = functional.cross_entropy(model(batch), labels, reduction="none")
        clipping.run_hooks(losses * weights, [parameter for _, parameter in named])
        measured = {
            parameter: squares.sqrt()
            for module, uses in clipping.uses.items()
            for parameter, squares in _squares_or_nothing(module, uses, len(labels)).items()
        }
    finally:
        clipping.remove()
    expected = torch.zeros(len(labels), len(named), device=labels.device)
    for row, length in enumerate(PROBE_LENGTHS):
        alone = {name: tensor[row : row + 1, :length] for name, tensor in batch.items()}
        loss = functional.cross_entropy(model(alone), labels[row : row + 1]) * weights[row]
        gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        for column, value in enumerate(gradients):
            if value is not None:
                expected[row, column] = torch.linalg.vector_norm(value)
    margin = _margin(expected)
    return [
        name
        for column, (name, parameter) in enumerate(named)
        if parameter not in measured
        or bool(((measured[parameter] - expected[:, column]).abs() > margin[:, column]).any())
    ]


def _squares_or_nothing(
    module: Module, uses: list[tuple[Tensor, Tensor]], rows: int
) -> dict[Tensor, Tensor]:
    """Nothing where a use is not one row per example, or where Opacus has no way to split it."""
    if any(len(value) != rows for use in uses for value in use):
        return {}
    try:
        return squared_norms(module, uses)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return {}


def _probe_rows(model: Classifier) -> tuple[dict[str, Tensor], Tensor]:
    device = next(model.parameters()).device
    embedding = model.encoder.get_input_embeddings()  # type: ignore[operator]
    words = getattr(embedding, "num_embeddings", None) or len(embedding.weight)
    padding = getattr(model.encoder.config, "pad_token_id", None) or 0
    rows, length = len(PROBE_LENGTHS), max(PROBE_LENGTHS)
    ids = torch.arange(rows * length).reshape(rows, length) * 7 % (words - 1)
    ids += ids >= padding  # every word but the padding
    mask = torch.arange(length) < torch.tensor(PROBE_LENGTHS)[:, None]
    batch = {"input_ids": ids.where(mask, padding), "attention_mask": mask.long()}
    labels = torch.arange(rows) % model.classes
    return {name: tensor.to(device) for name, tensor in batch.items()}, labels.to(device)
