"""RGP, reparametrised gradient perturbation: Yu, Zhang, Chen, Yin and Liu, "Large Scale Private
Learning via Low-rank Reparametrization" (ICML 2021).

Each linear weight W (out × in) of the encoder is seen as L R + (W − L R) with the last part held
constant: L (out × r) has orthonormal columns, R (r × in) orthonormal rows. The output is the same,
but a row's gradients are taken of the small *gradient carriers* L and R only. They are clipped
together over all layers, summed, noised, and put together to a gradient of W,

    g_L R + L g_R − L Lᵀ g_L R = G − (I − L Lᵀ) G (I − Rᵀ R)    (G: the full gradient, no noise),

which is G itself once r reaches min(out, in). The carriers come from earlier, already noised
weights and a key, never from the step's rows; so the release is DP-SGD's Gaussian sum of rows of
norm at most C, in fewer coordinates.

What the authors' code does (dayu11/Differentially-Private-Deep-Learning, language/bert/bert_code:
fairseq/lrk_utils.py, trainer.py, modules/) and what we do:
- Only weights of linear layers and the classification head are trained; embeddings, LayerNorm and
  the encoder's biases stay fixed. Followed. Query, key and value, one matrix of 3h × h there, are
  three here with carriers of their own, because transformers keeps them apart.
- The head has no carriers, being of low rank already. Its gradient is divided by 10 before the
  joint clip, lest it leave no room for the carriers. Followed (`HEAD_SHARE`); we multiply it back
  after the noise, which Adam cannot tell from the original and other optimizers need.
- Carriers are renewed once a step by one power iteration on W itself from a Gaussian start:
  `carriers: weight`. The paper's text decomposes the update's history W_t − W_0 instead:
  `carriers: history`; while that is zero, the carriers are random.
- Its `_assign_full_grad` *adds* L Lᵀ g_L R. The paper's projection subtracts it (else the part of
  the gradient in both subspaces counts three times). We follow the paper.
- It divides by a fixed batch size and drops short batches; here Poisson sampling and the public B.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Linear, Module, functional

from dpfp_ray.methods.parts.base import Method, Rows
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.noise import add_noise
from dpfp_ray.privacy.sampling import keyed_generator

HEAD_SHARE = 0.1  # the authors' constant, the same for all of their tasks
# Numbers in the gradients of all rows of one pass: half a GB, 50 rows of BERT-base at rank 16.
ROWS_MEMORY = 2**27


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

    @torch.no_grad()
    def renew(self, rng: np.random.Generator, iterations: int) -> None:
        """L and R by the power method: the leading singular vectors as far as K iterations go."""
        target = self.module.weight if self.start is None else self.module.weight - self.start
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

    def assign(self, g_L: Tensor, g_R: Tensor) -> None:
        """The weight's gradient: g_L R + L g_R − L Lᵀ g_L R, as one product of rank 2r."""
        rest = g_L - self.L @ (self.L.T @ g_L)
        self.module.weight.grad = torch.cat([rest, self.L], 1) @ torch.cat([self.R, g_R])


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


class Rgp(Method):
    """`scope: head` leaves no layer to carry: it is DP-SGD on the head (the code's linear_eval)."""

    def __init__(self, plan: Plan, model: Classifier, sigma: float, seed: int) -> None:
        linears = {} if plan.scope == "head" else encoder_linears(model)
        self.carried = [Carried(name, module, plan) for name, module in linears.items()]
        head = Direct("head", model.head, HEAD_SHARE if self.carried else 1.0)
        self.layers: list[Carried | Direct] = [*self.carried, head]
        weights = [*model.head.parameters(), *(module.weight for module in linears.values())]
        trained = {id(weight) for weight in weights}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)
        super().__init__(plan, model, sigma, seed)
        sizes = [int(np.prod(shape)) for layer in self.layers for shape in layer.shapes]
        ends = list(itertools.accumulate(sizes))
        places = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        # Layer i's two gradients have places 2i and 2i + 1 among a row's coordinates.
        self.places = list(zip(places[::2], places[1::2], strict=True))
        self.coordinates = ends[-1]

    @property
    def noise_coordinates(self) -> int:
        """Σ r (out + in) over the encoder's linear layers, and the head's weights."""
        return self.coordinates

    @property
    def max_rows(self) -> int:
        return max(1, min(self.plan.max_physical_batch, ROWS_MEMORY // self.coordinates))

    def begin(self, step: int, total_rows: int) -> None:
        # The same on every worker and after a resume: a function of weights, key and step.
        rng = keyed_generator(self.seed, "carriers", step)
        for layer in self.carried:
            layer.renew(rng, self.plan.power_iterations)
        self.sums = torch.zeros(self.coordinates, device=self.device)

    def backward(self, rows: Rows) -> Tensor:
        if len(rows.labels) == 0:
            return torch.zeros((), device=self.device)
        gradients = torch.zeros(len(rows.labels), self.coordinates, device=self.device)
        with self.tapped(gradients):
            logits = self.model.head(self.represent(rows.inputs))
            # A sum of the rows' own losses: what reaches a row's outputs is that row's gradient.
            loss = functional.cross_entropy(logits, rows.labels, reduction="sum")
            loss.backward()
        norms = torch.linalg.vector_norm(gradients, dim=1)
        self.sums += (self.plan.C / norms.clamp(min=self.plan.C)) @ gradients
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        return [self.sums]

    def stuck(self) -> list[str]:
        return [
            layer.name
            for layer, places in zip(self.layers, self.places, strict=True)
            if not any(self.sums[place].any() for place in places)
        ]

    def finish(self, step: int) -> None:
        add_noise([self.sums], self.sigma, self.seed, step)
        self.sums /= self.plan.B
        for layer, places in zip(self.layers, self.places, strict=True):
            first, second = (
                self.sums[place].view(shape)
                for place, shape in zip(places, layer.shapes, strict=True)
            )
            layer.assign(first, second)

    @contextmanager
    def tapped(self, gradients: Tensor) -> Iterator[None]:
        """In here a backward pass adds every row's gradients to `gradients`, and no others arise.

        Weights ask for no gradient meanwhile, so autograd computes none of their size; outputs ask
        for one instead. A layer used several times (ALBERT) adds up its uses.
        """
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        handles = [
            layer.module.register_forward_hook(tap(layer, places, gradients))
            for layer, places in zip(self.layers, self.places, strict=True)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter in self.parameters:
                parameter.requires_grad_(True)


def tap(layer: Carried | Direct, places: tuple[slice, slice], gradients: Tensor) -> Any:
    """A forward hook that keeps the layer's input until the gradient of its output arrives."""

    def forward_hook(_: Module, inputs: tuple[Tensor], output: Tensor) -> None:
        kept = [inputs[0].detach()]

        def take(g: Tensor) -> None:
            # `pop` lets go of the input now, not when the whole pass is over.
            pieces = layer.row_gradients(kept.pop().float(), g.float())
            for place, piece in zip(places, pieces, strict=True):
                gradients[:, place] += piece.flatten(1)

        if not output.requires_grad:  # the first layers: nothing before them is trained
            output.requires_grad_()
        output.register_hook(take)

    return forward_hook


def orthonormal(matrix: Tensor) -> Tensor:
    """Gram-Schmidt's columns: the one QR with a positive diagonal, hence continuous in `matrix`.

    So workers whose arithmetic differs in the last digits cannot end up with opposite signs.
    """
    q, r = torch.linalg.qr(matrix)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def gaussian(rng: np.random.Generator, rows: int, columns: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal((rows, columns), dtype="float32"))


def encoder_linears(model: Classifier) -> dict[str, Linear]:
    """The encoder's trainable linear layers; refused where rows cannot be told apart in them."""
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
    training = model.training
    ids = torch.arange(3, 3 + length, device=next(model.parameters()).device).repeat(rows, 1)
    try:
        model.eval()  # dropout would use up the global random state
        model.represent({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return shapes


METHOD = Rgp
