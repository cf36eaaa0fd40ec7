"""`representation: auto` follows the encoder's shape, the task's and the noise; never a record."""

import pytest

from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.prepare import TaskFacts, choose_representation
from tests.support.tiny_models import build_tiny

MANY, FEW = TaskFacts(200_000, 2, paired=False), TaskFacts(60, 2, paired=False)
PAIRS = TaskFacts(60, 3, paired=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "model", "bert", layers=2)


def plan(model: str, method: str = "objpert", **changes: object) -> Plan:
    return Plan(model=model, method=method, **changes)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [{"method": "objpert"}, {"mode": "moments"}, {"method": "dpsgd", "scope": "head"}],
)
def test_many_records_afford_all_layers_and_few_do_not(model: str, method: dict[str, str]) -> None:
    asked = Plan(**{"model": model, "method": "dpfp", **method})  # type: ignore[arg-type]
    assert choose_representation(asked, MANY) == "layers"
    assert choose_representation(asked, FEW) == "pooler"  # what the tiny BERT was made for


def test_pairs_on_a_frozen_encoder_are_read_text_by_text(model: str) -> None:
    for method in ("objpert", "dpsgd", "non_private"):
        assert choose_representation(plan(model, method, scope="head"), PAIRS) == "pair"
    assert choose_representation(plan(model, "dpsgd"), PAIRS) == "pooler"  # trained: jointly
    assert choose_representation(plan(model, representation="mean"), PAIRS) == "mean"


def test_a_pair_needs_two_texts(model: str) -> None:
    with pytest.raises(UserError, match="representation pair needs two texts"):
        choose_representation(plan(model, representation="pair"), FEW)


def test_what_needs_a_frozen_encoder_is_refused_without_one() -> None:
    with pytest.raises(UserError, match="layers is read off a frozen encoder, but scope is all"):
        Plan(method="dpsgd", representation="layers")
    with pytest.raises(UserError, match="centring needs a frozen encoder"):
        Plan(method="dpsgd", scope="bias", centring="dev")
    for wrong in ("layers:", "layers:4,3", "layers:a", "layers:1,1"):
        with pytest.raises(UserError, match="in rising order"):
            Plan(method="objpert", representation=wrong)
    with pytest.raises(UserError, match="unknown representation 'layer'"):
        Plan(method="objpert", representation="layer")
