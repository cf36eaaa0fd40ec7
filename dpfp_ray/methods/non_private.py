"""Ordinary fine-tuning: the yardstick. No guarantee of any kind."""

from torch import Tensor

from dpfp_ray.methods.parts.base import Method, Rows


class NonPrivate(Method):
    @property
    def noise_coordinates(self) -> int:
        return 0

    def backward(self, rows: Rows) -> Tensor:
        loss = self.loss(self.model.head(self.represent(rows.inputs)), rows.labels)
        loss.backward()
        return loss.detach() * self.plan.B


METHOD = NonPrivate
