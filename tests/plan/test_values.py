"""Defaults that follow the method or the data are said, in help and at the start of a run."""

from dpfp_ray.plan.method_spec import all_specs
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import by_method, from_data


def test_help_names_every_method_that_uses_a_field() -> None:
    for field in ("batch_size", "epochs", "learning_rate"):
        shown = by_method(field)
        for name, spec in all_specs().items():
            assert (name in shown.replace(";", ",").replace(" ", ",").split(",")) == (
                field not in spec.unused
            )
    assert "dpsgd, opacus 1000·D/67,349, 32 or more" in by_method("batch_size")
    assert by_method("task") == ""


def test_a_run_says_what_its_data_decided() -> None:
    asked = Plan(method="dpsgd", epochs=2)
    bound = asked.bind(records=9_568, representation="mean", classes=2)
    assert from_data(asked, bound) == (
        "from the data: D = 9,568 records, K = 2 classes, representation mean, batch_size 142, "
        "delta 5.226e-05"
    )


def test_persons_are_counted_as_persons() -> None:
    asked = Plan(method="objpert", representation="mean", delta=1e-5, user_column="author")
    assert "D = 46 persons" in from_data(asked, asked.bind(records=46, classes=2))


def test_one_release_has_no_batch_to_speak_of() -> None:
    asked = Plan(method="objpert", representation="mean", delta=1e-5)
    assert from_data(asked, asked.bind(records=100, classes=3)) == (
        "from the data: D = 100 records, K = 3 classes"
    )
