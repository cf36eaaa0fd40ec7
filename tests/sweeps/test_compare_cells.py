"""Plan values for each (method, ε) of a comparison."""

import pytest

from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.values import make_plan
from dpfp_ray.sweeps.compare_cells import plan_cells
from dpfp_ray.sweeps.compare_tuning import space_name


def test_a_flag_reaches_the_methods_that_know_it() -> None:
    common = {"epochs": 2, "micro_batches": 4, "batch_size": 8, "ridge": 0.5, "accountant": "gdp"}
    methods = ["non_private", "dpfp", "dpfp:moments", "dpsgd"]
    plans = [make_plan(cell) for cell in plan_cells(methods, [3.0], common, None)]
    assert [plan.epochs for plan in plans] == [2, 2, 1, 2]
    assert [plan.M for plan in plans] == [1, 4, 1, 1]
    assert [plan.ridge for plan in plans] == [None, None, 0.5, None]
    assert [plan.mode for plan in plans] == ["paper", "paper", "moments", "paper"]


def test_match_gives_all_the_same_batch() -> None:
    cells = plan_cells(["non_private", "dpfp", "dpsgd", "rgp"], [3.0], {}, "batch")
    assert {make_plan(cell).batch_size for cell in cells} == {32}


def test_scopes_are_variants_and_lora_flags_reach_lora_only() -> None:
    names = ["dpsgd:bias", "dpsgd:lora", "dpsgd:top:2", "dpfp:bias"]
    cells = plan_cells(names, [3.0], {"lora_rank": 4, "clip_style": "automatic"}, None)
    plans = [make_plan(cell) for cell in cells]
    assert [plan.scope for plan in plans] == ["bias", "lora", "top:2", "bias"]
    assert [plan.lora_rank for plan in plans] == [None, 4, None, None]
    assert [plan.clip_style for plan in plans] == ["automatic"] * 3 + ["abadi"]
    assert [space_name(cell) for cell in cells] == ["dpsgd_bias", "dpsgd_lora", "dpsgd_top", "dpfp"]


@pytest.mark.parametrize("name", ["dpsgd:top:K", "dpsgd:top:0", "rgp:bias", "objpert:lora"])
def test_a_scope_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UserError):
        plan_cells([name], [3.0], {}, None)
