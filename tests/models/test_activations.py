"""The frozen layers' outputs: the same numbers as without, from a cache with a limit."""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Embedding, Module

from dpfp_ray.auditing.canaries import blank, hide_empty, stack
from dpfp_ray.methods.dpsgd import DpSgd
from dpfp_ray.models import activations
from dpfp_ray.models.activations import ActivationTable, with_activations
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.models.pretrained import load_tokenizer
from dpfp_ray.models.representations import OwnEncoder
from dpfp_ray.plan.plan import Plan
from dpfp_ray.training.machine import Comm
from dpfp_ray.training.prepare import Data
from tests.methods.test_dpsgd import (
    SEED,
    SIGMA,
    assert_same,
    build,
    clipped_sum,
    make_plan,
    make_rows,
    naive_sum,
    table,
)
from tests.models.test_scopes import Own
from tests.support.tiny_models import ENCODERS, build_tiny
from tests.support.tiny_runs import Killed, Listener, train_with

FAMILIES = tuple(name for name in ENCODERS if name != "albert")  # its layers are one
pytestmark = pytest.mark.filterwarnings("ignore:.*no gradient per example")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("activations")
    return functools.cache(lambda name: build_tiny(root / name, name, layers=3))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path))
    return tmp_path / "activations"


def plan_for(folder: str, **changes: Any) -> Plan:
    return make_plan(folder, **{"scope": "top:1", **changes})


def cached(plan: Plan, model: Classifier) -> ActivationTable:
    found = with_activations(table(plan.model), model, plan)
    assert isinstance(found, ActivationTable)
    return found


def runs_of(model: Classifier) -> Callable[[], int]:
    """How often the first layer has been run since."""
    count = 0

    def run(*_: object) -> None:
        nonlocal count
        count += 1

    first = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))[0]
    list(first.modules())[-1].register_forward_hook(run)
    return lambda: count


# --- the same numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [*FAMILIES, "gpt2"])
def test_the_clipped_sum_is_that_of_the_whole_encoder_row_by_row(
    tiny: Callable[[str], str], architecture: str
) -> None:
    plan = plan_for(tiny(architecture), clip=0.05)
    model = build(plan)
    rows = cached(plan, model)
    ran = runs_of(model)
    method = DpSgd(plan, model, SIGMA, SEED)
    probed = ran()
    found = clipped_sum(method, make_rows(rows))  # type: ignore[arg-type]
    assert ran() == probed  # the frozen layers were not run
    assert_same(found, naive_sum(model, make_rows(table(plan.model)), 0.05))


def test_under_bf16_what_is_kept_has_bf16s_precision(tiny: Callable[[str], str]) -> None:
    plan = plan_for(tiny("bert"), precision="bf16")
    model = build(plan)
    rows, places = cached(plan, model), np.arange(5)
    assert rows.below.itemsize == 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = model.represent(rows.collate(places))
        plain = model.represent(rows.tokens.collate(places))
    torch.testing.assert_close(found, plain, rtol=2e-2, atol=2e-2)


def trained(
    plan: Plan,
    listener: Listener | None = None,
    state: dict[str, Any] | None = None,
    comm: Comm | None = None,
) -> Classifier:
    model = build(plan)
    data = Data(with_activations(table(plan.model), model, plan), {"dev": table(plan.model)})
    train_with(plan, 1.0, model, data, listener, seed=SEED, comm=comm, state=state)
    return model


@pytest.mark.slow
def test_a_run_with_the_cache_is_the_run_without_it(tiny: Callable[[str], str]) -> None:
    plan = plan_for(tiny("bert"))
    plain = trained(dataclasses.replace(plan, cache_gb=0))
    for (name, one), two in zip(trained(plan).named_parameters(), plain.parameters(), strict=True):
        if not name.endswith("key.bias"):  # its gradient is rounding error, which Adam blows up
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_weights(tiny: Callable[[str], str]) -> None:
    plan = plan_for(tiny("bert"))
    unbroken, listener = trained(plan), Listener(3)
    with pytest.raises(Killed):
        trained(plan, listener)
    resumed = trained(plan, state=listener.state())
    for one, two in zip(unbroken.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


def test_it_does_not_change_a_plans_hash_or_its_noise(tiny: Callable[[str], str]) -> None:
    plan = plan_for(tiny("bert"))
    assert plan.hash == dataclasses.replace(plan, cache_gb=0).hash
    assert cached(plan, build(plan)).content() == table(plan.model).content()


def test_a_row_without_tokens_is_hidden_as_it_is_without_the_cache(
    tiny: Callable[[str], str],
) -> None:
    # What an audit puts in the place of a record that is out.
    plan = plan_for(tiny("bert"))
    source = table(plan.model)
    nothing = blank(source, np.zeros(1, np.int64), length=0)
    both = stack(source, nothing)
    model = hide_empty(build(plan))
    rows, places = with_activations(both, model, plan), np.array([3, len(source), 5])
    assert isinstance(rows, ActivationTable)
    found = model.represent(rows.collate(places))
    torch.testing.assert_close(found, model.represent(both.collate(places)))
    assert not found[1].any()


# --- where there is none ------------------------------------------------------------------------


WITH_DROPOUT = {"dropout": 0.1, "method": "non_private", "clip": None}


@pytest.mark.parametrize(
    "change", [{"cache_gb": 0}, {"scope": "top:3"}, {"scope": "bias"}, WITH_DROPOUT]
)
def test_nothing_is_kept_where_nothing_is_to_be_gained(
    tiny: Callable[[str], str], cache: Path, change: dict[str, Any]
) -> None:
    plan = plan_for(tiny("bert"), **change)
    source = table(plan.model)
    assert with_activations(source, build(plan), plan) is source
    assert not cache.exists()


def test_what_is_larger_than_the_limit_is_computed_at_every_step(
    tiny: Callable[[str], str], cache: Path
) -> None:
    plan = plan_for(tiny("bert"), cache_gb=1e-6)
    source = table(plan.model)
    with pytest.warns(UserWarning, match="GB and cache_gb is 1e-06: they are computed at every"):
        assert with_activations(source, build(plan), plan) is source
    assert not cache.exists()


def test_a_disk_that_is_full_is_no_reason_not_to_train(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    plan = plan_for(tiny("bert"))
    source = table(plan.model)
    with pytest.warns(UserWarning, match=r"cannot be kept \(No space left"):
        assert with_activations(source, build(plan), plan) is source


class HandsOnMore(Module):
    """Each layer adds to a memory that the next one reads: no place to step in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(600, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden, memory = self.embedding(input_ids), torch.zeros(())
        for layer in self.layers:
            hidden = layer(hidden) + memory
            memory = memory + hidden.tanh()
        return hidden


def own(module: Module, folder: str) -> tuple[Classifier, Plan]:
    given = OwnEncoder(module, load_tokenizer(folder))
    model = given.classifier("mean", 2, dropout=0.0, head_seed=0, scope="top:1")
    return model, dataclasses.replace(plan_for(folder), model=given.name)


def test_an_encoder_that_cannot_be_entered_in_the_middle_runs_whole(
    tiny: Callable[[str], str],
) -> None:
    model, plan = own(HandsOnMore(), tiny("bert"))
    source = table(tiny("bert"))
    assert with_activations(source, model, plan) is source


def test_of_an_encoder_of_ones_own_no_file_stays(tiny: Callable[[str], str], cache: Path) -> None:
    model, plan = own(Own(), tiny("bert"))
    source, places = table(tiny("bert")), np.arange(6)
    rows = with_activations(source, model, plan)
    assert isinstance(rows, ActivationTable)
    torch.testing.assert_close(model(rows.collate(places)), model(source.collate(places)))
    assert [found.name for found in cache.iterdir() if found.name != ".lock"] == []


# --- the files ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_second_run_computes_nothing_and_others_cannot_read_it(
    tiny: Callable[[str], str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(tiny("bert"))
    first = cached(plan, build(plan))
    assert [oct(file.stat().st_mode & 0o777) for file in cache.glob("*.bin")] == ["0o600"]
    monkeypatch.setattr(activations, "_encode", None)
    again = cached(dataclasses.replace(plan, learning_rate=0.5), build(plan))
    np.testing.assert_array_equal(first.below, again.below)


@pytest.mark.slow
def test_other_tokens_layers_or_weights_are_another_entry(
    tiny: Callable[[str], str], cache: Path
) -> None:
    plan = plan_for(tiny("bert"))
    cached(plan, build(plan))
    two = dataclasses.replace(plan, scope="top:2")
    cached(two, build(two))
    changed = build(plan)
    with torch.no_grad():
        next(changed.encoder.parameters()).add_(1e-3)
    cached(plan, changed)
    with_activations(table(plan.model, ("one text more",)), build(plan), plan)
    assert len(list(cache.glob("*.bin"))) == 4


@pytest.mark.slow
def test_a_damaged_entry_is_made_anew(tiny: Callable[[str], str], cache: Path) -> None:
    plan = plan_for(tiny("bert"))
    kept = np.array(cached(plan, build(plan)).below)
    (entry,) = cache.glob("*.bin")
    entry.write_bytes(b"short")
    np.testing.assert_array_equal(cached(plan, build(plan)).below, kept)


@pytest.mark.slow
def test_all_entries_together_keep_to_the_limit_and_the_least_used_goes(
    tiny: Callable[[str], str], cache: Path
) -> None:
    plan = plan_for(tiny("bert"))
    size = cached(plan, build(plan)).below.nbytes
    (oldest,) = cache.glob("*.bin")
    os.utime(oldest, (1, 1))
    (cache / "half-made").mkdir()
    (cache / "half-made" / "below").write_bytes(b"left by a process that was killed")
    room = dataclasses.replace(plan, cache_gb=1.5 * size / 1e9, scope="top:2")
    cached(room, build(room))
    assert not oldest.exists()
    assert len(list(cache.glob("*.bin"))) == 1
    assert not (cache / "half-made").exists()
