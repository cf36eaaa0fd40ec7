"""DP-FP, mode `paper`: Algorithm 1 of Du & Mi with all M micro-batches in one fused pass.

Every sampled row's representation is clipped to norm C and gets its own N(0, σ² I_k) before the
linear head; the rest is ordinary training. The gradient is a sum over rows, so one pass over the
rows of all M micro-batches gives what M accumulated passes would, at the cost of plain SGD.

The ε of this mode is nominal. Post-processing covers what is computed from the noisy rows; the
encoder's update, however, uses the raw records too (its Jacobian is taken at x), and a list of
noisy rows shows who is in it, which the amplification by sampling assumes hidden.
"""

import torch
from torch import Tensor

from dpfp_ray.methods.parts.base import Method, Rows
from dpfp_ray.privacy.sampling import keyed_generator


class DpFp(Method):
    @property
    def noise_coordinates(self) -> int:
        """k, the representation's width: a release is one noisy row."""
        return self.model.width

    def begin(self, step: int, total_rows: int) -> None:
        # All rows' noise is drawn on every worker, so that it does not depend on who has which row.
        rng = keyed_generator(self.seed, "noise", step)
        noise = rng.standard_normal((total_rows, self.model.width), dtype="float32")
        self.noise = torch.from_numpy(noise).mul_(self.sigma)

    def backward(self, rows: Rows) -> Tensor:
        noise = self.noise[torch.from_numpy(rows.positions)].to(self.device, non_blocking=True)
        released = clip_rows(self.represent(rows.inputs), self.plan.C) + noise
        loss = self.loss(self.model.head(released), rows.labels)
        loss.backward()
        return loss.detach() * self.plan.B


def clip_rows(h: Tensor, C: float) -> Tensor:
    """Clip(h) = h min(1, C/‖h‖₂), row by row; a zero row stays zero."""
    norms = torch.linalg.vector_norm(h, dim=1, keepdim=True)
    return h * (C / norms.clamp(min=C))


METHOD = DpFp
