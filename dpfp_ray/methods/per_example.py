"""Opacus's hooks, driven by hand: from the rows' losses to the sum of their clipped gradients.

Opacus's own engine also samples, adds noise and keeps the account. Here those are keyed by (seed,
step), so only its hooks are used. They hang on the model from `begin` to `finish` of a step and not
a moment longer: evaluation, copies and saved weights see the plain model.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from torch import Tensor
from torch.nn import Embedding, Module

# What Opacus leaves behind on modules; `GradSampleHooks.cleanup` clears only what is on parameters.
_LEFTOVERS = ("activations", "max_batch_len")


class Clipping(GradSampleHooks, ABC):
    """Hooks on `model` that keep every module's input and the gradient at its output."""

    def __init__(self, model: Module) -> None:
        strip(model)
        self.roots: list[Tensor] = []
        # Not strict: strict would only refuse buffers, which in text encoders are position numbers.
        super().__init__(model, loss_reduction="sum", strict=False)

    @abstractmethod
    def add_clipped(self, losses: Tensor, clip: float) -> None:
        """Add Σ gᵢ min(1, clip/‖gᵢ‖) to `.grad`, where gᵢ is the gradient of `losses[i]`."""

    def remove(self) -> None:
        self.cleanup()
        strip(self._module)

    def capture_activations_hook(
        self, module: Module, forward_input: Sequence[Any], forward_output: Any
    ) -> None:
        super().capture_activations_hook(module, forward_input, forward_output)
        self.note_root(forward_input, forward_output)

    def note_root(self, forward_input: Sequence[Any], forward_output: Any) -> None:
        """Remember where the graph begins: the outputs of modules whose inputs are plain data."""
        if isinstance(forward_output, Tensor) and forward_output.requires_grad:
            inputs = [value for value in forward_input if isinstance(value, Tensor)]
            if not any(value.requires_grad for value in inputs):
                self.roots.append(forward_output)

    def run_hooks(self, losses: Tensor) -> None:
        """One backward pass down to the roots. It fires every hook, but never computes the weights'
        own gradients (a third of a training step), of which clipping has no use."""
        with warnings.catch_warnings():
            # That a hook on an embedding has no gradient of its input to look at is no news.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            torch.autograd.grad(losses.sum(), self.roots, allow_unused=True)
        self.roots.clear()


class HooksClipping(Clipping):
    """Every row's whole gradient in memory: 4 bytes a weight and row, embeddings included."""

    def rearrange_grad_samples(self, **arguments: Any) -> tuple[list[Tensor], Tensor]:
        # Under bf16 autocast the products are taken in fp32: a norm off by a percent is no bound.
        activations, backprops = super().rearrange_grad_samples(**arguments)
        return [to_fp32(value) for value in activations], to_fp32(backprops)

    def add_clipped(self, losses: Tensor, clip: float) -> None:
        self.run_hooks(losses)
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        norms = [
            torch.linalg.vector_norm(parameter.grad_sample.flatten(1), dim=1)
            for parameter in parameters
        ]
        scale = clip_factors(torch.stack(norms).square_().sum(0), clip)
        for parameter in parameters:
            samples: Tensor = parameter.grad_sample
            gradient(parameter).view(-1).addmv_(samples.flatten(1).T, scale)
            parameter.grad_sample = None


def _embedding_grad_sample(
    layer: Embedding, activations: list[Tensor], backprops: Tensor
) -> dict[Tensor, Tensor]:
    """Opacus's, without what torch leaves out too: a padding token has no gradient."""
    samples: dict[Tensor, Tensor] = GradSampleHooks.GRAD_SAMPLERS[Embedding](
        layer, activations, backprops
    )
    if layer.padding_idx is not None:
        for sample in samples.values():
            sample[:, layer.padding_idx] = 0
    return samples


HooksClipping.GRAD_SAMPLERS = {
    **GradSampleHooks.GRAD_SAMPLERS,
    Embedding: _embedding_grad_sample,
}


def clip_factors(squared_norms: Tensor, clip: float) -> Tensor:
    """min(1, clip/‖g‖) for each row."""
    return clip / squared_norms.sqrt().clamp(min=clip)


def gradient(parameter: Tensor) -> Tensor:
    """`.grad`, made of zeros if it is not there yet; contiguous, as we make it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return parameter.grad


def to_fp32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def strip(model: Module) -> None:
    """Remove hooks from `model`, also those that a step left which was broken off."""
    for handle in model.__dict__.pop("autograd_grad_sample_hooks", ()):
        handle.remove()
    for module in model.modules():
        for name in _LEFTOVERS:
            module.__dict__.pop(name, None)
