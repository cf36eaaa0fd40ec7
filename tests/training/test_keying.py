"""What draws and noise are keyed by: runs that differ in anything share neither."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfp_ray.data import Table
from dpfp_ray.methods.parts.base import make_method
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.machine import Comm, SoloComm
from dpfp_ray.training.prepare import Data, Inputs, Prepared, build_model, prepare
from dpfp_ray.training.step import take
from tests.support.one_release import make_table
from tests.support.tiny_runs import (
    Killed,
    Listener,
    in_threads,
    run_with,
    tiny_classifier,
    tiny_data,
    tiny_plan,
    train_with,
)

SEED = 2**100 + 7


def full_batch(epsilon: float, **changes: Any) -> Plan:
    """One step of head DP-SGD on every record: nothing hides the sum but the noise."""
    settings: dict[str, Any] = {"batch_size": 40, "epochs": 1, "clip": 1.0, "scope": "head"}
    return Plan(method="dpsgd", epsilon=epsilon, representation="mean", **{**settings, **changes})


def gradient(model: torch.nn.Module) -> Tensor:
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found).double()


def released(
    plan: Plan, table: RepresentationTable, seed: int = SEED, start: int = 1
) -> tuple[Tensor, float]:
    """Σ clip(g) + noise of the first step of a real run, and its σ."""
    inputs = Inputs(
        Data(table, {"dev": make_table(10, table.width, seed=3)}), ("no", "yes"), "mean"
    )
    prepared = prepare(plan, inputs)
    model = build_model(prepared, start, torch.device("cpu"))
    with pytest.raises(Killed):
        run_with(prepared, Listener(1), seed=seed, model=model)
    return gradient(model) * prepared.plan.B, prepared.noise_multiplier * prepared.plan.C


def clipped_sum(plan: Plan, table: RepresentationTable, start: int = 1) -> Tensor:
    inputs = Inputs(Data(table, {}), ("no", "yes"), "mean")
    bound = plan.bind(records=len(table), representation="mean", classes=2)
    model = build_model(Prepared(bound, inputs, 0.0), start, torch.device("cpu"))
    method = make_method(bound, model, 0.0, seed=0)
    records = np.arange(len(table))
    method.begin(0, len(table))
    method.backward(take(table, records, records, torch.device("cpu")))
    method.finish(0)
    return gradient(model) * bound.B


def test_two_budgets_under_one_seed_do_not_give_the_clipped_sum() -> None:
    """(σ₁ r₂ − σ₂ r₁)/(σ₁ − σ₂) takes a noise off that both releases share."""
    table = make_table(40)
    (one, first), (three, second) = (released(full_batch(e), table) for e in (1.0, 3.0))
    guess = (first * three - second * one) / (first - second)
    truth = clipped_sum(full_batch(1.0), table)
    noise = (guess - truth).square().mean().sqrt()
    expected = first * second * 2**0.5 / (first - second)  # of independent noise
    assert 0.4 * expected < noise < 2 * expected


def test_the_attack_would_have_worked_on_noise_that_is_shared() -> None:
    """So that the test above can fail."""
    table = make_table(40)
    truth = clipped_sum(full_batch(1.0), table)
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1))
    one, three = truth + 2.0 * noise, truth + 0.7 * noise
    guess = (2.0 * three - 0.7 * one) / (2.0 - 0.7)
    assert (guess - truth).abs().max() < 1e-5


@pytest.mark.parametrize("what", ["plan", "label", "representations", "weights", "seed"])
def test_noise_differs_as_soon_as_anything_does(what: str) -> None:
    """Less the sum that is known here, the releases' noise is uncorrelated."""
    plan, table = full_batch(3.0), make_table(40, width=300)
    other_plan, other, seed, start = plan, table, SEED, 1
    if what == "plan":
        other_plan = full_batch(3.0, learning_rate=0.07)  # the same σ and the same first step
    elif what == "label":
        other = replace(table, labels=np.where(np.arange(40) == 7, 1 - table.labels, table.labels))
    elif what == "representations":
        other = replace(table, key="another encoder")
    elif what == "weights":
        start = 2  # as of two encoders of one name
    else:
        seed += 1
    noise = [
        released(p, t, s, w)[0] - clipped_sum(p, t, w)
        for p, t, s, w in ((plan, table, SEED, 1), (other_plan, other, seed, start))
    ]
    assert abs(float(torch.corrcoef(torch.stack(noise))[0, 1])) < 0.2  # of 602 numbers


def test_the_same_run_again_is_the_same_noise() -> None:
    plan, table = full_batch(3.0), make_table(40)
    assert torch.equal(released(plan, table)[0], released(plan, table)[0])


@pytest.mark.parametrize("method", ["dpfp", "dpsgd", "rgp"])
def test_equal_noise_means_equal_sums_however_a_step_is_split(
    model_folder: str, tmp_path: Path, method: str
) -> None:
    """Else the difference of two such releases would have no noise. The folder asks for dropout."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        config[name] = 0.5
    (folder / "config.json").write_text(json.dumps(config))

    def release(rows: int, comm: Comm) -> Tensor:
        plan = tiny_plan(method, batch_size=20, max_physical_batch=rows)
        model = tiny_classifier(str(folder), plan)
        data, listener = tiny_data(str(folder), plan.D), Listener(1)
        with pytest.raises(Killed):
            train_with(plan, 0.5, model, data, listener, seed=SEED, comm=comm)
        return gradient(model)

    whole = release(20, SoloComm())
    workers = in_threads(2, lambda comm: release(20, comm))
    for other in (release(4, SoloComm()), *workers):
        torch.testing.assert_close(other, whole, rtol=1e-3, atol=1e-5 * float(whole.abs().max()))


def test_draws_are_keyed_by_the_plan_too(model_folder: str) -> None:
    rows = []
    for rate in (1e-3, 2e-3):
        rows.append(drawn(model_folder, tiny_plan("non_private", learning_rate=rate)))
    assert rows[0] != rows[1]


def drawn(model_folder: str, plan: Plan) -> list[list[int]]:
    """The records of each step of a real run."""
    data, found = tiny_data(model_folder, plan.D), []

    class Seen:
        """The training table, with an eye on who is asked for."""

        def __getattr__(self, name: str) -> Any:
            return getattr(data.train, name)

        def __len__(self) -> int:
            return len(data.train)

        def collate(self, rows: Any) -> Any:
            found.append(sorted(rows.tolist()))
            return data.train.collate(rows)

    train: Table = Seen()
    model = tiny_classifier(model_folder, plan)
    train_with(plan, 0.5, model, Data(train, data.dev), seed=SEED)
    return found


# States of an earlier version ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_refuses_a_state_of_an_earlier_version() -> None:
    plan = Plan(method="dpsgd", scope="head", batch_size=4, epochs=1, representation="mean")
    prepared = prepare(
        plan, Inputs(Data(make_table(24), {"dev": make_table(10, seed=3)}), ("no", "yes"), "mean")
    )
    listener = Listener(1)
    with pytest.raises(Killed):
        run_with(prepared, listener, seed=SEED)
    state = listener.state()
    run_with(prepared, seed=SEED, state=dict(state))
    state["keying"] -= 1
    with pytest.raises(UserError, match=r"earlier version.*--overwrite"):
        run_with(prepared, seed=SEED, state=state)


@pytest.mark.parametrize("method", ["dpsgd", "non_private"])
def test_a_private_run_stays_on_its_kind_of_device(model_folder: str, method: str) -> None:
    """GPUs make other noise of a seed: the steps since the last save would be released twice."""
    plan = tiny_plan(method)
    killed = Listener(kill_after=7)
    with pytest.raises(Killed):
        train_with(
            plan,
            0.5,
            tiny_classifier(model_folder, plan),
            tiny_data(model_folder),
            killed,
            seed=SEED,
        )
    state = killed.state()
    assert state["device"] == "cpu"
    state["device"] = "cuda"
    model, data = tiny_classifier(model_folder, plan), tiny_data(model_folder)
    if method == "dpsgd":
        with pytest.raises(UserError, match=r"begun on device cuda, and this is cpu"):
            train_with(plan, 0.5, model, data, seed=SEED, state=state)
    else:
        assert train_with(plan, 0.0, model, data, seed=SEED, state=state).step == plan.steps
