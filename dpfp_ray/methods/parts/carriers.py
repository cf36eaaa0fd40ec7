"""Layers trained through low-rank gradient carriers, with every row's gradients of its own.

The mathematics is in the method that uses them (`rgp`).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Linear, Module

from dpfp_ray.models.classifier import Classifier
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.device_noise import normal_numbers, step_key
from dpfp_ray.privacy.sampling import keyed_generator
from dpfp_ray.system.errors import UserError


class Carried:
    """A linear layer of the encoder whose weight is trained through its carriers."""

    def __init__(self, name: str, module: Linear, plan: Plan) -> None:
        self.name, self.module = name, module
        out, into = module.weight.shape
        self.rank = min(plan.rank, out, into)
        self.shapes = [(out, self.rank), (self.rank, into)]
        # Built on the untrained model even when a run resumes, so this is W_0.
        self.start = module.weight.detach().clone() if plan.carriers == "history" else None
        self.L = self.R = torch.empty(0)

    def target(self) -> Tensor:
        """What L and R decompose."""
        return self.module.weight if self.start is None else self.module.weight - self.start

    @torch.no_grad()
    def renew(self, rng: np.random.Generator, iterations: int) -> None:
        """L and R by the power method: the leading singular vectors as far as K iterations go."""
        target = self.target()
        (out, rank), (_, into) = self.shapes
        right = gaussian(rng, into, rank).to(target.device)
        product = target @ right
        if not product.any():  # a zero matrix has no directions of its own
            product = gaussian(rng, out, rank).to(target.device)
            self.L, self.R = orthonormal(product), orthonormal(right).T
            return
        for iteration in range(iterations):
            left = orthonormal(product if iteration == 0 else target @ right)
            right = orthonormal(target.T @ left)
        self.L, self.R = left, right.T

    def row_gradients(self, x: Tensor, g: Tensor) -> list[Tensor]:
        """Of L: Σ_t g_t (R x_t)ᵀ. Of R: Σ_t (Lᵀ g_t) x_tᵀ. Per row, never out × in."""
        x, g = (t.reshape(len(t), -1, t.shape[-1]) for t in (x, g))  # the pooler has no t
        return [g.transpose(1, 2) @ (x @ self.R.T), (g @ self.L).transpose(1, 2) @ x]

    def add_packed(
        self, x: Tensor, g: Tensor, rows: list[slice], of_L: Tensor, of_R: Tensor
    ) -> None:
        """`row_gradients` of rows that lie side by side in sequences, added to `of_L` and `of_R`.

        `rows` are their tokens (`packing.spans`). Row by row into place: to put rows of unlike
        lengths into one padded product costs more than many small ones.
        """
        x, g = x.flatten(0, 1), g.flatten(0, 1)
        small_x, small_g = x @ self.R.T, g @ self.L
        for own, left, right in zip(rows, of_L, of_R, strict=True):
            left.addmm_(g[own].T, small_x[own])
            right.addmm_(small_g[own].T, x[own])

    def assign(self, g_L: Tensor, g_R: Tensor) -> None:
        """The weight's gradient: g_L R + L g_R − L Lᵀ g_L R, as one product of rank 2r."""
        rest = g_L - self.L @ (self.L.T @ g_L)
        self.module.weight.grad = torch.cat([rest, self.L], 1) @ torch.cat([self.R, g_R])


def renew_each(layers: list[Carried], seed: int, step: int, iterations: int) -> None:
    rng = keyed_generator(seed, "carriers", step)
    for layer in layers:
        layer.renew(rng, iterations)


@torch.no_grad()
def renew_together(layers: list[Carried], seed: int, step: int, iterations: int) -> None:
    """As `renew_each`, for a GPU: layers of one shape at once, with Gaussians that are made there.

    Nothing waits for whether a matrix is zero: both carriers are computed, and one is taken.
    """
    if not layers:
        return
    groups: dict[Any, list[Carried]] = {}
    for layer in layers:
        groups.setdefault(tuple(layer.shapes), []).append(layer)
    sizes = [
        [len(group) * into * rank, len(group) * out * rank]
        for ((out, rank), (_, into)), group in groups.items()
    ]
    device = layers[0].module.weight.device
    count = sum(map(sum, sizes))
    gaussians = normal_numbers(step_key(seed, "carriers", step), 0, count, device)
    parts = gaussians.split([sum(both) for both in sizes])
    for group, both, part in zip(groups.values(), sizes, parts, strict=True):
        target = torch.stack([layer.target() for layer in group])
        start, other = (half.view(len(group), -1, group[0].rank) for half in part.split(both))
        right, product = start, target @ start
        zero = ~product.flatten(1).any(1)[:, None, None]
        for iteration in range(iterations):
            left = orthonormal(product if iteration == 0 else target @ right)
            right = orthonormal(target.mT @ left)
        left = orthonormal(other).where(zero, left)
        right = orthonormal(start).where(zero, right)
        for place, layer in enumerate(group):
            layer.L, layer.R = left[place], right[place].T


class Direct:
    """The head, whose own gradients are taken; `share` weighs them against the carriers'."""

    def __init__(self, name: str, module: Linear, share: float) -> None:
        self.name, self.module, self.share = name, module, share
        self.shapes = [tuple(module.weight.shape), tuple(module.bias.shape)]

    def row_gradients(self, x: Tensor, g: Tensor) -> list[Tensor]:
        g = g * self.share
        return [g.unsqueeze(2) * x.unsqueeze(1), g]

    def assign(self, g_weight: Tensor, g_bias: Tensor) -> None:
        self.module.weight.grad = g_weight / self.share
        self.module.bias.grad = g_bias / self.share


def tap(
    layer: Carried | Direct,
    places: tuple[slice, slice],
    gradients: Tensor,
    example: Tensor | None = None,
    rows: list[slice] | None = None,
) -> Any:
    """A forward hook that keeps the layer's input until the gradient of its output arrives.

    With `rows` the encoder's tokens are of packed rows; the head is given a row each as ever.
    """

    def forward_hook(_: Module, inputs: tuple[Tensor], output: Tensor) -> None:
        kept = [inputs[0].detach()]

        def take(g: Tensor) -> None:
            # `pop` lets go of the input now, not when the whole pass is over.
            x, g = kept.pop().float(), g.float()
            if rows is not None and isinstance(layer, Carried):
                of_L, of_R = (
                    gradients[:, place].unflatten(1, shape)
                    for place, shape in zip(places, layer.shapes, strict=True)
                )
                layer.add_packed(x, g, rows, of_L, of_R)
                return
            pieces = layer.row_gradients(x, g)
            for place, piece in zip(places, pieces, strict=True):
                if example is None:
                    gradients[:, place] += piece.flatten(1)
                else:
                    gradients[:, place].index_add_(0, example, piece.flatten(1))

        if not output.requires_grad:  # the first layers: nothing before them is trained
            output.requires_grad_()
        output.register_hook(take)

    return forward_hook


def orthonormal(matrix: Tensor) -> Tensor:
    """Gram-Schmidt's columns: the one QR with a positive diagonal, hence continuous in `matrix`.

    So workers whose arithmetic differs in the last digits cannot end up with opposite signs.
    """
    q, r = torch.linalg.qr(matrix)
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return q * signs.unsqueeze(-2)


def gaussian(rng: np.random.Generator, rows: int, columns: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal((rows, columns), dtype="float32"))


def encoder_linears(model: Classifier) -> dict[str, Linear]:
    kind = getattr(model.encoder.config, "model_type", "unknown")
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module is not model.head and module.weight.requires_grad
    }
    if not linears:
        raise UserError(
            f"rgp trains linear layers (torch.nn.Linear) and this {kind} encoder has none to train "
            "(GPT-2's are Conv1D); use another method or encoder"
        )
    for name, shapes in input_shapes(model, linears, rows=3, length=5).items():
        if wrong := [shape for shape in shapes if shape[0] != 3]:
            raise UserError(
                f"rgp cannot tell rows apart in {name}: for 3 rows of 5 tokens this {kind} encoder "
                f"gives it an input of shape {wrong[0]}; use another method or encoder"
            )
    return linears


@torch.no_grad()
def input_shapes(
    model: Classifier, modules: dict[str, Linear], *, rows: int, length: int
) -> dict[str, list[tuple[int, ...]]]:
    """What each module is given when the model reads `rows` rows of `length` tokens."""
    shapes: dict[str, list[tuple[int, ...]]] = {name: [] for name in modules}

    def note(name: str) -> Any:
        return lambda _, inputs, __: shapes[name].append(tuple(inputs[0].shape))

    handles = [module.register_forward_hook(note(name)) for name, module in modules.items()]
    was_training = model.training
    ids = torch.arange(3, 3 + length, device=next(model.parameters()).device).repeat(rows, 1)
    try:
        model.train(not model.dropout)  # dropout would use up the global random state
        model.represent({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return shapes
