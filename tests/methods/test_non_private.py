"""Ordinary training: the gradient that any textbook loop would have."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.methods.parts.base import make_method
from tests.methods.test_dpfp import assert_same, gradients, rows_of
from tests.support.tiny_runs import tiny_classifier, tiny_data, tiny_plan


@pytest.fixture(scope="module")
def table(model_folder: str) -> TokenTable:
    return tiny_data(model_folder).train


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_gradient_is_that_of_the_mean_loss(
    model_folder: str, table: TokenTable, parts: int
) -> None:
    plan = tiny_plan("non_private")
    records = np.array([3, 0, 7, 12])
    model = tiny_classifier(model_folder, plan)
    method = make_method(plan, model, 0.0, seed=1)
    method.begin(0, 4)
    total = torch.zeros(())
    for positions in np.array_split(np.arange(4), parts):
        total += method.backward(rows_of(table, records, positions))
    method.finish(0)

    twin = tiny_classifier(model_folder, plan)
    labels = torch.from_numpy(table.labels[records])
    loss = functional.cross_entropy(twin(table.collate(records)), labels)
    loss.backward()
    assert_same(gradients(model), gradients(twin))
    torch.testing.assert_close(total, 4 * loss.detach())


def test_nothing_is_noised(model_folder: str) -> None:
    plan = tiny_plan("non_private")
    method = make_method(plan, tiny_classifier(model_folder, plan), 0.0, seed=1)
    assert method.noise_coordinates == 0
    assert method.max_rows == plan.max_physical_batch
