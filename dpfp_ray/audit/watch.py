"""An auditor who sees every noisy gradient, as DP-SGD's guarantee allows: it covers all of them.

From the last weights alone DP-SGD shows next to nothing. Its releases say more: in each step, the
gradient of the word-embedding row that one canary has to itself is that canary's part of the
clipped sum if it was drawn, and noise in any case. Added up are the log-likelihood ratios.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dpfp_ray.audit.canaries import Canaries
from dpfp_ray.audit.scores import Floats, forward, own_tokens, row_gradients, word_embedding
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.training.loop import Reporter, State
from dpfp_ray.training.prepare import Prepared

SAMPLE = 8  # canaries whose whole gradient is computed; they differ in one token only
KEY = "canary_evidence"


class Watcher:
    """Passes everything on to `listener`, and looks at each step's noisy gradient in between.

    `evidence[i]` is the sum over steps of log(1 − p + p e^{(s x − s²/2)/σ²}), with x the release
    along canary i's own gradient, in units of C, and s the part of its norm that lies in its row.
    Gradient and s are those at the epoch's start: if they are off, the score is worse, not wrong.
    What was seen goes into every saved state, so that a resumed audit has seen it too.
    """

    def __init__(
        self,
        listener: Reporter,
        prepared: Prepared,
        model: Classifier,
        canaries: Canaries,
        state: State | None,
    ) -> None:
        self.listener, self.prepared, self.model = listener, prepared, model
        self.canaries = canaries
        self.seen = 0
        self.evidence: Floats = np.zeros(len(canaries))
        if state is None:
            self.aim()
        else:
            kept = state[KEY]
            self.seen, self.share = kept["seen"], kept["share"]
            self.evidence, self.directions = kept["evidence"].numpy(), kept["directions"]

    def step(
        self, done: int, loss: Callable[[], float | None], checkpoint: Callable[[], State]
    ) -> None:
        self.look(done)
        self.listener.step(done, loss, lambda: self.with_evidence(checkpoint()))

    def epoch(self, record: dict[str, Any], checkpoint: Callable[[], State]) -> None:
        self.look(record["step"])
        if record["step"] < self.prepared.plan.steps:
            self.aim()
        self.listener.epoch(record, lambda: self.with_evidence(checkpoint()))

    def with_evidence(self, state: State) -> State:
        kept = {"seen": self.seen, "share": self.share, "directions": self.directions}
        return {**state, KEY: {**kept, "evidence": torch.from_numpy(self.evidence.copy())}}

    def aim(self) -> None:
        """Each canary's gradient in its own row, at the weights of now."""
        gradients = row_gradients(self.model, self.canaries)
        norms = gradients.norm(dim=1, keepdim=True)
        self.directions = gradients / norms.clamp(min=1e-30)
        some = np.arange(min(SAMPLE, len(self.canaries)))
        whole = [gradient_norm(self.model, self.canaries, row) for row in some.tolist()]
        self.share = float(np.median(norms[some, 0].numpy() / np.maximum(whole, 1e-30)))

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


def gradient_norm(model: Classifier, canaries: Canaries, canary: int) -> float:
    logits, labels = forward(model, canaries.table, canaries.rows_of(canary))
    weights = [parameter for _, parameter in trainable_parameters(model)]
    loss = functional.cross_entropy(logits, labels)
    found = torch.autograd.grad(loss, weights, allow_unused=True)
    return float(sum(g.double().square().sum() for g in found if g is not None) ** 0.5)
