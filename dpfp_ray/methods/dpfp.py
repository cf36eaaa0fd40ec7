"""DP-FP, mode `paper`: Algorithm 1 of Du & Mi with all M micro-batches in one fused pass.

Every sampled row's representation is clipped to norm C and gets its own N(0, σ² I_k) before the
linear head; the rest is ordinary training. The gradient is a sum over rows, so one pass over the
rows of all M micro-batches gives what M accumulated passes would, at the cost of plain SGD.

Where persons are drawn, a person's m rows get N(0, m σ² I_k) each: all of them together then move
by at most C/σ in units of their noise, as one row does.

The ε of this mode is nominal. Post-processing covers what is computed from the noisy rows; the
encoder's update, however, uses the raw records too (its Jacobian is taken at x), and a list of
noisy rows shows who is in it, which the amplification by sampling assumes hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfp_ray.methods.parts.base import Method, Rows
from dpfp_ray.plan.method_spec import SCOPES, Defaults, MethodSpec, Nominal

if TYPE_CHECKING:
    from torch import Tensor


class DpFp(Method):
    takes_packed = True

    @property
    def noise_coordinates(self) -> int:
        """k, the representation's width: a release is one noisy row."""
        return self.model.width

    def begin(self, step: int, total_rows: int) -> None:
        import torch

        from dpfp_ray.privacy.sampling import keyed_generator

        # All rows' noise is drawn on every worker, so that it does not depend on who has which row.
        rng = keyed_generator(self.seed, "noise", step)
        noise = rng.standard_normal((total_rows, self.model.width), dtype="float32")
        self.noise = torch.from_numpy(noise).mul_(self.sigma)

    def backward(self, rows: Rows) -> Tensor:
        import torch

        noise = self.noise[torch.from_numpy(rows.positions)].to(self.device, non_blocking=True)
        if rows.sizes is not None:  # a person's m rows are one release
            noise = noise * rows.sizes.sqrt()[:, None]
        released = self.clipped(rows) + noise
        loss = self.loss(self.model.head(released), rows)
        loss.backward()
        return loss.detach() * self.plan.B

    def clipped(self, rows: Rows) -> Tensor:
        """Clip(h) of every row; 0 where h has infinite or undefined numbers.

        Such rows take no part in the pass at all: on its way back, 0 times an undefined number in
        the encoder is undefined again, for the weights that all rows share.
        """
        h = self.represent(rows.inputs)
        finite = h.isfinite().all(1)
        if finite.all():
            return clip_rows(h, self.plan.C)
        if rows.packed_row is not None:
            return self.clipped(rows.padded())
        fine = clip_rows(self.represent(rows.only(finite).inputs), self.plan.C)
        return h.new_zeros(h.shape).index_put((finite.nonzero()[:, 0],), fine)


def clip_rows(h: Tensor, C: float) -> Tensor:
    """Clip(h) = h min(1, C/‖h‖₂), row by row; a zero row stays zero."""
    import torch

    norms = torch.linalg.vector_norm(h, dim=1, keepdim=True)
    return h * (C / norms.clamp(min=C))


RAW_TEXT = (
    "is computed from the raw text (the Jacobian of h is taken at x), not from the noisy "
    "representation alone, so post-processing does not cover it"
)
FROZEN = (
    "The encoder is frozen, so all that is learnt comes from noisy rows and public labels, and "
    "post-processing covers it."
)
DRAWS_SHOW = (
    "The accounting counts on the draw of a record being hidden, but the method releases a list of "
    "noisy rows with their labels, which in the worst case shows who was drawn."
)
TEXTS_ONLY = (
    "Sensitivity C is that of a text replaced by nothing; adding, removing or replacing a record, "
    "and its label, are not covered."
)

PART_TRAINED = Nominal(
    reasons=(
        f"A part of the encoder is trained, and its update {RAW_TEXT}.",
        DRAWS_SHOW,
        TEXTS_ONLY,
    ),
    not_proved="no ε is proved while any part of the encoder is trained",
    not_protected=("texts, from whoever sees the trained weights: see the reasons",),
)

SPEC = MethodSpec(
    method="dpfp",
    label="DP-FP",
    order=3,
    guarantee="nominal",
    adjacencies=("zero_out", "replace_one"),
    steps=DpFp,
    uses=("micro_batches", "gradient_checkpointing"),
    bounds_persons=True,
    # Du & Mi, section "Data and Settings"; schedule and weight decay as for `non_private`.
    defaults=Defaults(
        batch_size=32, micro_batches=32, learning_rate=5e-6, epochs=3, weight_decay=0.01
    ),
    scopes=SCOPES,
    scope_changes={
        "head": {"learning_rate": 1e-3},  # measured: benchmarks/frozen.md
        # A quarter of non_private's, as the paper has it for all weights.
        "bias": {"learning_rate": 2.5e-4},
        "lora": {"learning_rate": 1.25e-4},
    },
    released="the trained weights; labels enter them as they are",
    draws_hidden=False,
    labels_protected=False,
    nominal={
        "all": Nominal(
            reasons=(
                f"The encoder's update {RAW_TEXT}: a token that occurs in one record shows in the "
                "weights whatever the noise.",
                DRAWS_SHOW,
                TEXTS_ONLY,
            ),
            not_proved="no ε is proved while the encoder is trained",
            not_protected=("texts, from whoever sees the trained encoder: see the reasons",),
        ),
        "head": Nominal(
            reasons=(DRAWS_SHOW, TEXTS_ONLY),
            proved=f"{FROZEN} Without amplification: who is drawn N times pays √N C/σ in GDP, "
            "averaged over N.",
        ),
        **dict.fromkeys(("bias", "lora", "top:K"), PART_TRAINED),
    },
    token_score="row_movement",  # the encoder's own gradients get no noise
)
