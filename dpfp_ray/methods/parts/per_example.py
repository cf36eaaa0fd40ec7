"""Opacus's hooks, driven by hand: from the rows' losses to the sum of their clipped gradients.

Opacus's own engine also samples, adds noise and keeps the account. Here those are keyed by (seed,
step), so only its hooks are used. They hang on the model from `begin` to `finish` of a step and not
a moment longer: evaluation, copies and saved weights see the plain model.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient, prepare_layer
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Embedding, LayerNorm, Linear, Module, functional

from dpfp_ray.data.batches import spans

AUTOMATIC_OFFSET = 0.01  # the authors' γ, the same for all of their tasks
# What Opacus leaves behind on modules; `GradSampleHooks.cleanup` clears only what is on parameters.
_LEFTOVERS = ("ft_compute_sample_grad", "max_batch_len")


class Clipping(GradSampleHooks, ABC):
    """Hooks on `model` that keep every module's input and the gradient at its output."""

    def __init__(self, model: Module) -> None:
        strip(model)
        self.roots: list[GradientEdge] = []
        self.row: Tensor | None = None
        self.count: int | None = None  # of packed rows
        self.halved: tuple[Tensor, int, Tensor] | None = None
        # Not strict: strict would only refuse buffers, which in text encoders are position numbers.
        super().__init__(model, loss_reduction="sum", strict=False)

    @abstractmethod
    def add_clipped(
        self, losses: Tensor, clip: float, style: str = "abadi", example: Tensor | None = None
    ) -> Tensor:
        """Add Σ gᵢ `clip_factors(‖gᵢ‖)` to `.grad`, where gᵢ is the gradient of `losses[i]`, or of
        the sum of the losses of all rows whose `example` is i.

        Gives a mask of the rows for which loss and ‖gᵢ‖ are finite. If some are not, nothing is
        added: no factor makes a bounded row of an undefined one.
        """

    def remove(self) -> None:
        self.cleanup()
        strip(self._module)

    @contextmanager
    def packed(self, row: Tensor | None, count: int | None = None) -> Iterator[None]:
        """For a forward pass over packed rows, `row` of each token (`data/batches.py`).

        A GPU's host need not wait for how many rows there are if `count` says it.
        """
        self.row, self.count = row, count
        try:
            yield
        finally:
            self.row = None

    @abstractmethod
    def take(
        self, module: Module, inputs: Tensor, backprops: Tensor, row: Tensor | None = None
    ) -> None:
        """One use of `module`: its input and the gradient at its output, a row per example; where
        these are tokens of packed rows, `row` of each."""

    def add_hooks(self, **_: Any) -> None:
        """A hook on each trained module's forward pass, which puts one on the tensor that it gives.

        Opacus's own hooks on the backward pass go through views that no encoder may change in
        place (Longformer does), and they want outputs that are a tensor.
        """
        self.autograd_grad_sample_hooks: list[Any] = []
        self._module.__dict__["autograd_grad_sample_hooks"] = self.autograd_grad_sample_hooks
        for module in self.iterate_submodules(self._module):
            if type(module) not in self.GRAD_SAMPLERS:
                prepare_layer(module, batch_first=True)  # takes a copy, still without a hook
            if type(module) is Linear and needs_inputs(module):
                hook = module.register_forward_pre_hook(self._halve)
                self.autograd_grad_sample_hooks.append(hook)
            self.autograd_grad_sample_hooks.append(
                module.register_forward_hook(self.capture_activations_hook)
            )

    def _halve(self, _: Module, forward_input: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """On a GPU under bf16 autocast, a linear layer's input is cast here and not in the layer.

        So what clipping keeps is what autograd keeps, in half the memory; query, key and value have
        one input, which is cast once.
        """
        value = forward_input[0]
        if not (value.is_cuda and torch.is_autocast_enabled("cuda")):
            return None
        last = self.halved
        if last is None or last[0] is not value or last[1] != value._version:
            last = self.halved = (value, value._version, value.bfloat16())
        return last[2], *forward_input[1:]

    def capture_activations_hook(
        self, module: Module, forward_input: Sequence[Any], forward_output: Any
    ) -> None:
        values = [value for value in forward_input if isinstance(value, Tensor)]
        if not (torch.is_grad_enabled() and isinstance(forward_output, Tensor) and values):
            return  # nothing to split by row, as `unsplittable` finds out
        given = values[0].detach()
        if not needs_inputs(module):
            given = given.new_empty(len(given), 0)  # only how many rows there were
        forward_output.register_hook(partial(self._arrived, module, given, self.row))
        if not any(value.requires_grad for value in values):
            # Here the graph begins: the inputs are plain data. An edge stays what it is if the
            # encoder changes the tensor in place (XLM does).
            self.roots.append(get_gradient_edge(forward_output))

    def _arrived(
        self, module: Module, inputs: Tensor, row: Tensor | None, backprops: Tensor
    ) -> None:
        # On a GPU, `product` takes bf16's exact products of what the layer itself has multiplied.
        # All else is fp32, also under bf16 autocast: a norm off by a percent is no bound.
        linear = type(module) is Linear and needs_inputs(module)
        if not (linear and inputs.is_cuda and inputs.dtype == torch.bfloat16):
            inputs, backprops = _to_fp32(inputs), _to_fp32(backprops)
        self.take(module, inputs, backprops.detach(), row)

    def run_hooks(self, losses: Tensor, beyond: Sequence[Tensor] = ()) -> None:
        """One backward pass down to the roots. It fires every hook, but never computes the weights'
        own gradients (a third of a training step), of which clipping has no use.

        `beyond` are weights that the pass shall reach too: some encoders use weights otherwise than
        by calling their module.
        """
        edges = [*self.roots, *(get_gradient_edge(weight) for weight in beyond)]
        self.halved = None
        torch.autograd.grad(losses.sum(), edges, allow_unused=True)
        self.roots.clear()


class HooksClipping(Clipping):
    """Every row's whole gradient in memory: 4 bytes a weight and row, embeddings included."""

    def __init__(self, model: Module) -> None:
        super().__init__(model)
        self.samples: dict[Tensor, Tensor] = {}
        self.example: Tensor | None = None

    def take(
        self, module: Module, inputs: Tensor, backprops: Tensor, row: Tensor | None = None
    ) -> None:
        for parameter, sample in per_example_gradients(module, inputs, backprops, row).items():
            sample = sum_by_example(sample, self.example)
            before = self.samples.get(parameter)
            # Not in place: a bias's sample may be the gradient itself, which others hold too.
            self.samples[parameter] = sample if before is None else before + sample

    def add_clipped(
        self, losses: Tensor, clip: float, style: str = "abadi", example: Tensor | None = None
    ) -> Tensor:
        self.example = example
        self.run_hooks(losses)
        lengths = [torch.linalg.vector_norm(s.flatten(1), dim=1) for s in self.samples.values()]
        norms = torch.stack(lengths).square_().sum(0).sqrt()
        finite = sum_by_example(losses.detach(), example).isfinite() & norms.isfinite()
        if not finite.all():
            self.samples.clear()
        scale = clip_factors(norms, clip, style)
        while self.samples:
            add_weighted(*self.samples.popitem(), scale)
        return finite if example is None else finite[example]


def sum_by_example(values: Tensor, example: Tensor | None) -> Tensor:
    """Rows added up that belong to one example; as they are where each is its own."""
    if example is None:
        return values
    total = values.new_zeros(int(example.max()) + 1, *values.shape[1:])
    return total.index_add_(0, example, values)


def per_example_gradients(
    module: Module, inputs: Tensor, backprops: Tensor, row: Tensor | None = None
) -> dict[Tensor, Tensor]:
    """Each row's gradient of the module's trainable weights, by Opacus's rule for its type.

    Its rule for LayerNorm wants a bias, which ModernBERT's do not have; ours does not. It has none
    for rows that lie side by side in sequences, where `row` is that of each token.
    """
    if isinstance(module, Linear) and not needs_inputs(module):
        return {module.bias: sum_tokens(backprops, row)}
    if is_norm(module):
        found = norm_gradients(module, inputs, backprops, row)
        pair = zip((module.weight, module.bias), found, strict=True)
        return {p: sample for p, sample in pair if p is not None and p.requires_grad}
    if row is not None:
        return _gradients_of_packed(module, inputs, backprops, row)
    if backprops.dtype == torch.bfloat16 and isinstance(module, Linear):
        a, g = tokens(inputs), tokens(backprops)
        samples = {module.weight: product(g.mT, a)}
        if module.bias is not None and module.bias.requires_grad:
            samples[module.bias] = g.float().sum(1)
        return samples
    sampler = GradSampleHooks.GRAD_SAMPLERS.get(type(module), ft_compute_per_sample_gradient)
    samples = sampler(module, [inputs], backprops)
    if isinstance(module, Embedding) and module.padding_idx is not None:
        # Opacus forgets what torch does: a padding token has no gradient.
        samples[module.weight][:, module.padding_idx] = 0
    return {parameter: sample for parameter, sample in samples.items() if parameter.requires_grad}


def _gradients_of_packed(
    module: Module, inputs: Tensor, backprops: Tensor, row: Tensor
) -> dict[Tensor, Tensor]:
    """Per-example gradients, each computed only from that example's tokens."""
    inputs, backprops = inputs.flatten(0, 1), backprops.flatten(0, 1)
    rows = int(row.max()) + 1
    if type(module) is Linear:
        samples = backprops.new_empty(rows, *module.weight.shape)
        for own, sample in zip(spans(row), samples, strict=True):
            torch.mm(backprops[own].T, inputs[own], out=sample)
        found: dict[Tensor, Tensor] = {module.weight: samples}
        if module.bias is not None and module.bias.requires_grad:
            found[module.bias] = sum_tokens(backprops.view(*row.shape, -1), row)
        return found
    if type(module) is Embedding:
        words, width = module.weight.shape
        samples = backprops.new_zeros(rows, words, width)
        # Padding, −1, has no gradient: what it adds to row 0 is zero.
        place = row.flatten().clamp(min=0) * words + inputs
        samples.view(-1, width).index_add_(0, place, backprops)
        if module.padding_idx is not None:
            samples[:, module.padding_idx] = 0
        return {module.weight: samples}
    raise TypeError(f"tokens of packed rows are not told apart in a {type(module).__name__}")


def product(one: Tensor, other: Tensor) -> Tensor:
    """The matrix product in fp32, also of matrices (or batches of them) in bf16.

    Two numbers of bf16 have an exact product in fp32, where tensor cores add them up. Rounded to
    bf16, as torch does unless asked, a norm would be off by 0.4%, and a sum over rows by more than
    a row's own share.
    """
    if one.dtype != torch.bfloat16:
        return one @ other
    multiply = torch.mm if one.ndim == 2 else torch.bmm
    try:
        return multiply(one, other, out_dtype=torch.float32)
    except (NotImplementedError, TypeError):  # a CPU; torch before 2.8
        return one.float() @ other.float()


def tokens(value: Tensor) -> Tensor:
    """(rows, …, width) as (rows, tokens, width)."""
    return value.reshape(value.shape[0], -1, value.shape[-1])


def needs_inputs(module: Module) -> bool:
    """Not for a linear layer's bias: its gradient is the sum of those at the layer's outputs."""
    return not (type(module) is Linear and not module.weight.requires_grad)


def is_norm(module: Module) -> TypeGuard[LayerNorm]:
    """A LayerNorm over the last dimension with weights, as all encoders have them."""
    return (
        type(module) is LayerNorm
        and module.weight is not None
        and len(module.normalized_shape) == 1
    )


def norm_gradients(
    module: LayerNorm,
    inputs: Tensor,
    backprops: Tensor,
    row: Tensor | None = None,
    count: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Each row's gradients of weight and bias, whether or not there is a bias (ModernBERT)."""
    normed = functional.layer_norm(inputs, module.normalized_shape, eps=module.eps)
    return sum_tokens(normed.mul_(backprops), row, count), sum_tokens(backprops, row, count)


def sum_tokens(value: Tensor, row: Tensor | None = None, count: int | None = None) -> Tensor:
    """Over all but the rows and the last dimension; of `count` packed rows, by each token's row."""
    if row is not None:
        count = int(row.max()) + 1 if count is None else count
        total = value.new_zeros(count, value.shape[-1])
        # Padding, −1, has no gradient: what it adds to row 0 is zero.
        return total.index_add_(0, row.clamp(min=0).flatten(), value.flatten(0, 1))
    between = tuple(range(1, value.ndim - 1))
    return value.sum(between) if between else value


def add_weighted(parameter: Tensor, samples: Tensor, weights: Tensor) -> None:
    """Add Σᵢ weightsᵢ · samplesᵢ to `.grad`, without a weighted copy of the samples."""
    gradient(parameter).view(-1).addmv_(samples.flatten(1).T, weights)


def clip_factors(norms: Tensor, clip: float, style: str = "abadi") -> Tensor:
    """What each row's gradient g is multiplied by; either way no row is longer than `clip` then.

    abadi       min(1, clip/‖g‖)
    automatic   clip/(‖g‖ + 0.01): AUTO-S of Bu et al. 2023, arXiv 2206.07136. Short gradients are
                lengthened to nearly `clip`, which Adam then cannot tell from another `clip`.
    """
    if style == "automatic":
        return clip / (norms + AUTOMATIC_OFFSET)
    return clip / norms.clamp(min=clip)


def gradient(parameter: Tensor) -> Tensor:
    """`.grad`, made of zeros if it is not there yet; contiguous, as we make it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return parameter.grad


def _to_fp32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def strip(model: Module) -> None:
    """Remove hooks from `model`, also those that a step left which was broken off."""
    for handle in model.__dict__.pop("autograd_grad_sample_hooks", ()):
        handle.remove()
    for module in model.modules():
        for name in _LEFTOVERS:
            module.__dict__.pop(name, None)
