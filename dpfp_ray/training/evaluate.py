"""Accuracy on dev data, without noise: as the paper evaluates, representations are not clipped.

Heads that were solved for bounded rows (`release_once`, `moments`) get bounded rows here too.
"""

import numpy as np
import torch
from torch.nn import functional

from dpfp_ray.data import Table
from dpfp_ray.data.batches import PART_COST, split_rows
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.training.comm import Comm, share

EVAL_ROWS = 256


@torch.no_grad()
def evaluate(
    model: Classifier, table: Table, comm: Comm, precision: str = "fp32"
) -> dict[str, float]:
    """`accuracy` and mean `loss` over the table, each worker taking its share of the rows."""
    device = next(model.parameters()).device
    rows = np.arange(len(table))[share(len(table), comm)]
    # On the device: NCCL cannot add up what lies in the CPU's memory.
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    for part in split_rows(table.lengths[rows], EVAL_ROWS, PART_COST[device.type]):
        batch = {name: tensor.to(device) for name, tensor in table.collate(rows[part]).items()}
        labels = torch.from_numpy(np.asarray(table.labels[rows[part]])).to(device)
        with torch.autocast(device.type, torch.bfloat16, precision == "bf16"):
            h = model.represent(batch)
        logits = model.classify(h.float())  # in fp32: bf16's 8 bits would make ties of close scores
        totals[0] += (logits.argmax(1) == labels).sum()
        totals[1] += functional.cross_entropy(logits, labels, reduction="sum")
    model.train(was_training)
    comm.sum_([totals])
    return {"accuracy": totals[0].item() / len(table), "loss": totals[1].item() / len(table)}
