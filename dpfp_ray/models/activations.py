"""What the frozen layers below `scope: top:K` give for every token, computed once and kept.

Those layers give a record the same numbers in every epoch of every trial. One inference pass serves
them all, memory-mapped from a cache that is keyed by content, and a step then costs its K layers.
Like representations, the files hold private data in another form: their owner alone can read them.

Numbers are kept as they are computed, in fp32 (in bf16 where the plan says that the encoder runs in
it): a run with the cache is the run without it, but for the rounding that also depends on how rows
are grouped.
"""

import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from dpfp_ray.data import Table
from dpfp_ray.data.batches import PART_COST, split_rows
from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.models.representations import CUSTOM
from dpfp_ray.models.row_store import INFERENCE_ROWS
from dpfp_ray.models.scopes import first_trained_layer
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.cache import cache_dir
from dpfp_ray.system.terminal import counted_rows
from dpfp_ray.system.whole_files import PRIVATE, locked, private_folder

_NAME = "hidden_states"  # what encoders call a layer's input where they pass it by name
Batch = Mapping[str, Tensor]


class Shortcut:
    """Passes over `layers[:first]`.

    All else of the encoder's own `forward` runs as it is (masks, positions, what comes after), so
    no architecture needs a version of its own here. Whether one allows it is found by trying.
    """

    def __init__(self, layers: ModuleList, first: int) -> None:
        self.skipped, self.entry = list(layers)[:first], layers[first]
        # How many things a layer gives, the hidden states first; 0: the hidden states by themselves
        self.outputs = [0] * first

    @contextmanager
    def given(self, below: Tensor) -> Iterator[None]:
        """In here the encoder takes `below` for what the skipped layers give."""

        def enter(_: Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return ((below, *args[1:]), named) if args else (args, {**named, _NAME: below})

        handle = self.entry.register_forward_pre_hook(enter, with_kwargs=True)
        try:
            for layer, outputs in zip(self.skipped, self.outputs, strict=True):
                layer.forward = partial(_pass_on, outputs)
            yield
        finally:
            handle.remove()
            for layer in self.skipped:
                layer.__dict__.pop("forward", None)  # that of its class is there again

    def below(self, run: Callable[[], object]) -> Tensor | None:
        """What the skipped layers hand over when `run` runs the encoder; the rest is not run."""
        found: list[Any] = []

        def stop(_: Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            found.append(args[0] if args else named.get(_NAME))
            raise _Reached

        handle = self.entry.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            run()
        except _Reached:
            pass
        finally:
            handle.remove()
        return found[0] if found and isinstance(found[0], Tensor) else None

    @torch.no_grad()
    def learn(self, represent: Callable[[Batch], Tensor], batch: Batch) -> bool:
        """Look how the layers are used; whether `represent` gives the same by way of here."""
        handles = [
            layer.register_forward_hook(partial(self._look, number))
            for number, layer in enumerate(self.skipped)
        ]
        try:
            plain = represent(batch)
        finally:
            for handle in handles:
                handle.remove()
        below = self.below(lambda: represent(batch))
        if below is None or below.ndim != 3 or below.shape[:2] != batch["input_ids"].shape:
            return False
        real = batch["attention_mask"].bool().unsqueeze(-1)
        try:
            with self.given(below.masked_fill(~real, 0)):  # nothing is kept of padding
                return torch.allclose(represent(batch), plain, atol=1e-5)
        except (TypeError, ValueError, AttributeError, RuntimeError, LookupError):
            return False  # layers that hand on more than their hidden states

    def _look(self, number: int, _: Module, __: object, output: Any) -> None:
        self.outputs[number] = len(output) if isinstance(output, tuple) else 0


class _Reached(Exception):
    """Here it may end: the layers above have nothing to add."""


def _pass_on(outputs: int, *args: Any, **named: Any) -> Any:
    hidden = args[0] if args else named[_NAME]
    return (hidden, *[None] * (outputs - 1)) if outputs else hidden


# Part of every key: raise it when the meaning of the stored numbers changes.
FORMAT_VERSION = 1
# How numbers are stored: numpy has no bf16, so its bits are kept as whole numbers.
STORED = {"fp32": (torch.float32, np.float32), "bf16": (torch.bfloat16, np.int16)}


@dataclass(frozen=True, eq=False)
class ActivationTable:
    """A token table with what the frozen layers give for its tokens, packed as they are."""

    tokens: TokenTable
    below: npt.NDArray[Any]  # (all tokens, width)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        return self.tokens.labels

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return self.tokens.lengths

    @property
    def persons(self) -> npt.NDArray[np.int64] | None:
        return self.tokens.persons

    def collate(self, rows: npt.NDArray[Any]) -> dict[str, Tensor]:
        batch = self.tokens.collate(rows)
        real = batch["attention_mask"].numpy().astype(bool)
        starts = self.tokens.offsets[np.asarray(rows, dtype=np.int64)]
        below = np.zeros((*real.shape, self.below.shape[1]), self.below.dtype)
        below[real] = self.below[(starts[:, None] + np.arange(real.shape[1]))[real]]
        found = torch.from_numpy(below)
        bits = found.dtype == torch.int16
        return {**batch, "below": found.view(torch.bfloat16).float() if bits else found}

    def content(self) -> str:
        return self.tokens.content()


def with_activations(table: Table, model: Classifier, plan: Plan) -> Table:
    """Return a table with cached activations, or the table itself if the model cannot use them.

    With dropout the layers give something else each time, and some encoders cannot be entered
    between two layers.
    """
    if not (isinstance(table, TokenTable) and len(table) and plan.cache_gb) or plan.dropout:
        return table
    layers, first = first_trained_layer(model, plan.scope)
    if first == 0:
        return table
    shortcut, was_training = Shortcut(layers, first), model.training
    model.eval()
    try:
        if not shortcut.learn(model.represent, probe_of(model)):
            return table
        below = _load_or_make(table, model, shortcut, plan)
    except OSError as error:
        # The cache saves time; a full or read-only disk is no reason not to train.
        _say(f"cannot be kept ({error})")
        return table
    finally:
        model.train(was_training)
    if below is None:
        return table
    model.shortcut = shortcut
    return ActivationTable(table, below)


def probe_of(model: Classifier) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in model.probe_batch().items()}


def _load_or_make(
    table: TokenTable, model: Classifier, shortcut: Shortcut, plan: Plan
) -> npt.NDArray[Any] | None:
    with torch.no_grad():
        width = _below(model, shortcut, probe_of(model), "fp32").shape[-1]
    precision = "bf16" if plan.precision == "bf16" else "fp32"
    kind = np.dtype(STORED[precision][1])
    shape = (int(table.offsets[-1]), width)
    size = shape[0] * width * kind.itemsize
    if size > plan.cache_gb * 1e9:
        _say(f"need {size / 1e9:.3g} GB and cache_gb is {plan.cache_gb:g}")
        return None
    folder = cache_dir() / "activations"
    private_folder(folder)
    entry = folder / f"{_key(table, model, shortcut, precision)}.bin"

    @contextmanager
    def made() -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            path = Path(scratch) / "below"
            with _mapped(path, shape, kind) as below:
                _encode(table, model, shortcut, precision, below)
            yield path

    if plan.model.startswith(CUSTOM):
        # Its code is nobody's to know, and may be another next time: kept as long as the run.
        with made() as path:
            return np.asarray(np.memmap(path, kind, "r", shape=shape))
    # Trials that need the same outputs wait for the first of them to make these.
    with locked(folder / ".lock"):
        if not (entry.exists() and entry.stat().st_size == size):
            _make_room(folder, size, plan.cache_gb)
            with made() as path:
                os.replace(path, entry)
        with suppress(OSError):
            os.utime(entry)  # used now: others go first when room is needed
        return np.asarray(np.memmap(entry, kind, "r", shape=shape))


@torch.no_grad()
def _encode(
    table: TokenTable,
    model: Classifier,
    shortcut: Shortcut,
    precision: str,
    below: npt.NDArray[Any],
) -> None:
    device = next(model.parameters()).device
    parts = split_rows(table.lengths, INFERENCE_ROWS, PART_COST[device.type])
    for part in counted_rows(parts, f"running {len(shortcut.skipped)} frozen layers"):
        batch = {name: tensor.to(device) for name, tensor in table.collate(part).items()}
        hidden = _below(model, shortcut, batch, precision)
        real = batch["attention_mask"].bool()
        values = hidden.to(STORED[precision][0])[real].cpu()
        places = table.offsets[part][:, None] + np.arange(real.shape[1])
        below[places[real.cpu().numpy()]] = (
            values.view(torch.int16) if precision == "bf16" else values
        ).numpy()


def _below(
    model: Classifier, shortcut: Shortcut, batch: dict[str, Tensor], precision: str
) -> Tensor:
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, precision == "bf16"):
        found = shortcut.below(lambda: model.represent(batch))
    assert found is not None, "`learn` has seen it"
    return found


def _key(table: TokenTable, model: Classifier, shortcut: Shortcut, precision: str) -> str:
    """By the tokens and the very weights that they go through: no label and no head is in it."""
    encoder = model.encoder
    above: set[Any] = {p for p in encoder.parameters() if p.requires_grad}
    above.update(shortcut.entry.parameters())
    facts = f"{FORMAT_VERSION} {type(encoder).__name__} {len(shortcut.skipped)} {precision}"
    # Sizes and switches that no weight shows, such as the number of heads.
    config = getattr(encoder.config, "to_json_string", str)()
    digest = hashlib.blake2b(f"{facts} {config}".encode(), digest_size=16)

    def add(name: str, array: npt.NDArray[Any]) -> None:
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)

    for name, parameter in encoder.named_parameters():
        if parameter not in above:
            add(name, parameter.detach().cpu().numpy())
    for name, column in {**table.columns, "offsets": table.offsets}.items():
        add(name, column)
    return digest.hexdigest()


@contextmanager
def _mapped(path: Path, shape: tuple[int, int], kind: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    """A new file as an array to fill. All of it is asked for beforehand: a disk that is full is an
    error then, and not the end of the process at some write."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE)
    with os.fdopen(descriptor, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, shape[0] * shape[1] * kind.itemsize)
        mapped = np.memmap(file, kind, "r+", shape=shape)
        yield mapped
        mapped.flush()


def _make_room(folder: Path, size: int, limit_gb: float) -> None:
    """Delete what was left half-made, and then what was not used for longest, down to the limit.

    Who has a file open keeps it until he is done.
    """
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    entries = sorted(folder.glob("*.bin"), key=lambda entry: entry.stat().st_mtime)
    total = size + sum(entry.stat().st_size for entry in entries)
    while entries and total > limit_gb * 1e9:
        oldest = entries.pop(0)
        total -= oldest.stat().st_size
        oldest.unlink(missing_ok=True)


def _say(why: str) -> None:
    warnings.warn(
        f"the outputs of frozen layers {why}: they are computed at every step", stacklevel=4
    )
