"""ε = 0: a head made from words for the classes, before any private record is read.

The floor of every comparison: a private method that is not above it has spent its ε for nothing.
`methods/parts/label_words.py` says how the head is made. The dev rows are scored, as always;
training rows are counted, since D is public, and never encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpfp_ray.plan.method_spec import MethodSpec, OneRelease, closed_form

if TYPE_CHECKING:
    from dpfp_ray.methods.parts.one_release import LinearHead
    from dpfp_ray.models.representations import RepresentationTable
    from dpfp_ray.plan.plan import Plan


def release(
    plan: Plan, noise_multiplier: float, table: RepresentationTable, classes: int, seed: int
) -> LinearHead:
    """θ₀; `table` has the phrases in place of records."""
    from dpfp_ray.methods.parts.label_words import head_of_words
    from dpfp_ray.methods.parts.one_release import bounded

    return head_of_words(bounded(table.h, plan), table.labels, classes)


def head(released: LinearHead) -> LinearHead:
    return released


def coordinates(width: int, classes: int) -> int:
    return 0


def no_score(seen: Any) -> Any:
    raise AssertionError("no record is read, so there is nothing to audit")


SPEC = MethodSpec(
    method="public",
    label="Without private data",
    order=1,
    guarantee="proved",
    reads_records=False,
    bounds_persons=True,
    adjacencies=("none",),
    scopes=("head",),
    one_release=OneRelease(release, coordinates, no_score, head),
    uses=("scaling", "label_words"),
    defaults=closed_form(ridge=None, shrinkage=None),
    released="a linear head made from words for the classes",
)
