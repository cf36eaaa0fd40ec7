"""One step: which rows go through the model together."""

import numpy as np
import pytest
import torch

from dpfp_ray.auditing.canaries import blank, hide_empty, stack
from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.methods.dpfp import DpFp
from dpfp_ray.methods.parts.base import Rows
from dpfp_ray.privacy.sampling import Records
from dpfp_ray.training.machine import SoloComm
from dpfp_ray.training.step import Steps, make_optimizer
from tests.support.tiny_runs import tiny_classifier, tiny_data, tiny_plan

PRESENT = 8  # records with tokens; the one after them has none, as an audit leaves it


class Drawn:
    """A sampler whose draws are known beforehand."""

    def __init__(self, *draws: list[int]) -> None:
        self.draws = draws

    def draw(self, step: int) -> Records:
        return np.array(self.draws[step], dtype=np.int64)


def test_only_a_step_with_an_absent_record_is_padded(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tiny_data(model_folder, train_rows=PRESENT).train
    table = stack(real, blank(real, np.zeros(1, np.int64), length=0))
    assert isinstance(table, TokenTable)
    plan = tiny_plan(records=len(table))
    method = DpFp(plan, hide_empty(tiny_classifier(model_folder, plan)), 0.5, seed=1)
    given: list[Rows] = []
    backward = method.backward

    def noted(rows: Rows) -> torch.Tensor:
        given.append(rows)
        return backward(rows)

    monkeypatch.setattr(method, "backward", noted)
    sampler = Drawn([0, 3, 5], [0, PRESENT, 5])
    optimizer = make_optimizer(plan, method)
    steps = Steps(plan, method, optimizer, table, sampler, SoloComm(), seed=1)
    steps.take(0)
    assert all(rows.packed_row is not None for rows in given)
    given.clear()
    steps.take(1)
    assert given
    assert all(rows.packed_row is None for rows in given)
    assert sum(len(rows.labels) for rows in given) == 3
