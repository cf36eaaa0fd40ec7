"""How much a trained model looks as if a canary had been in: one number each, higher means "in".

Which score is used follows from plan, family and access, never from how well it does. A score may
use all that the auditor knows: the records, the canaries, the initial weights; not the coins.

    loss            black box: by how much training lowered the canary's loss
    row_movement    white box: how far the word-embedding row moved that only this canary has. Exact
                    where gradients get no noise: such a row stays unless its canary was drawn
    row_releases    white box: what all noisy gradients together say of that row, for a method that
                    puts noise on every row (`Watcher`)
    alignment       white box: how far all weights moved against the canary's gradient
    a method of one release brings its own score, from the release itself (`OneRelease.score`)
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from dpfp_ray.auditing.canaries import Canaries, neighbours, select
from dpfp_ray.data import Table
from dpfp_ray.data.batches import PART_COST, split_rows
from dpfp_ray.methods.parts.one_release import Seen
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.loop import Epoch, Event, State, Step
from dpfp_ray.training.prepare import Prepared, Run

ACCESS = ("black_box", "white_box")
WATCHED = "row_releases"  # the one score that is gathered while training goes on
# A row that moved had its canary in; one that did not may have a canary that was never drawn.
IN_ONLY = ("row_movement",)
SAMPLE = 8  # canaries whose whole gradient is computed; they differ in one token only
KEY = "canary_evidence"  # of a saved state
ROWS = 128  # in memory at once, with gradients
# A step along the movement that is small for the weights and large for fp32.
PROBE_LENGTH = 0.01

Floats = npt.NDArray[np.float64]
Weights = dict[str, Tensor]


def token_score(plan: Plan) -> str | None:
    """The spec's score for word-embedding rows; on a frozen encoder there are none that train."""
    return plan.spec.token_score if plan.scope == "all" else None


def strongest_family(plan: Plan, access: str) -> str:
    """A token of its own gives a canary a weight of its own; where none trains, diverse texts."""
    return "unused_token" if access == "white_box" and token_score(plan) else "mislabelled"


def score_name(plan: Plan, family: str, access: str) -> str:
    if access == "black_box":
        return "loss"
    if plan.spec.one_release is not None:
        return plan.spec.one_release.score.__name__
    return (token_score(plan) if family == "unused_token" else None) or "alignment"


def snapshot(model: Classifier) -> Weights:
    """A copy of the weights that training may change; taken before it does."""
    return {name: p.detach().clone() for name, p in trainable_parameters(model)}


@dataclass
class Trained:
    """What the auditor has when training is over. `real` is the training set without canaries.

    `watched` is what was seen while training went on, if anybody looked; `released` is what a
    method of one release has really released.
    """

    prepared: Prepared
    real: Table
    canaries: Canaries
    initial: Weights
    model: Classifier
    watched: Floats
    released: Any = None

    @property
    def plan(self) -> Plan:
        return self.prepared.plan


def score(name: str, trained: Trained) -> Floats:
    """Scores of all canaries; leaves the model's weights as they are."""
    scorers: Mapping[str, Callable[[Trained], Floats]] = {
        "loss": loss_reduction,
        "row_movement": row_movement,
        WATCHED: lambda trained: trained.watched,
        "alignment": alignment,
    }
    trained.model.eval()
    return scorers.get(name, release_score)(trained)


def release_score(trained: Trained) -> Floats:
    """By the method's own score: the auditor sees all that it ever makes of private records."""
    plan, places = trained.plan, trained.canaries.places
    assert plan.spec.one_release is not None, "only a release has a score of its own"
    out = select(trained.real, neighbours(trained.canaries))
    others = np.setdiff1d(np.arange(len(trained.real)), places)
    seen = Seen(
        plan,
        trained.prepared.noise_multiplier,
        trained.model.classes,
        released=trained.released,
        table=cast(RepresentationTable, trained.prepared.data.train),
        places=places,
        canaries=cast(RepresentationTable, trained.canaries.table),
        absent=cast(RepresentationTable, out) if plan.adjacency == "replace_one" else None,
        others=cast(RepresentationTable, select(trained.real, others)),
    )
    return np.asarray(plan.spec.one_release.score(seen))


def loss_reduction(trained: Trained) -> Floats:
    """The initial loss tells how hard the canary is by itself; what is left is training's doing."""
    model, table = trained.model, trained.canaries.table
    after = losses(model, table)
    if trained.plan.one_release:  # the head is solved, not trained: its random start says nothing
        return by_canary(centred(-after, table.labels), table)
    with weights_of(model, trained.initial):
        return by_canary(centred(losses(model, table) - after, table.labels), table)


def row_movement(trained: Trained) -> Floats:
    """How far training moved each canary's word-embedding row, besides weight decay."""
    name, weight = word_embedding(trained.model)
    rows = own_tokens(trained.canaries)
    decayed = trained.initial[name][rows].double() * decay(trained.plan)
    return (weight.detach()[rows].double() - decayed).cpu().norm(dim=1).numpy()


def alignment(trained: Trained) -> Floats:
    """−⟨θ_T − θ_0, ∇ℓ(θ_0)⟩ for each canary's loss ℓ, as a central difference along θ_T − θ_0.

    Two forward passes for all canaries together; a gradient each would take a model's memory each.
    Unlike the loss itself it is linear in the movement, so noise does not distort it.
    """
    model, initial, table = trained.model, trained.initial, trained.canaries.table
    final = snapshot(model)
    moved = {name: weight - initial[name] for name, weight in final.items()}
    size = math.sqrt(sum(float(m.double().square().sum()) for m in moved.values()))
    if size == 0:
        return np.zeros(len(trained.canaries))
    scale = math.sqrt(sum(float(w.double().square().sum()) for w in final.values()))
    step = PROBE_LENGTH * scale / size
    sides = []
    for sign in (1, -1):
        shifted = {name: initial[name] + sign * step * moved[name] for name in moved}
        with weights_of(model, shifted):
            sides.append(losses(model, table))
    return by_canary(centred((sides[1] - sides[0]) / (2 * step), table.labels), table)


def by_canary(scores: Floats, table: Table) -> Floats:
    """A person's score is the mean over their rows, as their loss is."""
    if table.persons is None:
        return scores
    return np.bincount(table.persons, scores) / np.bincount(table.persons)


def centred(scores: Floats, labels: npt.NDArray[np.int64]) -> Floats:
    """Scores less their class's median: training moves a whole class at once, in or out."""
    medians = {label: np.median(scores[labels == label]) for label in np.unique(labels)}
    return scores - np.array([medians[label] for label in labels])


def row_gradients(model: Classifier, canaries: Canaries) -> Tensor:
    """Each canary's gradient in its own row: no other canary reaches it, so one pass gives many."""
    _, weight = word_embedding(model)
    rows = own_tokens(canaries)
    persons = canaries.table.persons
    owners = np.arange(len(canaries)) if persons is None else persons
    gradients = torch.zeros(len(canaries), weight.shape[1], dtype=torch.float64)
    for part in split_rows(canaries.table.lengths, ROWS, PART_COST[weight.device.type]):
        logits, labels = forward(model, canaries.table, part)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, [weight])
        there = np.unique(owners[part])
        gradients[there] += gradient[rows[there]].double().cpu()
    return gradients / torch.from_numpy(np.bincount(owners))[:, None]


def decay(plan: Plan) -> float:
    """What AdamW's weight decay alone leaves of a weight that never gets a gradient."""
    strength = (plan.learning_rate or 0.0) * (plan.weight_decay or 0.0)
    rates = 1 - np.arange(plan.steps) / plan.steps if plan.schedule == "linear" else 1.0
    return float(np.prod(1 - strength * np.broadcast_to(rates, plan.steps)))


def word_embedding(model: Classifier) -> tuple[str, Tensor]:
    """The name and the weight of the table that token ids are looked up in."""
    encoder: Any = model.encoder
    weight = encoder.get_input_embeddings().weight
    for name, parameter in trainable_parameters(model):
        if parameter is weight:
            return name, parameter
    raise UserError("the word embeddings are not trained; use --family mislabelled")


def own_tokens(canaries: Canaries) -> Tensor:
    assert canaries.tokens is not None, "only unused-token canaries have a row of their own"
    return torch.from_numpy(canaries.tokens)


@torch.no_grad()
def losses(model: Classifier, table: Table) -> Floats:
    device = next(model.parameters()).device
    each = np.empty(len(table))
    for part in split_rows(table.lengths, ROWS, PART_COST[device.type]):
        logits, labels = forward(model, table, part)
        loss = functional.cross_entropy(logits.double(), labels, reduction="none")
        each[part] = loss.cpu().numpy()
    return each


def forward(model: Classifier, table: Table, rows: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    device = next(model.parameters()).device
    batch = {name: tensor.to(device) for name, tensor in table.collate(rows).items()}
    labels = torch.from_numpy(np.asarray(table.labels)[rows]).to(device)
    return model(batch), labels


@contextmanager
def weights_of(model: Classifier, weights: Weights) -> Iterator[None]:
    kept = snapshot(model)
    try:
        model.load_state_dict({name: weights[name] for name in kept}, strict=False)
        yield
    finally:
        model.load_state_dict(kept, strict=False)


class Watcher:
    """An auditor who sees every noisy gradient, as DP-SGD's guarantee allows: it covers them all.

    From the last weights alone DP-SGD shows next to nothing. Its releases say more: in each step,
    the gradient of the word-embedding row that one canary has to itself is that canary's part of
    the clipped sum if it was drawn, and noise in any case. `evidence[i]` sums the log-likelihood
    ratios log(1 − p + p e^{(s x − s²/2)/σ²}) over steps, with x the release along canary i's own
    gradient, in units of C, and s the part of its norm that lies in its row. Gradient and s are
    those at the epoch's start: if they are off, the score is worse, not wrong. Every saved state
    has the evidence, so that a resumed audit has seen it too.
    """

    def __init__(self, run: Run, model: Classifier, canaries: Canaries) -> None:
        self.prepared, self.model, self.canaries = run.prepared, model, canaries
        self.seen = 0
        self.evidence: Floats = np.zeros(len(canaries))
        if run.state is None:
            self.aim()
        else:
            kept = run.state[KEY]
            self.seen, self.share = kept["seen"], kept["share"]
            self.evidence, self.directions = kept["evidence"].numpy(), kept["directions"]

    def see(self, event: Event) -> Event:
        """Look at a step's release; the event's checkpoint then has the evidence, too."""
        if not isinstance(event, Epoch | Step):
            return event
        done = event.done if isinstance(event, Step) else event.record["step"]
        self.look(done)
        if isinstance(event, Epoch) and done < self.prepared.plan.steps:
            self.aim()
        return replace(event, checkpoint=partial(self.with_evidence, event.checkpoint))

    def with_evidence(self, checkpoint: Callable[[], State]) -> State:
        kept = {"seen": self.seen, "share": self.share, "directions": self.directions}
        return {**checkpoint(), KEY: {**kept, "evidence": torch.from_numpy(self.evidence.copy())}}

    def aim(self) -> None:
        """Each canary's gradient in its own row, at the weights of now."""
        gradients = row_gradients(self.model, self.canaries)
        norms = gradients.norm(dim=1, keepdim=True)
        self.directions = gradients / norms.clamp(min=1e-30)
        weights = [parameter for _, parameter in trainable_parameters(self.model)]
        shares = []
        for canary in range(min(SAMPLE, len(self.canaries))):
            rows = self.canaries.rows_of(canary)
            loss = functional.cross_entropy(*forward(self.model, self.canaries.table, rows))
            pieces = torch.autograd.grad(loss, weights, allow_unused=True)
            whole = sum(g.double().square().sum() for g in pieces if g is not None) ** 0.5
            shares.append(float(norms[canary, 0]) / max(float(whole), 1e-30))
        self.share = float(np.median(shares))

    def look(self, done: int) -> None:
        """Once a step: an epoch's last one is announced twice."""
        if done == self.seen:
            return
        self.seen = done
        plan, sigma = self.prepared.plan, self.prepared.noise_multiplier
        _, weight = word_embedding(self.model)
        assert weight.grad is not None
        rows = weight.grad[own_tokens(self.canaries)].double().cpu() * (plan.B / plan.C)
        x = (rows * self.directions).sum(1).numpy()
        ratio = np.minimum((self.share * x - self.share**2 / 2) / sigma**2, 700.0)
        self.evidence += np.log1p(plan.p * np.expm1(ratio))
