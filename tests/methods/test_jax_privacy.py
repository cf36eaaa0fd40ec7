"""jax-privacy as a contestant: DP-SGD and BandMF. Skipped where it is not installed."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from dpfp_ray.auditing.referee import check, faults
from dpfp_ray.methods.jax_bandmf import JaxBandMf, bands
from dpfp_ray.methods.jax_privacy import JaxPrivacy
from dpfp_ray.methods.parts.contestant import Start
from dpfp_ray.models.representations import HeadClassifier, RepresentationTable
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.ledger_entries import use_of
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.prepare import Data, Inputs, Prepared, Run
from dpfp_ray.training.train import run_events
from tests.support.tiny_runs import Killed, Listener, train_with

SEED = 5


def table(rows: int = 24) -> RepresentationTable:
    rng = np.random.default_rng(3)
    h = rng.standard_normal((rows, 6)).astype(np.float32)
    return RepresentationTable(h, np.arange(rows) % 2, "made up")


def plan_for(method: str, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"batch_size": 4, "epochs": 2, "records": 24, "clip": 0.5}
    return Plan(method=method, representation="mean", **(settings | changes))


def model() -> HeadClassifier:
    return HeadClassifier(6, 2, "mean", 3)


def test_bandmf_is_accounted_for_as_fewer_releases_at_a_higher_rate() -> None:
    plan = plan_for("jax_bandmf")
    mech = accounting.mechanism(plan, 1.0)
    assert bands(plan) == 4
    assert (mech.p, mech.n) == (4 * 4 / 24, math.ceil(plan.steps / 4))


def test_the_ledger_pays_for_the_releases_of_bandmf() -> None:
    plan = plan_for("jax_bandmf")
    noise = noise_multiplier(plan)
    (part,) = use_of(plan, noise, people="p", run="r").parts
    mech = accounting.mechanism(plan, noise)
    at = dict(zip(part.orders, part.values, strict=True))  # type: ignore[union-attr]
    best = min(
        accounting.renyi_epsilon(order, value, plan.delta or 0.0) for order, value in at.items()
    )
    assert best == pytest.approx(accounting.rdp_epsilon(mech, plan.delta or 0.0), rel=0.02)


def test_without_jax_it_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "jax_privacy.batch_selection", None)
    start = Start(plan_for("jax_privacy"), model(), table(), 1.0, SEED)
    with pytest.raises(UserError, match=r"pip install 'dpfp-ray\[jax\]'"):
        next(JaxPrivacy(start).train())


class TestWithJax:
    """What runs the library itself."""

    @pytest.fixture(autouse=True)
    def _jax(self) -> None:
        pytest.importorskip("jax_privacy")

    @pytest.mark.slow
    def test_the_referee_finds_no_fault_in_dp_sgd(self) -> None:
        assert faults(check("jax_privacy")) == []

    def test_bandmf_is_beyond_the_referee(self) -> None:
        with pytest.raises(UserError, match="correlates the noise"):
            check("jax_bandmf")

    @pytest.mark.parametrize("method", ["jax_privacy", "jax_bandmf"])
    def test_a_run_is_recorded_with_what_is_claimed(self, method: str) -> None:
        plan = plan_for(method)
        noise = noise_multiplier(plan)
        data = Data(table(), {"dev": table(10)})
        run = Run(Prepared(plan, Inputs(data, ("no", "yes"), "mean"), noise), SEED)
        *_, last = run_events(run, model())
        claim: Any = last.record["privacy"]["claim"]  # type: ignore[union-attr]
        assert claim["library"] == "jax-privacy"
        assert claim["epsilon"]["pld"] == pytest.approx(3, rel=0.01)
        assert claim["releases"] == plan.draws

    @pytest.mark.parametrize("method", ["jax_privacy", "jax_bandmf"])
    def test_a_resumed_run_ends_with_the_same_weights(self, method: str) -> None:
        plan, data = plan_for(method), Data(table(), {"dev": table(10)})
        whole, resumed, listener = model(), model(), Listener(kill_after=5)
        train_with(plan, 1.0, whole, data, seed=SEED)
        with pytest.raises(Killed):
            train_with(plan, 1.0, model(), data, listener, seed=SEED)
        train_with(plan, 1.0, resumed, data, seed=SEED, state=listener.state())
        assert torch.equal(whole.head.weight, resumed.head.weight)

    def test_no_record_of_bandmf_is_drawn_twice_within_its_bands(self) -> None:
        plan = plan_for("jax_bandmf", epochs=20)
        contestant = JaxBandMf(Start(plan, model(), table(), 1.0, SEED))
        contestant.set_up()
        batches = contestant.config.plan.batch_selection_strategy.batch_iterator(24, 1)
        steps: dict[int, set[int]] = {}
        for step, drawn in enumerate(batches):
            for record in drawn:
                steps.setdefault(int(record), set()).add(step % bands(plan))
        assert all(len(places) == 1 for places in steps.values())

    def test_bandmf_correlates_its_noise_so_that_sums_have_less(self) -> None:
        """At equal noise in one step, the sum of eight has less than that of independent noise."""
        plan = plan_for("jax_bandmf", epochs=8, clip=1e-6)
        sums = []
        for seed in range(30):
            contestant = JaxBandMf(Start(plan, model(), table(), 1.0, seed))
            training, total, first = contestant.train(), 0.0, 0.0
            for step in range(8):
                next(training)
                release = contestant.model.head.weight.grad
                assert release is not None
                total = total + release
                first = first if step else release
            sums.append((float(torch.as_tensor(total).std()), float(torch.as_tensor(first).std())))
        of_sum, of_first = np.mean(sums, axis=0)
        assert of_sum < 0.9 * math.sqrt(8) * of_first
