"""An encoder, the one vector it gives for each row, and a linear head on that vector.

Everything private happens at that vector, so this file is careful about one thing: a row's vector
comes from that row alone. Nothing in it is random by default and nothing is shared by a batch, so
padding, grouping and splitting rows over workers change it by rounding at most.
"""

import inspect
import pickle
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, Parameter
from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig

from dpfp_ray.data.batches import PLACE, ROW, first_tokens
from dpfp_ray.models.modeling_dpfp import (
    PAIR,
    chosen_layers,
    join,
    layer_means,
    one_vector,
    reads_layers,
    relation,
)
from dpfp_ray.system.errors import UserError

if TYPE_CHECKING:
    from dpfp_ray.models.activations import Shortcut

HEAD_STD = 0.02  # BERT's own initializer_range
MASKED = torch.finfo(torch.float32).min  # what eager attention adds where it must not look
PROBE_TOKENS = 3  # in the shorter of two made-up rows
PROBE_COPIES = 30  # of both, packed: 300 tokens
_POSITION_TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
# How `check_rows` asks.
ROWS, LENGTH = 4, 12
MANY_ROWS, SHORT = 66, 2  # some encoders behave otherwise in large batches
SAME_SHAPE = 1e-6  # other numbers in a tensor of the same shape do not even change the rounding
OTHER_SHAPE = 1e-3  # padding and larger products do
_OF_ALL_MODULES = frozenset(vars(Module()))
Batch = Mapping[str, Tensor]


class Classifier(Module):
    """`forward(batch)`: logits of shape (rows, classes); `represent(batch)`: (rows, width).

    A batch is what the tokenizer gives: `input_ids`, `attention_mask` and, where there are any,
    `token_type_ids`, each of shape (rows, length). Zero rows are a normal batch. For the
    representation `pair` it has the second texts too, as `pair_input_ids` and so on.
    """

    # Taken off h, if anything is: a mean of public rows, (width,).
    centre: Tensor | None

    def __init__(
        self,
        encoder: Module,
        representation: str,
        classes: int,
        *,
        frozen: bool = False,
        head_seed: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.register_buffer("centre", None)
        self.encoder = encoder
        self.representation = representation
        self.classes = classes
        self.frozen = frozen
        self._accepted = frozenset(inspect.signature(encoder.forward).parameters)
        self._token_types: int | None = getattr(encoder.config, "type_vocab_size", None)
        self._position_padding, self.longest = _position_table(encoder)
        self._position_rule: str | None = None
        self.width = 0
        self._probe()
        self.dropout = dropout
        check_rows(self, training=not (frozen or dropout))
        self.head = torch.nn.utils.skip_init(Linear, self.width, classes)
        initialise_head(self, head_seed)
        if frozen:  # never the other way round: RoFormer's sine table, for one, must stay fixed
            encoder.requires_grad_(False)
        pooler = getattr(encoder, "pooler", None)
        if representation != "pooler" and isinstance(pooler, Module):
            pooler.requires_grad_(False)  # an architecture that always builds one: h ignores it

    def recompute_layers(self) -> None:
        """In training, keep a layer's inputs only, and compute the layer again on the way back.

        Not by torch's reentrant way: its layers would be passed by `torch.autograd.grad`, by which
        clipping asks.
        """
        if self.frozen or not getattr(self.encoder, "supports_gradient_checkpointing", False):
            raise UserError(
                f"{type(self.encoder).__name__} has no layers that could be computed again; drop "
                "gradient_checkpointing"
            )
        encoder: Any = self.encoder
        encoder.gradient_checkpointing_enable({"use_reentrant": False})
        # For adapters transformers lets the embeddings' output ask for a gradient, which only the
        # reentrant way needs; clipping would look for its roots in vain.
        encoder.disable_input_require_grads()

    packs = False  # whether it takes packed batches (`data/batches.py`)
    # With dropout, which no private plan has, the same rows give other vectors in training mode.
    dropout = 0.0
    # (scaling, C) where the head was made for bounded rows: inference then bounds them too.
    bounded: tuple[str, float] | None = None
    # Past frozen layers, for batches that hold what those give (`activations.py`).
    shortcut: "Shortcut | None" = None

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.classify(self.represent(batch))

    def classify(self, h: Tensor) -> Tensor:
        logits: Tensor = self.head(h if self.bounded is None else bound_rows(h, *self.bounded))
        return logits

    def represent(self, batch: Mapping[str, Tensor]) -> Tensor:
        """h(x): one fp32 vector for each row; without a graph if the encoder is frozen."""
        if len(batch["input_ids"]) == 0:
            # No row, no encoder; but backward still works, through an empty slice of a weight.
            weight = next(self.encoder.parameters())
            return weight.reshape(-1)[:0].reshape(0, self.width).float()
        known = batch.get("below")
        way = nullcontext() if known is None or not self.shortcut else self.shortcut.given(known)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen), way:
            if self.representation == PAIR:
                second = {
                    name.removeprefix(f"{PAIR}_"): value
                    for name, value in batch.items()
                    if name.startswith(f"{PAIR}_")
                }
                return join(relation(self._vector(batch), self._vector(second)), self.centre)
            if reads_layers(self.representation):
                means = self.layer_means(batch)
                return join(chosen_layers(means, self.representation), self.centre)
            h = self._packed_vector(batch) if ROW in batch else self._vector(batch)
            return h if self.centre is None else h - self.centre

    def represent_rows(self, table: Any, rows: Any, precision: str) -> Tensor:
        """h of these rows of `table` in fp32, from an encoder that may itself run in bf16."""
        device = next(self.parameters()).device
        batch = {name: tensor.to(device) for name, tensor in table.collate(rows).items()}
        with torch.autocast(device.type, torch.bfloat16, precision == "bf16"):
            return self.represent(batch).float()

    def layer_means(self, batch: Mapping[str, Tensor]) -> Tensor:
        output = self._encode(batch, output_hidden_states=True)
        return layer_means(output, _mask(batch))

    def _encode(self, batch: Mapping[str, Tensor], **options: Any) -> Any:
        try:
            return self.encoder(**self._inputs(batch), **options)
        except IndexError:
            raise UserError(
                "the encoder has no embedding for a token, or for a position; the tokenizer and "
                "the weights in the model's folder do not belong together"
            ) from None

    def _vector(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One vector for each text."""
        output = self._encode(batch)
        return one_vector(output, _mask(batch), self.representation)

    def _packed_vector(self, batch: Mapping[str, Tensor]) -> Tensor:
        """`_vector` of rows that lie side by side: a token sees those of its own row."""
        row = batch[ROW]
        inputs = self._inputs(batch)
        own = row[:, None, :, None] == row[:, None, None, :]
        if self.encoder.config._attn_implementation != "sdpa":  # type: ignore[union-attr]
            own = torch.zeros(own.shape, device=own.device).masked_fill_(~own, MASKED)
        inputs["attention_mask"] = own
        hidden: Tensor = self.encoder(**inputs).last_hidden_state.float().flatten(0, 1)
        first = first_tokens(batch)
        if self.representation == "cls":
            return hidden[first]
        # Padding counts as 0 tokens of row 0.
        real, rows = (row >= 0).flatten()[:, None], row.flatten().clamp(min=0)
        counts = hidden.new_zeros(len(first), 1).index_add(0, rows, real.to(hidden.dtype))
        if self.representation == "last":
            return hidden[first + counts[:, 0].long() - 1]
        sums = hidden.new_zeros(len(first), hidden.shape[1])
        return sums.index_add(0, rows, hidden.where(real, 0.0)) / counts

    def _inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the encoder's forward takes, with what it would fill in by itself spelt out.

        Left alone, encoders look up one row of positions (and of token types) for the whole batch.
        Opacus cannot split the gradient of such a row by example, and its ghost norms are wrong on
        an expanded one; so every row gets its own, contiguous in memory.
        """
        inputs = {key: value for key, value in batch.items() if key in self._accepted}
        ids = inputs["input_ids"]
        place = batch.get(PLACE)  # of each token in its row, where rows are packed
        length = ids.shape[1]
        if place is not None and self.longest is not None and length > self.longest:
            length = int(place.max()) + 1
        if self.longest is not None and length > self.longest:
            raise UserError(f"rows of {length} tokens; this encoder reads at most {self.longest}")
        if "token_type_ids" in self._accepted and self._token_types is not None:
            if self._token_types == 0:
                inputs.pop("token_type_ids", None)
            elif self._token_types == 1 or "token_type_ids" not in inputs:
                inputs["token_type_ids"] = torch.zeros_like(ids)
        if place is not None:
            first = 0 if self._position_rule == "count" else (self._position_padding or 0) + 1
            inputs["position_ids"] = place + first
        elif self._position_rule == "count":
            positions = torch.arange(ids.shape[1], device=ids.device)
            inputs["position_ids"] = positions.repeat(ids.shape[0], 1)
        elif self._position_rule == "skip_padding":
            assert self._position_padding is not None
            real = ids.ne(self._position_padding).long()
            inputs["position_ids"] = real.cumsum(1) * real + self._position_padding
        return inputs

    @torch.no_grad()
    def _probe(self) -> None:
        """Ask the encoder itself how it numbers positions and how wide h is.

        Architectures count from 0, from after the padding id, or from elsewhere. No rule is trusted
        before it reproduces the encoder's own output; with none, the encoder fills in its own.
        """
        batch = self.probe_batch()
        mask = batch["attention_mask"]
        plain = {key: value for key, value in batch.items() if key in self._accepted}
        default = self.encoder(**plain).last_hidden_state
        rules: list[str | None] = ["count", None] if "position_ids" in self._accepted else [None]
        if self._position_padding is not None:
            rules.insert(0, "skip_padding")
        for self._position_rule in rules:
            output = self.encoder(**self._inputs(batch)).last_hidden_state
            if torch.allclose(output[mask.bool()], default[mask.bool()], atol=1e-5):
                break
        together = self.represent(batch)
        self.width = together.shape[-1]
        self.packs = self._can_pack(batch, together)

    def _can_pack(self, batch: Mapping[str, Tensor], together: Tensor) -> bool:
        """Asked of the encoder itself: packed many times, rows must come out as they do alone."""
        if self.representation not in ("mean", "cls", "last") or self._position_rule is None:
            return False
        real = batch["attention_mask"].repeat(PROBE_COPIES, 1).bool()
        number, place = (real.nonzero()[:, side][None] for side in (0, 1))
        ids = batch["input_ids"].repeat(PROBE_COPIES, 1)[real][None]
        try:
            found = self._packed_vector({"input_ids": ids, ROW: number, PLACE: place})
        except Exception:  # each architecture refuses such masks in its own way
            return False
        together = together.repeat(PROBE_COPIES, 1)
        return torch.allclose(found, together, rtol=1e-4, atol=1e-5 * float(together.abs().max()))

    def probe_batch(self) -> dict[str, Tensor]:
        """Two made-up rows, one of them padded; of odd lengths, which some encoders round up."""
        padding = getattr(self.encoder.config, "pad_token_id", None) or 0
        real = [number for number in range(3, 11) if number != padding][:7]
        ids = torch.tensor([real, [*real[:PROBE_TOKENS], *[padding] * (7 - PROBE_TOKENS)]])
        mask = (torch.arange(7) < torch.tensor([[7], [PROBE_TOKENS]])).long()
        return self.as_batch(ids, mask)

    def as_batch(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Made-up rows, which for the representation `pair` are both texts of their records."""
        batch = {"input_ids": ids, "attention_mask": mask}
        if self.representation == PAIR:
            batch |= {f"{PAIR}_{name}": value for name, value in batch.items()}
        return batch


def _mask(batch: Mapping[str, Tensor]) -> Tensor:
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"]))


def bound_rows(h: Tensor, scaling: str, C: float) -> Tensor:
    """Rows of norm at most C ("clip": h min(1, C/‖h‖)) or of norm C ("unit"); 0 stays 0.

    A row with infinite or undefined numbers has no norm to divide by, and becomes 0.
    """
    h = h.where(h.isfinite().all(1, keepdim=True), 0.0)
    norms = torch.linalg.vector_norm(h, dim=1, keepdim=True)
    floor = C if scaling == "clip" else torch.finfo(h.dtype).tiny
    return h * (C / norms.clamp(min=floor))


def initialise_head(model: Classifier, head_seed: int) -> None:
    """New head weights from a generator of their own; the global one is not touched."""
    generator = torch.Generator().manual_seed(head_seed)
    torch.nn.init.normal_(model.head.weight, std=HEAD_STD, generator=generator)
    torch.nn.init.zeros_(model.head.bias)


def trainable_parameters(classifier: Module) -> list[tuple[str, Parameter]]:
    return [(name, p) for name, p in classifier.named_parameters() if p.requires_grad]


def count_parameters(classifier: Module, *, trainable_only: bool = False) -> int:
    return sum(p.numel() for p in classifier.parameters() if p.requires_grad or not trainable_only)


def _position_table(encoder: Module) -> tuple[int | None, int | None]:
    """The padding id that positions are offset by, and the longest row; None where unlimited."""
    for name, module in encoder.named_modules():
        if name.rpartition(".")[2] in _POSITION_TABLES and isinstance(module, Embedding):
            padding = module.padding_idx
            return padding, module.num_embeddings - (0 if padding is None else padding + 1)
    return None, None


# Does an encoder treat each row by itself? Asked with made-up rows, before it sees private ones. If
# a row changes the vectors of other rows, in the same batch or later through something that the
# encoder remembers, it moves the sum by more than the C that clipping allows it.


def check_rows(classifier: Classifier, *, training: bool) -> None:
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
    classifier: Classifier, name: str, rows: int, length: int, splits: int
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


def _made_up(classifier: Classifier, rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
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


def _read_in(classifier: Classifier, modes: Sequence[bool], batch: Batch) -> list[Tensor]:
    return [_read(classifier, batch) for mode in modes if classifier.encoder.train(mode)]


def _read(classifier: Classifier, batch: Batch) -> Tensor:
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
