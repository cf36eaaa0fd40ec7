"""Ordinary fine-tuning: the yardstick. No guarantee of any kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfp_ray.methods.parts.base import Method, Rows
from dpfp_ray.plan.method_spec import SCOPES, Defaults, MethodSpec

if TYPE_CHECKING:
    from torch import Tensor


class NonPrivate(Method):
    takes_packed = True

    @property
    def noise_coordinates(self) -> int:
        return 0

    def backward(self, rows: Rows) -> Tensor:
        loss = self.loss(self.model.head(self.represent(rows.inputs)), rows)
        loss.backward()
        return loss.detach() * self.plan.B


SPEC = MethodSpec(
    method="non_private",
    label="Non-DP",
    order=0,
    guarantee="none",
    bounds_persons=True,
    adjacencies=("none",),
    steps=NonPrivate,
    # Du & Mi, section "Data and Settings". Schedule and weight decay are not stated there: linear
    # decay is the common recipe for GLUE fine-tuning, 0.01 is AdamW's own default.
    defaults=Defaults(batch_size=32, learning_rate=2e-5, epochs=5, weight_decay=0.01),
    scopes=SCOPES,
    uses=("start", "label_words", "gradient_checkpointing"),
    scope_changes={
        "head": {"learning_rate": 2e-3},  # measured: benchmarks/frozen.md
        # Bu et al. 2022: awslabs/fast-differential-privacy, examples/text_classification/
        "bias": {"learning_rate": 1e-3},
        "lora": {"learning_rate": 5e-4},  # the usual size for LoRA; not tuned here
    },
    token_score="row_movement",  # without noise a word's row moves only if its canary was drawn
)
