"""Does every weight that should train also learn? Asked before the first step and in the first few.

A part of an encoder that gets no gradient, or that the optimizer does not know, shows nowhere else:
the run would end with a score that is only a little lower.
"""

import torch
from torch.nn import functional

from dpfp_ray.methods.parts.base import Method, Rows
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.scopes import woken
from dpfp_ray.plan.errors import UserError

PROBE_ROWS = 8  # dev rows that show whether all weights learn
LEAST_RATE = 1e-6  # AdamW moves a weight by about the rate: much below, rounding undoes it
PATIENCE = 3  # steps until every weight must have moved; LoRA's A waits for B, which starts at zero


class Still:
    """Weights that should train and have not moved yet; after `PATIENCE` steps there may be none.

    A wrapper that trains copies, or an optimizer without some weights, shows nowhere else
    (opacus#820). Weights are looked at after the noise is in, so this tells no more than they do.
    """

    def __init__(self, model: Classifier) -> None:
        self.model, self.steps = model, 0
        self.start = {name: p.detach().clone() for name, p in trainable_parameters(model)}

    def all_moved(self) -> bool:
        """To be asked after each step that had rows."""
        self.steps += 1
        now = dict(self.model.named_parameters())
        self.start = {n: value for n, value in self.start.items() if torch.equal(now[n], value)}
        if self.start and self.steps == PATIENCE:
            names = list(self.start)
            raise UserError(
                f"{len(names)} trainable tensors have not moved in {PATIENCE} steps: "
                f"{', '.join(names[:5])}{' …' if len(names) > 5 else ''}; "
                f"use another model or scope head"
            )
        return not self.start


def check_all_learn(method: Method, probe: Rows) -> None:
    """Refuse to train when weights that should learn get nothing from the rows of `probe`.

    Those are of dev, which is public: whether a run starts must not tell of private rows.
    """
    model = method.model
    was_training = model.training
    model.eval()  # no dropout
    with woken(model):  # a matrix that starts at zero (LoRA's B) hides the ones below it
        logits = model.head(method.represent(probe.inputs))
        functional.cross_entropy(logits, probe.labels).backward()
    stuck = [name for name, p in trainable_parameters(model) if p.grad is None or not p.grad.any()]
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    if stuck:
        raise UserError(
            f"{len(stuck)} trainable tensors got no gradient from the first rows and would never "
            f"train: {', '.join(stuck[:5])}{' …' if len(stuck) > 5 else ''}; "
            f"use another model or scope head"
        )
