"""An encoder that starts in the middle: what its first layers gave before is put in their place."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

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
