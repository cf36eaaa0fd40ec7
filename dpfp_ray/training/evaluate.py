"""Scores and answers on dev data, without noise: as the paper evaluates, representations are not
clipped.

Heads that were solved for bounded rows (`release_once`, `moments`) get bounded rows here too.
"""

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dpfp_ray.data import Table
from dpfp_ray.data.batches import PART_COST, split_rows
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.training.dev_scores import ANSWERS, measure
from dpfp_ray.training.machine import Comm, share
from dpfp_ray.training.predictions import pack

EVAL_ROWS = 256


@torch.no_grad()
def evaluate(
    model: Classifier, table: Table, comm: Comm, precision: str = "fp32"
) -> dict[str, Any]:
    """`accuracy`, mean `loss`, the scores of `dev_scores.Metrics` and every row's answer, packed.

    Each worker takes its share of the rows; all end with the same facts.
    """
    device = next(model.parameters()).device
    rows = np.arange(len(table))[share(len(table), comm)]
    # On the device: NCCL cannot add up what lies in the CPU's memory. Others' rows stay 0.
    loss = torch.zeros((), dtype=torch.float64, device=device)
    answers = torch.zeros(len(table), dtype=torch.float64, device=device)
    probabilities = torch.zeros(len(table), model.classes, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    for part in split_rows(table.lengths[rows], EVAL_ROWS, PART_COST[device.type]):
        batch = {name: tensor.to(device) for name, tensor in table.collate(rows[part]).items()}
        labels = torch.from_numpy(np.asarray(table.labels[rows[part]])).to(device)
        with torch.autocast(device.type, torch.bfloat16, precision == "bf16"):
            h = model.represent(batch)
        logits = model.classify(h.float())  # in fp32: bf16's 8 bits would make ties of close scores
        where = torch.from_numpy(rows[part]).to(device)
        answers[where] = logits.argmax(1).double()
        probabilities[where] = logits.double().softmax(1)
        loss += functional.cross_entropy(logits, labels, reduction="sum")
    model.train(was_training)
    comm.sum_([loss, answers, probabilities])
    return {
        **scores(answers.cpu().numpy().astype(np.int64), probabilities.cpu().numpy(), table),
        "loss": loss.item() / len(table),
    }


def scores(answers: Any, probabilities: Any, table: Table) -> dict[str, Any]:
    classes = probabilities.shape[1]
    # A model that has diverged still has answers, but no probabilities.
    sound = bool(np.isfinite(probabilities).all())
    found = measure(
        answers,
        np.asarray(table.labels),
        classes=classes,
        probabilities=probabilities if sound else None,
    ).as_json()
    return {**found, "recall": list(found["recall"]), ANSWERS: pack(answers, classes)}
