import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy.sampling import keyed_integer
from dpfp_ray.sweeps.shared import SharedModel, share_inputs
from dpfp_ray.sweeps.trial import input_key
from dpfp_ray.training.prepare import Prepared, build_model, load_inputs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prepared(tiny_task: dict[str, Any]) -> Prepared:
    plan = make_plan(tiny_task)
    inputs = load_inputs(plan)
    bound = plan.bind(records=len(inputs.data.train), representation=inputs.representation)
    return Prepared(bound, inputs, 1.0)


def test_rebuilt_model_is_the_same_to_the_bit(prepared: Prepared) -> None:
    shared = SharedModel.of(build_model(prepared, seed=0, device=CPU))
    direct = build_model(prepared, seed=9, device=CPU)
    prepared.inputs.make_model = shared.build
    rebuilt = build_model(prepared, seed=9, device=CPU)
    prepared.inputs.make_model = None
    state = rebuilt.state_dict()
    for name, tensor in direct.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert [(n, p.requires_grad) for n, p in direct.named_parameters()] == [
        (n, p.requires_grad) for n, p in rebuilt.named_parameters()
    ]
    batch = prepared.data.train.collate(np.arange(5))
    assert torch.equal(direct.eval()(batch), rebuilt.eval()(batch))


@pytest.mark.parametrize("scope", ["bias", "lora", "top:1"])
def test_a_rebuilt_model_trains_what_its_scope_says(prepared: Prepared, scope: str) -> None:
    restricted = replace(prepared, plan=replace(prepared.plan, scope=scope))
    shared = SharedModel.of(build_model(restricted, seed=0, device=CPU))
    direct = build_model(restricted, seed=9, device=CPU)
    rebuilt = shared.build(restricted.plan, keyed_integer(9, "head"))
    for (name, one), (_, two) in zip(
        direct.named_parameters(), rebuilt.named_parameters(), strict=True
    ):
        assert torch.equal(one, two), name
        assert one.requires_grad == two.requires_grad, name


def test_skeleton_carries_no_weights(prepared: Prepared) -> None:
    model = build_model(prepared, seed=0, device=CPU)
    shared = SharedModel.of(model)
    size = sum(p.numel() for p in model.parameters()) * 4
    assert len(shared.skeleton) < size / 2


def test_training_one_copy_leaves_the_shared_one(prepared: Prepared) -> None:
    shared = SharedModel.of(build_model(prepared, seed=0, device=CPU))
    for array in shared.arrays.values():
        array.setflags(write=False)  # as Ray hands them out
    before = pickle.dumps(shared.arrays)
    model = shared.build(prepared.plan, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert pickle.dumps(shared.arrays) == before


def test_trials_that_differ_in_hyperparameters_share(tiny_task: dict[str, Any]) -> None:
    plan = make_plan(tiny_task)
    for change in ({"learning_rate": 1}, {"batch_size": 2}, {"method": "dpsgd", "M": 1}):
        changed = {k: v for k, v in tiny_task.items() if k != "micro_batches"} | change
        assert input_key(make_plan(changed)) == input_key(plan)
    for change in ({"max_length": 9}, {"model": "other"}, {"scope": "head"}, {"header": "none"}):
        assert input_key(make_plan({**tiny_task, **change})) != input_key(plan)


def test_tables_travel_through_the_object_store(prepared: Prepared, ray_session: None) -> None:
    import ray

    reference = share_inputs(prepared.plan, prepared.inputs)
    inputs = ray.get(reference)
    rows = np.array([3, 0, 3])
    for ours, theirs in (
        (prepared.data.train, inputs.data.train),
        (prepared.data.dev["dev"], inputs.data.dev["dev"]),
    ):
        assert np.array_equal(ours.labels, theirs.labels)
        assert not isinstance(theirs.labels, np.memmap)
        expected, found = ours.collate(rows), theirs.collate(rows)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert inputs.label_names == prepared.inputs.label_names
