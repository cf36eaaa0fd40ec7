"""One copy a node: tokens and initial weights travel through Ray's object store, not per trial.

numpy arrays are what Ray hands out without copying, so tables and weights are kept as such. A trial
copies the weights (it will change them) and reads the tokens in place.
"""

import copy
import dataclasses
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from dpfp_ray.data.split import count_units
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.models.scopes import initialise
from dpfp_ray.plan.plan import INPUT_FIELDS, Plan
from dpfp_ray.sweeps.published import publish, shared_cache
from dpfp_ray.training.prepare import Data, Inputs, Prepared, build_model

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True)
class SharedModel:
    """A classifier as a skeleton without numbers, and its numbers as arrays."""

    skeleton: bytes
    arrays: dict[str, NDArray[np.float32]]

    @staticmethod
    def of(model: Classifier) -> "SharedModel":
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in _tensors(model).items()}
        return SharedModel(pickle.dumps(copy.deepcopy(model).to("meta")), arrays)

    def build(self, plan: Plan, head_seed: int) -> Classifier:
        model: Classifier = pickle.loads(self.skeleton)
        model = model.to_empty(device="cpu")
        with torch.no_grad():
            for name, tensor in _tensors(model).items():
                # Copied, because all trials on this node read the same arrays.
                np.copyto(tensor.numpy(), self.arrays[name])
        initialise(model, head_seed)
        return model


@dataclass(frozen=True)
class SharedInputs:
    data: Data
    label_names: tuple[str, ...]
    representation: str
    model: SharedModel
    fingerprints: dict[str, str]
    columns: Mapping[str, Any]
    seconds: float

    def inputs(self) -> Inputs:
        """What `run.prepare` takes; the model is rebuilt for each trial."""
        return Inputs(
            self.data,
            self.label_names,
            self.representation,
            self.model.build,
            fingerprints=self.fingerprints,
            columns=self.columns,
            seconds=self.seconds,
        )


def input_key(plan: Plan) -> tuple[object, ...]:
    return tuple(getattr(plan, name) for name in INPUT_FIELDS)


def share_inputs(plan: Plan, inputs: Inputs) -> "ray.ObjectRef[SharedInputs]":
    """Put one copy of `plan`'s inputs into the object store."""
    import ray

    bound = plan.bind(
        records=count_units(inputs.data.train),
        representation=inputs.representation,
        classes=len(inputs.label_names),
    )
    model = build_model(Prepared(bound, inputs, 0.0), seed=0, device=torch.device("cpu"))
    dev = {name: _handed_out(table) for name, table in inputs.data.dev.items()}
    data = Data(_handed_out(inputs.data.train), dev)
    shared = SharedInputs(
        data,
        inputs.label_names,
        inputs.representation,
        SharedModel.of(model),
        inputs.fingerprints,
        inputs.columns,
        inputs.seconds,
    )
    return ray.put(shared)


def _handed_out(table: Any) -> Any:
    """By name, where there is a cache that all machines reach; else the arrays themselves."""
    place = shared_cache()
    return _loaded(publish(table, place) if place else table)


def _loaded(table: Any) -> Any:
    """Memory-mapped files as plain arrays: another node cannot open our files. They are copied
    once, from the files into the object store, and not into this process's own memory."""
    arrays: dict[str, Any] = {}
    for field in dataclasses.fields(table):
        value = getattr(table, field.name)
        if isinstance(value, np.ndarray):
            arrays[field.name] = np.asarray(value)
        elif isinstance(value, dict):
            arrays[field.name] = {name: np.asarray(column) for name, column in value.items()}
    return dataclasses.replace(table, **arrays)


def _tensors(model: Module) -> dict[str, Tensor]:
    """Parameters and all buffers; some buffers (position ids) are in no state_dict."""
    return dict(model.named_parameters()) | dict(model.named_buffers())
