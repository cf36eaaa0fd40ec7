"""A student on public text, labelled by a teacher whose head is the one private release.

The teacher is a run of `Plan.private_part`, the student one of `Plan.trained_part`: both are what
they would be alone, and the first is all that reads private records.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from dpfp_ray.models.classifier import Classifier
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.training.loop import Drawing, Released, Training, make_release, train_steps
from dpfp_ray.training.machine import Comm
from dpfp_ray.training.prepare import Data, Prepared, Run, build_model

ROWS = 4096  # labelled at once


def distil(run: Run, student: Classifier, data: Data, comm: Comm) -> Training:
    """Release, label, and train `student` in place. A resumed run makes the same release again."""
    prepared, inputs = run.prepared, run.prepared.inputs
    assert inputs.public is not None, "these inputs were loaded for another plan"
    private = Prepared(run.plan.private_part, inputs, prepared.noise_multiplier)
    teacher = build_model(private, run.seed, next(student.parameters()).device)
    teaching = Run(private, run.seed, seed_known=run.seed_known)
    for event in make_release(teaching, teacher, Data(data.train, {}), comm):
        # Its epoch and step are no events of the student's run.
        if isinstance(event, Drawing | Released):
            yield event
    labels = np.concatenate(list(answers(teacher, inputs.public.rows)))
    lesson = replace(inputs.public.tokens, labels=labels)
    return (yield from train_steps(run, student, Data(lesson, data.dev), comm))


@torch.no_grad()
def answers(teacher: Classifier, rows: RepresentationTable) -> Iterator[NDArray[np.float32]]:
    """The teacher's probabilities of the classes, (rows, K): soft labels."""
    device = next(teacher.parameters()).device
    for start in range(0, len(rows), ROWS):
        h = rows.collate(np.arange(start, min(start + ROWS, len(rows))))["representation"]
        yield teacher.classify(h.to(device)).softmax(1).cpu().numpy().astype(np.float32)
