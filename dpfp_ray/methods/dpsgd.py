"""DP-SGD (Abadi et al. 2016) with Opacus: each row's gradient clipped to norm C, the sum noised.

Where persons are drawn, it is the gradient of a person's mean loss that is clipped, as one.

Between `backward` and `finish`, `.grad` holds the plain sum of clipped gradients over parts and
workers. It gets N(0, σ²) once: in `finish`, the same on every worker, or on GPUs before the sum,
from each worker a share. `finish` divides by the public B.
A row whose loss or gradient is not finite has no clipped gradient, and adds nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dpfp_ray.methods.parts.base import Method, Rows, noise_of_minimum, steady
from dpfp_ray.plan.method_spec import SCOPES, SST2_RECORDS, Defaults, MethodSpec

if TYPE_CHECKING:
    from torch import Tensor

    from dpfp_ray.methods.parts.per_example import Clipping
    from dpfp_ray.models.classifier import Classifier
    from dpfp_ray.plan.plan import Plan

HOOKS_BYTES = 2 * 2**30  # per-example gradients in memory at once; of a GPU half of what is free


class DpSgd(Method):
    noises_sum = True

    def __init__(self, plan: Plan, model: Classifier, sigma: float, seed: int) -> None:
        from dpfp_ray.data.batches import LONGEST
        from dpfp_ray.methods.parts.ghost import freeze_unsplittable, splits_packed
        from dpfp_ray.models.representations import HeadClassifier

        if not isinstance(model, HeadClassifier):  # one linear layer on given rows always splits
            freeze_unsplittable(model)
        super().__init__(plan, model, sigma, seed)
        # Of longer rows the gradient itself is cheaper than the ghost's products of tokens.
        worth_it = plan.clipping == "hooks" or plan.max_length <= LONGEST
        self.takes_packed = worth_it and splits_packed(model)
        self.gpu_takes_packed = plan.clipping == "ghost"
        self.clipping: Clipping | None = None

    @property
    def noise_coordinates(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def max_rows(self) -> int:
        import torch

        rows = super().max_rows
        if self.plan.clipping == "hooks":
            row = 4 * self.noise_coordinates
            most = HOOKS_BYTES // row
            if self.device.type == "cuda":
                most = max(most, steady(torch.cuda.mem_get_info(self.device)[0] // (2 * row)))
            rows = min(rows, most)
        return max(1, rows)

    def begin(self, step: int, total_rows: int) -> None:
        from dpfp_ray.methods.parts.ghost import GhostClipping
        from dpfp_ray.methods.parts.per_example import HooksClipping

        kind = {"ghost": GhostClipping, "hooks": HooksClipping}[self.plan.clipping]
        self.clipping = kind(self.model)

    def backward(self, rows: Rows) -> Tensor:
        import torch

        assert self.clipping is not None, "backward is called between begin and finish"
        while len(rows.labels):
            with self.clipping.packed(rows.packed_row, len(rows.labels)):
                h = self.represent(rows.inputs)
            losses = rows.losses(self.model.head(h))
            finite = self.clipping.add_clipped(
                losses, self.plan.C, self.plan.clip_style, rows.example
            )
            if finite.all():
                return losses.detach().sum()
            # Nothing was added: once more, without those that have none.
            rows = rows.padded() if rows.packed_row is not None else rows.only(finite)
        return torch.zeros((), device=self.device)

    def finish(self, step: int) -> None:
        import torch

        from dpfp_ray.methods.parts.per_example import gradient
        from dpfp_ray.privacy.sampling import add_noise

        if self.clipping is not None:
            self.clipping.remove()
            self.clipping = None
        gradients = [gradient(parameter) for parameter in self.parameters]
        if not self.noised:
            add_noise(gradients, self.sigma, self.seed, step)
        self.noised = False
        torch._foreach_div_(gradients, self.plan.B)


def noise_to_signal(plan: Plan, noise_multiplier: float, width: int, classes: int) -> float:
    """T noisy sums over a share p of the records each are about one of noise σ/(p √T)."""
    return noise_of_minimum(noise_multiplier / (plan.p * math.sqrt(plan.steps)), width, plan.D)


SPEC = MethodSpec(
    method="dpsgd",
    label="DP-SGD",
    order=1,
    noise_generator="AES in counter mode, on a GPU ChaCha20",
    guarantee="proved",
    adjacencies=("add_remove",),
    steps=DpSgd,
    scopes=SCOPES,
    uses=(
        *("clipping", "clip_style", "start", "label_words", "sampling"),
        "gradient_checkpointing",
    ),
    noise_to_signal=noise_to_signal,
    bounds_persons=True,
    # Li et al. 2022: lxuechen/private-transformers, examples/classification/run_wrapper.py. It
    # multiplies both B = 1000 and 3 epochs by 2 (QNLI) and 6 (QQP, MNLI) to keep sampling rates.
    defaults=Defaults(
        batch_size=1000,
        scales_batch=True,
        clip=0.1,
        learning_rate=5e-4,
        epochs=3,
        scales_epochs=True,
    ),
    # top:K has no paper of its own and starts from the same.
    scope_changes={
        # Measured with MiniLM on SST-2 and the demo (benchmarks/frozen.md). A step on a frozen
        # encoder costs next to nothing, so it affords few steps on a quarter of the records each,
        # which is where its noise is least.
        "head": {
            "learning_rate": 5e-2,
            "clip": 1.0,
            "batch_size": SST2_RECORDS // 4,
            "epochs": 20,
            "scales_epochs": False,
        },
        # Bu et al. 2022: awslabs/fast-differential-privacy, examples/text_classification/
        # run_wrapper.py; all else there is as in Li et al.
        "bias": {"learning_rate": 5e-3},
        # Yu et al. 2022: huseyinatahaninan/Differentially-Private-Fine-tuning-of-Language-Models,
        # bert_lora/README.md. Its 50 epochs are 20 here, for their cost, and its C = 10 is
        # not used: C stays that of the other scopes, which is our choice and was not tuned.
        "lora": {"learning_rate": 1e-3, "batch_size": 2000, "epochs": 20, "scales_epochs": False},
    },
    token_score="row_releases",  # every row gets noise; the guarantee covers all noisy gradients
)
