"""Does an encoder treat each row by itself? Asked with made-up rows, before it sees private ones.

Clipping bounds one row's own part of a sum. If a row changes the vectors of other rows, in the same
batch or later through something that the encoder remembers, it moves the sum by more than C.
"""

import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig

from dpfp_ray.system.errors import UserError

if TYPE_CHECKING:
    from dpfp_ray.models.classifier import Classifier

ROWS, LENGTH = 4, 12
MANY_ROWS, SHORT = 66, 2  # some encoders behave otherwise in large batches
SAME_SHAPE = 1e-6  # other numbers in a tensor of the same shape do not even change the rounding
OTHER_SHAPE = 1e-3  # padding and larger products do
_OF_ALL_MODULES = frozenset(vars(Module()))
Batch = Mapping[str, Tensor]


def check_rows(classifier: "Classifier", *, training: bool) -> None:
    """UserError unless what `classifier` gives for a row comes from that row alone.

    The encoder is asked in the mode in which it will see private rows, and if that is training
    mode, in evaluation mode too: what it remembers from training may show there only.
    """
    encoder = classifier.encoder
    was_training = encoder.training
    name = type(getattr(encoder, "inner", encoder)).__name__
    modes = (False, True) if training else (False,)
    batch = _made_up(classifier, ROWS, LENGTH)
    try:
        with torch.random.fork_rng(devices=[]):
            _read_in(classifier, modes, batch)  # an encoder may build tables when it first runs
            state, before = _state(encoder), _read_in(classifier, modes, batch)
            again = _read_in(classifier, modes, batch)
            _check_memory(name, state, _state(encoder))
            if not _all_close(again, before):
                raise UserError(
                    f"{name} gives other numbers when it reads the same rows again; switch off "
                    f"what is random in it (dropout), or use another encoder"
                )
            encoder.train(training)
            _check_neighbours(classifier, name, ROWS, LENGTH, splits=2)
            _check_neighbours(classifier, name, MANY_ROWS, SHORT, splits=1)
            _check_memory(name, state, _state(encoder))
            if not _all_close(_read_in(classifier, modes, batch), before):
                _check_memory(name, {}, {"a place outside the module": b""})
    finally:
        encoder.train(was_training)


def _check_memory(name: str, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> None:
    changed = [key for key, value in after.items() if before.get(key) != value]
    if changed:
        raise UserError(
            f"{name} remembers something of the rows that it has read, in {changed[0]}; nothing is "
            f"proved for such encoders: use LayerNorm in place of BatchNorm, another encoder, or "
            f"scope: head if it remembers only in training mode"
        )


def set_dropout(encoder: Module, dropout: float) -> None:
    """For all dropout modules of `encoder`, and for the numbers that functional calls read."""
    for module in encoder.modules():
        if isinstance(module, _DropoutNd):
            module.p = dropout
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if "dropout" in name and isinstance(value, float):
                    setattr(holder, name, dropout)


def _check_neighbours(
    classifier: "Classifier", name: str, rows: int, length: int, splits: int
) -> None:
    """Rows alone, and beside others, give what they give together.

    `splits` is how often half of the rows are replaced, and then the other half: with two of them,
    each of four rows once stays while another one is replaced.
    """
    batch, other = (_made_up(classifier, rows, length, seed) for seed in (0, 1))
    together = _read(classifier, batch)
    number = torch.randperm(rows, generator=torch.Generator().manual_seed(2))
    replaced = [number // 2**bit % 2 == value for bit in range(splits) for value in (0, 1)]
    fine = True
    for mask in replaced:
        mixed = {key: tensor.where(~mask[:, None], other[key]) for key, tensor in batch.items()}
        fine &= _close(_read(classifier, mixed)[~mask], together[~mask], SAME_SHAPE)
    for row in range(ROWS):
        own = int(batch["attention_mask"][row].sum())
        alone = {key: tensor[row : row + 1, :own] for key, tensor in batch.items()}
        fine &= _close(_read(classifier, alone), together[row : row + 1], OTHER_SHAPE)
    if not fine:
        mode = "in training mode, " * classifier.encoder.training
        raise UserError(
            f"{name}: {mode}what it gives for a row depends on the other rows of the batch, or on "
            f"padding; nothing is proved for such encoders: use another"
            f"{' (LayerNorm in place of BatchNorm), or scope: head' * bool(mode)}"
        )


def _made_up(classifier: "Classifier", rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Rows of random tokens and of many lengths, which are the same for every seed."""
    encoder: Any = classifier.encoder
    embedding = encoder.get_input_embeddings()
    words = getattr(embedding, "num_embeddings", None) or len(embedding.weight)
    padding = getattr(encoder.config, "pad_token_id", None) or 0
    length = min(length, classifier.longest or length)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(words - 1, (rows, length), generator=generator)
    ids += ids >= padding  # every word but the padding
    mask = torch.arange(length) < (length - torch.arange(rows) % length)[:, None]
    return classifier.as_batch(ids.where(mask, padding), mask.long())


def _read_in(classifier: "Classifier", modes: Sequence[bool], batch: Batch) -> list[Tensor]:
    vectors = []
    for mode in modes:
        classifier.encoder.train(mode)
        vectors.append(_read(classifier, batch))
    return vectors


def _read(classifier: "Classifier", batch: Batch) -> Tensor:
    with torch.set_grad_enabled(classifier.encoder.training):
        return classifier.represent(batch).detach()


def _all_close(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(_close(*pair, SAME_SHAPE) for pair in zip(ones, others, strict=True))


def _close(one: Tensor, other: Tensor, margin: float) -> bool:
    return torch.allclose(one, other, rtol=margin, atol=margin * float(other.abs().max()))


def _state(encoder: Module) -> dict[str, bytes]:
    """Whatever the encoder holds besides modules, weights and its config, as bytes by name."""
    values: dict[str, bytes] = {}
    for path, module in encoder.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_ALL_MODULES}
        for name, value in (*own.items(), *module.named_buffers(recurse=False)):
            if not isinstance(value, PretrainedConfig | Module):
                with suppress(Exception):  # not everything can be pickled
                    values[f"{path}.{name}".lstrip(".")] = pickle.dumps(value)
    return values
