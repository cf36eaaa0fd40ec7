"""The small interface that every method has which trains in steps.

A step of the loop is: `begin(step)`, then `backward(rows)` for each part of the step that fits in
memory, then the sum over workers, then `finish(step)`, then the optimizer. A method leaves in
`.grad` what the optimizer shall see: a sum over the step's rows divided by the public B.

Here and in the methods' own files torch is imported where it is used: plans and help texts read the
specs in those files and must not wait seconds for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from dpfp_ray.models.classifier import Classifier
    from dpfp_ray.plan.plan import Plan


@dataclass(frozen=True)
class Rows:
    """Some rows of a step: `positions` are their places among the step's rows on all workers."""

    positions: NDArray[np.int64]
    inputs: dict[str, Tensor]
    labels: Tensor


class Method(ABC):
    """How one step's gradient comes about. Subclasses say what they add to plain training."""

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
        return self.plan.max_physical_batch

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

    def stuck(self) -> list[str]:
        """Weights that should learn but got nothing from a step's rows; asked before `finish`."""
        from dpfp_ray.models.classifier import trainable_parameters
        from dpfp_ray.models.scopes import resting

        excused = resting(self.model)
        return [
            name
            for name, parameter in trainable_parameters(self.model)
            if name not in excused and (parameter.grad is None or not parameter.grad.any())
        ]

    def finish(self, step: int) -> None:  # noqa: B027 - most methods need nothing
        """Called once a step, when `.grad` holds the sum over all rows and workers."""

    def represent(self, inputs: dict[str, Tensor]) -> Tensor:
        """h(x) in fp32; the encoder itself may run in bf16."""
        import torch

        with torch.autocast(self.device.type, torch.bfloat16, self.plan.precision == "bf16"):
            return self.model.represent(inputs).float()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Sum of the rows' losses over the public B, never over the realised batch size."""
        from torch.nn import functional

        return functional.cross_entropy(logits, labels, reduction="sum") / self.plan.B


def make_method(plan: Plan, model: Classifier, sigma: float, seed: int) -> Method:
    """What trains by `plan`, with the class that its spec names."""
    assert plan.spec.steps is not None, "a method of one release does not train in steps"
    method: Method = plan.spec.steps(plan, model, sigma, seed)
    return method
