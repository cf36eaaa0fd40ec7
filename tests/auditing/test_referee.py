"""The referee accuses each faulty copy of an honest contestant, and no honest method."""

import time
from typing import Any

import numpy as np
import pytest
import torch

from dpfp_ray.auditing import referee_encoders, referee_releases
from dpfp_ray.auditing.referee import check, faults
from dpfp_ray.methods.parts import per_example
from dpfp_ray.plan import method_spec
from dpfp_ray.plan.plan import GRAD_SAMPLE_MODES
from dpfp_ray.privacy import sampling
from dpfp_ray.privacy.sampling import AllocationSampler
from dpfp_ray.system.errors import UserError
from tests.support import faulty

SECONDS = 120.0
HONEST: dict[str, dict[str, Any]] = {
    "dpsgd": {"method": "dpsgd"},
    "dpsgd, automatic": {"method": "dpsgd", "clip_style": "automatic"},
    "dpsgd, random allocation": {"method": "dpsgd", "sampling": "allocation"},
    "rgp": {"method": "rgp"},
    "dpfp": {"method": "dpfp"},
    "moments": {"method": "dpfp", "mode": "moments"},
    "release_once": {"method": "dpfp", "mode": "release_once"},
    "release_once, replace-one": {
        "method": "dpfp",
        "mode": "release_once",
        "adjacency": "replace_one",
    },
    "objpert": {"method": "objpert"},
    **{
        f"opacus, {mode}": {"method": "opacus", "grad_sample_mode": mode}
        for mode in GRAD_SAMPLE_MODES
    },
}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def named(monkeypatch: pytest.MonkeyPatch, contestant: Any) -> str:
    specs = {**method_spec.all_specs(), "made_up": faulty.spec_of(contestant)}
    monkeypatch.setattr(method_spec, "_specs_in", lambda folders: specs)
    return "made_up"


def test_the_list_of_honest_methods_is_complete() -> None:
    specs = method_spec.all_specs().values()
    usual = {spec.method for spec in specs if spec.private and spec.compared}
    assert {fields["method"] for fields in HONEST.values()} >= usual


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_no_method_of_ours_has_a_fault(name: str) -> None:
    fields = dict(HONEST[name])
    started = time.perf_counter()
    mode = fields.pop("mode", "")
    found = check(fields.pop("method") + f":{mode}" * bool(mode), **fields)
    assert faults(found) == []
    assert time.perf_counter() - started < SECONDS


def test_an_honest_contestant_has_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults(check(named(monkeypatch, faulty.Honest))) == []


@pytest.mark.parametrize("contestant", faulty.FAULTY, ids=lambda kind: kind.__name__)
def test_each_seeded_fault_is_found(
    contestant: type[faulty.Honest], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert faults(check(named(monkeypatch, contestant))) != []


def shuffled(sampler: AllocationSampler, step: int) -> Any:
    """Equal batches of a shuffled pass, as most loaders make them."""
    epoch, batch = divmod(step, sampler.batches)
    order = sampling.keyed_generator(sampler.seed, "shuffle", epoch).permutation(sampler.records)
    return np.array_split(order, sampler.batches)[batch]


def one_pass(sampler: AllocationSampler, step: int) -> Any:
    """The choice of the first pass in all of them."""
    rng = sampling.keyed_generator(sampler.seed, "allocation", 0)
    chosen = rng.integers(sampler.batches, size=sampler.records)
    return np.flatnonzero(chosen == step % sampler.batches)


def without_one(sampler: AllocationSampler, step: int) -> Any:
    drawn = allocated(sampler, step)
    return drawn[1:] if step % 50 == 7 else drawn


allocated = AllocationSampler.draw


@pytest.mark.parametrize("draw", [shuffled, one_pass, without_one])
def test_what_is_no_random_allocation_is_found(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllocationSampler, "draw", draw)
    assert faults(check("dpsgd", sampling="allocation")) != []


# --- faults in our own methods, and in Opacus ---------------------------------------------------


def test_half_of_the_noise_of_dpsgd_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sampling.add_noise
    monkeypatch.setattr(
        sampling, "add_noise", lambda tensors, std, seed, step: whole(tensors, std / 2, seed, step)
    )
    assert any("the noise is 0.5 times" in fault for fault in faults(check("dpsgd")))


def test_gradients_that_are_not_clipped_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpfp_ray.methods.parts import ghost

    monkeypatch.setattr(ghost, "clip_factors", lambda norms, *_: norms.new_ones(norms.shape))
    monkeypatch.setattr(per_example, "clip_factors", lambda norms, *_: norms.new_ones(norms.shape))
    assert any("of norm 20" in fault for fault in faults(check("dpsgd")))


def test_batches_of_a_fixed_size_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = sampling.ShuffleSampler
    monkeypatch.setattr(
        "dpfp_ray.training.loop.make_sampler", lambda plan, seed: fixed(plan.D, plan.B, seed)
    )
    assert any("sizes of draws" in fault for fault in faults(check("dpsgd")))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_opacus_with_half_of_its_noise_is_found(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus.optimizers import optimizer, optimizer_fast_gradient_clipping

    whole = optimizer._generate_noise

    def half(std: float, **options: Any) -> Any:
        return whole(std=std / 2, **options)

    for module in (optimizer, optimizer_fast_gradient_clipping):
        monkeypatch.setattr(module, "_generate_noise", half)
    found = faults(check("opacus", grad_sample_mode=mode))
    assert any("the noise is 0.5 times" in fault for fault in found)


# --- faults that only an encoder has ------------------------------------------------------------


def test_a_ghost_norm_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus.grad_sample import GradSampleHooksFastGradientClipping as Ghost

    whole = Ghost.NORM_SAMPLERS[torch.nn.Embedding]

    def half(*arguments: Any) -> Any:
        return {weight: norm / 2 for weight, norm in whole(*arguments).items()}

    monkeypatch.setitem(Ghost.NORM_SAMPLERS, torch.nn.Embedding, half)
    found = faults(check("opacus", grad_sample_mode="ghost"))
    assert found
    assert all("scope all: a record adds" in fault for fault in found)


def test_a_weight_without_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus.optimizers import optimizer

    whole = optimizer._generate_noise

    def some(std: float, reference: torch.Tensor, **options: Any) -> Any:
        quiet = reference.shape == (2 * referee_encoders.WIDTH, referee_encoders.WIDTH)
        return whole(std=std * (not quiet), reference=reference, **options)

    monkeypatch.setattr(optimizer, "_generate_noise", some)
    found = faults(check("opacus"))
    assert any("intermediate.dense.weight gets less noise" in fault for fault in found)


def test_records_that_change_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own `dpsgd` freezes weights that act on a whole batch; Opacus trains them."""
    plain = referee_encoders.tiny_encoder

    def mixing(plan: Any) -> Any:
        model = plain(plan)
        alone = model.represent

        def represent(batch: Any) -> Any:
            h = alone(batch)
            return h - h.mean(0) / 2

        monkeypatch.setattr(model, "represent", represent)
        return model

    monkeypatch.setattr(referee_encoders, "tiny_encoder", mixing)
    found = faults(check("opacus"))
    assert any("records change what others add" in fault for fault in found)


# --- methods of one release ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["moments", "release_once"])
def test_half_of_the_noise_of_a_release_is_found(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = referee_releases.sample

    def sample(plan: Any, noise: float, *rest: Any) -> Any:
        return whole(plan, noise / 2, *rest)

    monkeypatch.setattr(referee_releases, "sample", sample)
    assert any("told apart" in fault for fault in faults(check(f"dpfp:{method}")))


def test_a_method_that_promises_nothing_is_not_checked() -> None:
    with pytest.raises(UserError, match="nothing to check"):
        check("non_private")


def test_findings_say_what_was_declared_and_what_was_measured() -> None:
    (rate,) = [f for f in check("rgp") if f.what == "rate of draws, D = 64, B = 16"]
    assert float(rate.declared) == 0.25
    assert float(rate.measured) == pytest.approx(0.25, abs=0.02)


def test_a_dispersion_is_that_of_a_binomial() -> None:
    from dpfp_ray.auditing.referee import dispersion

    rng = np.random.default_rng(1)
    honest = [dispersion("x", rng.binomial(6, 1 / 6, 500), 6, 1 / 6, "bad") for _ in range(200)]
    assert not any(finding.fault for finding in honest)
    assert dispersion("x", np.ones(500), 6, 1 / 6, "bad").fault == "bad"
