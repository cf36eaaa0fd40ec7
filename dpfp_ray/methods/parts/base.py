"""The small interface that every method has which trains in steps.

A step of the loop is: `begin(step)`, then `backward(rows)` for each part of the step that fits in
memory, then `add_noise_share(step)`, the sum over workers, `finish(step)` and the optimizer. A
method leaves in `.grad` what the optimizer shall see: a sum over the step's rows divided by the
public B.

Here and in the methods' own files torch is imported where it is used: plans and help texts read the
specs in those files and must not wait seconds for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from dpfp_ray.models.classifier import Classifier
    from dpfp_ray.plan.plan import Plan
import math

# On a GPU tokens are counted (`token_budget`); more rows than that have no effect on its speed.
CPU_ROWS, GPU_ROWS = 256, 2**14


def steady(count: int) -> int:
    """Rounded down to three bits: a run that goes on splits its steps as before, though a few MiB
    of the GPU's free memory differ."""
    return count >> (shift := max(0, count.bit_length() - 3)) << shift


@dataclass(frozen=True)
class Rows:
    """Some rows of a step: `positions` are their places among the step's rows on all workers.

    `example[i]` is the number (0, 1, …, without gaps) of the example that row i is a part of: all
    rows of a person who was drawn are one example, and all of them are here. None: every row is
    an example of its own.
    """

    positions: NDArray[np.int64]
    inputs: dict[str, Tensor]
    labels: Tensor
    example: Tensor | None = None

    def only(self, kept: Tensor) -> Rows:
        """Those rows of which the mask `kept` says True; they are padded rows."""
        inputs = {name: tensor[kept] for name, tensor in self.inputs.items()}
        example = self.example
        if example is not None:
            example = example[kept].unique(return_inverse=True)[1]
        return Rows(self.positions[kept.cpu().numpy()], inputs, self.labels[kept], example)

    @property
    def packed_row(self) -> Tensor | None:
        """Of each token, where rows are packed (`data/batches.py`)."""
        from dpfp_ray.data.batches import ROW

        return self.inputs.get(ROW)

    def padded(self) -> Rows:
        """Unpack: a NaN row contaminates its packed neighbours (0 · NaN = NaN)."""
        from dpfp_ray.data.batches import unpacked

        return replace(self, inputs=unpacked(self.inputs))

    @property
    def sizes(self) -> Tensor | None:
        return None if self.example is None else self.example.bincount()[self.example]

    def losses(self, logits: Tensor) -> Tensor:
        """Each row's loss; that of a person is the mean of theirs, so a row has its share of it.

        The mean keeps C's meaning, as a person's gradient has the size of a record's; and whoever
        writes more does not count more.
        """
        from torch.nn import functional

        found = functional.cross_entropy(logits, self.labels, reduction="none")
        return found if self.sizes is None else found / self.sizes


class Method(ABC):
    """How one step's gradient comes about. Subclasses say what they add to plain training."""

    # Whether rows may be packed: it needs nothing of a row but h(x), or tells tokens apart by row.
    takes_packed = False
    # Whether a GPU gains by it: not where each row is a product of its own, and many launches.
    gpu_takes_packed = True
    # Whether the sum over rows and workers gets noise, and whether a GPU has already added it.
    noises_sum = False
    noised = False

    def __init__(self, plan: Plan, model: Classifier, sigma: float, seed: int) -> None:
        """`sigma` is the noise's standard deviation; `seed` is secret."""
        from dpfp_ray.models.classifier import trainable_parameters

        self.plan = plan
        self.model = model
        self.sigma = sigma
        self.seed = seed
        self.device = next(model.parameters()).device
        self.parameters = [parameter for _, parameter in trainable_parameters(model)]

    @property
    @abstractmethod
    def noise_coordinates(self) -> int:
        """How many coordinates of one release get noise."""

    @property
    def max_rows(self) -> int:
        """Most rows that `backward` is given at once; fewer where each costs a model's memory."""
        most = {"cpu": CPU_ROWS}.get(self.device.type, GPU_ROWS)
        return self.plan.max_physical_batch or most

    def begin(self, step: int, total_rows: int) -> None:  # noqa: B027 - most methods need nothing
        """Called once a step, before its rows; `total_rows` counts all workers' rows."""

    @abstractmethod
    def backward(self, rows: Rows) -> Tensor:
        """Add these rows' part of the gradient to `.grad`; return the detached sum of losses."""

    def gradients(self) -> list[Tensor]:
        """What is summed over the workers between `backward` and `finish`.

        Zero where no row reached: an empty step, or an empty share, is like any other.
        """
        import torch

        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def add_noise_share(self, step: int, worker: int = 0, workers: int = 1) -> None:
        """Called once a step, before the sum over workers: on a GPU each adds its share of noise.

        On CPUs all of them add all noise to the sum, in `finish`.
        """
        self.noised = self.noises_sum and self.device.type == "cuda"
        if self.noised:
            from dpfp_ray.privacy.device_noise import add_noise

            add_noise(self.gradients(), self.sigma, self.seed, step, worker, workers)

    def finish(self, step: int) -> None:  # noqa: B027 - most methods need nothing
        """Called once a step, when `.grad` holds the sum over all rows and workers."""

    def represent(self, inputs: dict[str, Tensor]) -> Tensor:
        """h(x) in fp32; the encoder itself may run in bf16."""
        import torch

        with torch.autocast(self.device.type, torch.bfloat16, self.plan.precision == "bf16"):
            return self.model.represent(inputs).float()

    def loss(self, logits: Tensor, rows: Rows) -> Tensor:
        """Sum of the examples' losses over the public B, never over the realised batch size."""
        from torch.nn import functional

        if rows.example is not None:
            return rows.losses(logits).sum() / self.plan.B
        return functional.cross_entropy(logits, rows.labels, reduction="sum") / self.plan.B


def make_method(plan: Plan, model: Classifier, sigma: float, seed: int) -> Method:
    assert plan.spec.steps is not None, "a method of one release does not train in steps"
    method: Method = plan.spec.steps(plan, model, sigma, seed)
    return method


# How much noise rows of a width bear, by formulas alone; `representation: auto` reads these. Rows
# are taken to have norm 1 and to be spread evenly over k directions, so the covariance Σ is I/k: no
# data are looked at. 1 is as much noise as signal in this picture: a rule, not a measured optimum.


def noise_of_minimum(sigma: float, width: int, records: int) -> float:
    """For heads that minimise a loss whose gradient has noise of deviation σ: `objpert`, DP-SGD.

    The noise b moves the minimum by H⁻¹b, with a Hessian H of about nΣ = nI/k, and so a score by
    σk/n: noise grows with the width itself.
    """
    return sigma * width / records


def noise_of_second_moment(sigma: float, share: float, width: int, records: int) -> float:
    """For heads that invert a noisy second moment: `moments`.

    Its noise has the spectral radius 2τ√k, τ = σ/√(2·share) in an entry (Wigner's semicircle law),
    where the n records' own is n/k in every direction: noise grows with the width to the power 3/2.
    """
    return 2 * sigma / math.sqrt(2 * share) * width**1.5 / records
