"""The noise of whole runs, measured where it acts, against what the plan's budget needs.

Everything between a plan and the optimizer is the real thing (`run.prepare`, `run.run`): halve σ
anywhere on the way and a test here fails. Each mode is measured where its noise is bare.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dpfp_ray.data import Task
from dpfp_ray.methods import objpert
from dpfp_ray.methods.parts.one_release import discriminant
from dpfp_ray.methods.rgp import HEAD_SHARE
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.training.loop import put_head
from dpfp_ray.training.prepare import Data, Inputs, Prepared, Run, build_model, load_inputs, prepare
from tests.support.one_release import make_table
from tests.support.tiny_runs import Listener, run_with, tiny_split

SEED, CPU = 2**80 + 5, torch.device("cpu")


def prepared_run(steady_folder: str, **settings: Any) -> tuple[Prepared, Classifier]:
    """A plan of few records and one expected row a step, so that a third of its steps are empty."""
    plan = Plan(
        model=steady_folder,
        task="sst2",
        **{"epsilon": 3.0, "delta": 1e-3, "representation": "mean", "epochs": 1, **settings},
    )
    task = Task("tiny", ("no", "yes"), tiny_split(30), {"dev": tiny_split(10, seed=2)})
    prepared = prepare(plan, load_inputs(plan, task))
    return prepared, build_model(prepared, SEED, CPU)


def needed(prepared: Prepared) -> float:
    """σ that the budget needs, by the plan alone."""
    return noise_multiplier(prepared.plan) * prepared.plan.C


@contextmanager
def empty_steps(model: Classifier) -> Iterator[list[dict[str, Tensor]]]:
    """What the optimizer is given in steps whose draw was empty: noise over B and nothing else."""
    rows, found = [0], list[dict[str, Tensor]]()

    def count(_: Any, inputs: tuple[Tensor, ...]) -> None:
        rows[0] += len(inputs[0])

    def look(optimizer: Any, *_: Any) -> None:
        if rows[0] == 0:
            weights = trainable_parameters(model)
            found.append({n: p.grad.detach().clone() for n, p in weights if p.grad is not None})
        rows[0] = 0

    handles = [model.head.register_forward_pre_hook(count), register_optimizer_step_pre_hook(look)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


STEPS = {
    "ghost": {"method": "dpsgd", "clipping": "ghost"},
    "hooks": {"method": "dpsgd", "clipping": "hooks"},
    "head": {"method": "dpsgd", "scope": "head"},
    "head, hooks": {"method": "dpsgd", "scope": "head", "clipping": "hooks"},
    "rgp": {"method": "rgp", "rank": 4, "learning_rate": 1e-6},
    "rgp, history": {"method": "rgp", "rank": 4, "learning_rate": 1e-6, "carriers": "history"},
    "rgp, head": {"method": "rgp", "scope": "head"},
}


def degrees(plan: Plan, name: str, shape: torch.Size) -> float:
    """E‖gradient‖² of pure noise in one weight, over σ²: how many noisy coordinates reach it.

    RGP's g_L R + L g_R − L Lᵀ g_L R, L and R orthonormal: r (out − r) + r in. Its head is weighed.
    """
    if plan.method == "rgp" and plan.scope == "all":
        if name.startswith("head."):
            return shape.numel() / HEAD_SHARE**2
        rank = min(plan.rank, *shape)
        return rank * (shape[0] - rank) + rank * shape[1]
    return shape.numel()


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_empty_steps_of_a_run_are_the_planned_noise(
    steady_folder: str, name: str, epsilon: float
) -> None:
    epochs = 8 if "head" in name else 4  # few weights: more steps for as many numbers
    prepared, model = prepared_run(
        steady_folder, batch_size=1, epsilon=epsilon, **{"epochs": epochs, **STEPS[name]}
    )
    with empty_steps(model) as found:
        run_with(prepared, seed=SEED, model=model)
    assert len(found) >= 15  # of 120 steps or more, 0.36 each
    plan = prepared.plan
    squares = {n: sum(float(step[n].double().square().sum()) for step in found) for n in found[0]}
    total = sum(degrees(plan, n, found[0][n].shape) for n in found[0]) * len(found)
    measured = (sum(squares.values()) / total) ** 0.5 * plan.B
    assert measured == pytest.approx(needed(prepared), rel=0.08)
    if plan.scope == "all":  # every weight by itself, so that no large one hides a small one
        for n, shape in ((n, found[0][n].shape) for n in found[0] if found[0][n].numel() > 500):
            own = (squares[n] / (len(found) * degrees(plan, n, shape))) ** 0.5 * plan.B
            assert own == pytest.approx(needed(prepared), rel=0.2), n


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["all", "head"])
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_rows_of_a_dpfp_run_get_the_planned_noise(
    steady_folder: str, scope: str, epsilon: float
) -> None:
    """What the head is given, less the clipped representation that it was made from."""
    prepared, model = prepared_run(
        steady_folder, method="dpfp", scope=scope, batch_size=10, epsilon=epsilon, clip=0.7
    )
    plain, h, noise = model.represent, list[Tensor](), list[Tensor]()

    def represent(batch: Any) -> Tensor:
        h.append(plain(batch))
        return h[-1]

    def look(_: Any, inputs: tuple[Tensor, ...]) -> None:
        if model.training:  # evaluation has no noise
            clean = h[-1].detach()
            clean = clean * (0.7 / clean.norm(dim=1, keepdim=True)).clamp(max=1)
            noise.append((inputs[0].detach() - clean).flatten())

    model.represent = represent  # type: ignore[method-assign]
    model.head.register_forward_pre_hook(look)
    run_with(prepared, seed=SEED, model=model)
    found = torch.cat(noise).double()
    assert len(found) > 500
    assert float(found.square().mean().sqrt()) == pytest.approx(needed(prepared), rel=0.08)
    assert abs(float(found.mean())) < 6 * needed(prepared) / len(found) ** 0.5


def test_trials_and_audits_are_prepared_with_the_planned_noise(
    tiny_task: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From there on they are runs like those above."""
    from dpfp_ray.auditing.audit import Settings, set_up
    from dpfp_ray.sweeps import experiment
    from dpfp_ray.sweeps.trial import bind_trial

    trial = bind_trial(tiny_task, load_inputs)
    planned = noise_multiplier(trial.plan)
    assert trial.noise_multiplier == planned
    audited = set_up(make_plan(tiny_task), Settings(canaries=20), membership_seed=1).prepared
    assert audited.noise_multiplier == planned

    found = []

    def look(run: Run, *_: Any) -> None:
        found.append(run.prepared.noise_multiplier)
        raise RuntimeError

    monkeypatch.setattr(experiment, "run_events", look)
    monkeypatch.setattr(experiment, "node_and_process", dict)
    inputs = load_inputs(trial.plan)
    sweep = experiment.Sweep("s", str(tmp_path), seed=1)
    facts = {"seconds": 0.0}
    with pytest.raises(RuntimeError):
        experiment.run_worker(trial, sweep, inputs, print, facts)
    assert found == [planned]


# One release ---------------------------------------------------------------------------------


def zero_run(records: int, width: int, **settings: Any) -> tuple[Prepared, Classifier, Any]:
    """A run on records whose representation is 0: what it releases is noise, and counts."""
    plan = Plan(**{"method": "dpfp", "epsilon": 3.0, "representation": "mean", **settings})
    zeros = np.zeros((records, width), np.float32)
    table = RepresentationTable(zeros, np.arange(records) % 2, f"zero {records} {width}")
    inputs = Inputs(Data(table, {"dev": make_table(20, width)}), ("no", "yes"), "mean")
    prepared = prepare(plan, inputs)
    listener = Listener()
    _, model = run_with(prepared, listener, seed=SEED)
    (release,) = listener.releases
    return prepared, model, release


@pytest.mark.parametrize("clip", [1.0, 0.4])
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_rows_of_release_once_get_the_planned_noise(
    adjacency: str, epsilon: float, clip: float
) -> None:
    given = {"adjacency": adjacency, "epsilon": epsilon, "scaling": "clip", "clip": clip}
    prepared, _, released = zero_run(400, 40, mode="release_once", **given)
    z = np.concatenate([rows for rows, _ in released.rows()])
    sigma = noise_multiplier(prepared.plan)  # rows are h/C
    assert z.shape == (400, 40)
    assert z.std() == pytest.approx(sigma, rel=0.03)
    # and the statistics that the head is made from are those of these rows
    sums = np.stack([z[np.arange(400) % 2 == label].sum(0) for label in (0, 1)])
    np.testing.assert_allclose(released.sums, sums, rtol=1e-4, atol=1e-3)
    assert released.sums.std() / 200**0.5 == pytest.approx(sigma, rel=0.3)


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_moments_get_the_planned_noise(epsilon: float) -> None:
    from dpfp_ray.methods.moments import COUNTS, SECOND, SUMS

    prepared, _, released = zero_run(400, 60, mode="moments", epsilon=epsilon)
    sigma = noise_multiplier(prepared.plan)
    off_diagonal = released.second[np.triu_indices(60, 1)]
    assert off_diagonal.std() * (2 * SECOND) ** 0.5 == pytest.approx(sigma, rel=0.08)
    assert np.diag(released.second).std() * SECOND**0.5 == pytest.approx(sigma, rel=0.35)
    assert released.sums.std() * SUMS**0.5 == pytest.approx(sigma, rel=0.25)
    assert np.abs(released.counts - 200).max() * COUNTS**0.5 < 4 * sigma


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_objective_perturbation_gets_the_planned_noise(epsilon: float) -> None:
    """Where x is 0 the minimum is −b/λ: all that θ shows there is the perturbation."""
    prepared, _, theta = zero_run(400, 600, method="objpert", epsilon=epsilon)
    own = objpert.accounted(prepared.plan, noise_multiplier(prepared.plan))
    expected = ((own.sigma / own.ridge) ** 2 + own.output_sigma**2) ** 0.5
    assert theta[:-1].std() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("mode", ["release_once", "moments", "objpert"])
def test_the_head_is_made_from_the_release_that_was_shown(mode: str) -> None:
    """So that noise measured there is the noise that protects the model."""
    given = {"method": "objpert"} if mode == "objpert" else {"mode": mode}
    prepared, model, released = zero_run(300, 10, **given)
    plan = prepared.plan
    if mode == "objpert":
        head = objpert.head(released)
    else:
        assert plan.ridge is not None
        assert plan.shrinkage is not None
        head = discriminant(released, plan.ridge, plan.shrinkage, None)
    twin = build_model(prepared, SEED, CPU)
    put_head(twin, head, plan.C)
    for mine, theirs in zip(twin.head.parameters(), model.head.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
