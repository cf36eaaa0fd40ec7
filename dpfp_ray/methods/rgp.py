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
  joint clip, to leave room for the carriers. Followed (`HEAD_SHARE`); we multiply it back
  after the noise, which Adam cannot tell from the original and other optimizers need.
- Carriers are renewed once a step by one power iteration on W itself from a Gaussian start:
  `carriers: weight`. The paper's text decomposes the update's history W_t − W_0 instead:
  `carriers: history`; while that is zero, the carriers are random.
- Its `_assign_full_grad` *adds* L Lᵀ g_L R. The paper's projection subtracts it (else the part of
  the gradient in both subspaces counts three times). We follow the paper.
- It divides by a fixed batch size and drops short batches; here Poisson sampling and the public B.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dpfp_ray.methods.parts.base import Method, Rows
from dpfp_ray.plan.method_spec import Defaults, MethodSpec
from dpfp_ray.system.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from dpfp_ray.methods.parts.carriers import Carried, Direct
    from dpfp_ray.models.classifier import Classifier
    from dpfp_ray.plan.plan import Plan

HEAD_SHARE = 0.1  # the authors' constant, the same for all of their tasks
# Numbers in the gradients of all rows of one pass: half a GB, 50 rows of BERT-base at rank 16.
ROWS_MEMORY = 2**27


class Rgp(Method):
    """`scope: head` leaves no layer to carry: it is DP-SGD on the head (the code's linear_eval)."""

    noises_sum = True
    gpu_takes_packed = False

    def __init__(self, plan: Plan, model: Classifier, sigma: float, seed: int) -> None:
        from dpfp_ray.methods.parts.carriers import Carried, Direct, encoder_linears
        from dpfp_ray.methods.parts.ghost import splits_packed, unsplittable

        linears = {} if plan.scope == "head" else encoder_linears(model)
        self.carried = [Carried(name, module, plan) for name, module in linears.items()]
        head = Direct("head", model.head, HEAD_SHARE if self.carried else 1.0)
        self.layers: list[Carried | Direct] = [*self.carried, head]
        weights = [*model.head.parameters(), *(module.weight for module in linears.values())]
        trained = {id(weight) for weight in weights}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)
        super().__init__(plan, model, sigma, seed)
        # Probe with full weight gradients; token alignment is the same for carriers.
        if self.carried and (names := unsplittable(model)):
            raise UserError(
                f"rgp cannot tell rows apart in {names[0]}; use another method or encoder"
            )
        self.takes_packed = splits_packed(model)
        sizes = [math.prod(shape) for layer in self.layers for shape in layer.shapes]
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
        return max(1, min(super().max_rows, ROWS_MEMORY // self.coordinates))

    def begin(self, step: int, total_rows: int) -> None:
        import torch

        from dpfp_ray.methods.parts import carriers

        # The same on every worker and after a resume: a function of weights, key and step.
        on_gpu = self.device.type == "cuda"
        renew = carriers.renew_together if on_gpu else carriers.renew_each
        renew(self.carried, self.seed, step, self.plan.power_iterations)
        self.sums = torch.zeros(self.coordinates, device=self.device)

    def backward(self, rows: Rows) -> Tensor:
        import torch

        from dpfp_ray.methods.parts.per_example import clip_factors, sum_by_example

        if len(rows.labels) == 0:
            return torch.zeros((), device=self.device)
        examples = len(rows.labels) if rows.example is None else int(rows.example.max()) + 1
        gradients = torch.zeros(examples, self.coordinates, device=self.device)
        with self.tapped(gradients, rows):
            logits = self.model.head(self.represent(rows.inputs))
            # A sum of the rows' own losses: what reaches a row's outputs is that row's gradient.
            losses = rows.losses(logits)
            losses.sum().backward()
        losses = sum_by_example(losses.detach(), rows.example)
        norms = torch.linalg.vector_norm(gradients, dim=1)
        finite = losses.isfinite() & norms.isfinite()
        if rows.packed_row is not None and not finite.all():
            return self.backward(rows.padded())
        gradients[~finite] = 0  # no factor makes a bounded row of an undefined one
        factors = clip_factors(norms, self.plan.C, self.plan.clip_style).where(finite, 0.0)
        self.sums += factors @ gradients
        return losses.where(finite, 0.0).sum()

    def gradients(self) -> list[Tensor]:
        return [self.sums]

    def finish(self, step: int) -> None:
        from dpfp_ray.privacy.sampling import add_noise

        if not self.noised:
            add_noise([self.sums], self.sigma, self.seed, step)
        self.noised = False
        self.sums /= self.plan.B
        for layer, places in zip(self.layers, self.places, strict=True):
            first, second = (
                self.sums[place].view(shape)
                for place, shape in zip(places, layer.shapes, strict=True)
            )
            layer.assign(first, second)

    @contextmanager
    def tapped(self, gradients: Tensor, rows: Rows) -> Iterator[None]:
        """In here a backward pass adds every row's gradients to `gradients`, and no others arise.

        Where rows are parts of examples, to the row of `gradients` that is their example's.

        Weights ask for no gradient meanwhile, so autograd computes none of their size; outputs ask
        for one instead. A layer used several times (ALBERT) adds up its uses.
        """
        from dpfp_ray.data.batches import spans
        from dpfp_ray.methods.parts.carriers import tap

        tokens = None if rows.packed_row is None else spans(rows.packed_row)
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        handles = [
            layer.module.register_forward_hook(tap(layer, places, gradients, rows.example, tokens))
            for layer, places in zip(self.layers, self.places, strict=True)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter in self.parameters:
                parameter.requires_grad_(True)


SPEC = MethodSpec(
    method="rgp",
    label="RGP",
    order=2,
    noise_generator="AES in counter mode, on a GPU ChaCha20",
    guarantee="proved",
    adjacencies=("add_remove",),
    steps=Rgp,
    uses=("rank", "power_iterations", "carriers", "clip_style", "sampling"),
    bounds_persons=True,
    # Yu et al. 2021: dayu11/Differentially-Private-Deep-Learning, language/. SST-2: B = 2000,
    # 30 epochs, lr 1e-4 to 3e-4, clip 1. Only the batch is scaled there (MNLI 14000, 30 epochs).
    defaults=Defaults(
        batch_size=2000, scales_batch=True, learning_rate=3e-4, epochs=30, schedule="constant"
    ),
    scope_changes={"head": {"learning_rate": 1e-2}},  # measured: benchmarks/frozen.md
)
