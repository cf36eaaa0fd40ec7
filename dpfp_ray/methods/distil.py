"""Distillation through public text: a proved teacher labels it once, a student learns from that.

    private records → teacher (a proved head on a frozen, larger encoder)
                    → soft labels of public text → student: every weight, as long as one likes

The teacher's release is all that is made from private records. Labels and student are computed from
it and from public text, so they are post-processing (Dwork & Roth 2014, proposition 2.1), and cost
nothing more: neither more epochs nor other settings of the student (`docs/privacy.md`). Public text
must not depend on the private records; `data/public_text.py` says what is checked.
With `teacher: public` no private record is read: the control, which tells what the text alone does.
"""

from __future__ import annotations

from dpfp_ray.methods.non_private import NonPrivate
from dpfp_ray.plan.method_spec import TEACHING, Defaults, MethodSpec

SPEC = MethodSpec(
    method="distil",
    label="Distilled",
    order=8,
    compared=False,  # it needs public text, and hours where others need minutes
    guarantee="proved",
    adjacencies=("add_remove",),
    steps=NonPrivate,
    scopes=("all", "bias", "lora"),
    uses=(*TEACHING, "start", "label_words"),
    bounds_persons=True,
    # Measured with MiniLM on SST-2, 60,000 sentences: benchmarks/study.
    defaults=Defaults(batch_size=32, learning_rate=1e-4, epochs=2, weight_decay=0.01),
    released="the teacher's head, the labels that it gives to public text, and the student that is "
    "trained on them",
)
