"""`representation: auto`: what suits the encoder, the task and the noise.

Decided from public facts alone: the encoder's shape, D, K, whether records are pairs, and the σ
that the budget asks for. No record is looked at, so the choice costs no privacy.
"""

from dataclasses import dataclass

from dpfp_ray.models.own_encoder import OwnEncoder
from dpfp_ray.models.pretrained import resolve_representation, width_of_layers
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.calibration import noise_multiplier


@dataclass(frozen=True)
class TaskFacts:
    """What is public of a task before anything is encoded."""

    records: int
    classes: int
    paired: bool


def choose_representation(plan: Plan, facts: TaskFacts, own: OwnEncoder | None = None) -> str:
    """The plan's own, checked; for "auto" the one that suits."""
    wanted = plan.representation
    if wanted == "pair" and not facts.paired:
        raise UserError("representation pair needs two texts a record; give pair_column, or mean")
    if wanted == "auto" and plan.scope == "head":
        if facts.paired:
            wanted = "pair"
        elif own is None and affords_layers(plan, facts, width_of_layers(plan.model)):
            wanted = "layers"
    if own is not None:
        return own.resolve_representation(wanted)
    return resolve_representation(plan.model, wanted)


def affords_layers(plan: Plan, facts: TaskFacts, width: int) -> bool:
    """Whether noise on rows as wide as all layers together leaves them readable.

    A method that says so gives the size of its noise over that of what it hides; 1 is as much of
    the one as of the other.
    """
    if plan.spec.noise_to_signal is None:
        return False
    bound = plan.bind(records=facts.records, classes=facts.classes)
    sigma = noise_multiplier(bound)
    return plan.spec.noise_to_signal(bound, sigma, width, facts.classes) <= 1
