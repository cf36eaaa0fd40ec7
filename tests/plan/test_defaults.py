"""A method's own settings are scaled to other sizes as its authors scaled them."""

import pytest

from dpfp_ray.plan.method_spec import METHODS, SST2_RECORDS, Defaults, find_spec, scopes_of


def defaults_for(method: str, scope: str = "all") -> Defaults:
    spec = find_spec(method)
    assert spec is not None
    return spec.defaults_for(scope)


@pytest.mark.parametrize(
    ("records", "factor", "epochs"),
    [(104_743, 1.55, 6), (363_846, 5.4, 15), (392_702, 5.8, 18)],
)
def test_dpsgd_keeps_its_sampling_rate_on_larger_sets_and_trains_longer(
    records: int, factor: float, epochs: int
) -> None:
    dpsgd = defaults_for("dpsgd")
    assert dpsgd.batch_size_at(records) == pytest.approx(1000 * factor, rel=0.02)
    assert dpsgd.batch_size_at(records) / records == pytest.approx(1000 / SST2_RECORDS, rel=1e-3)
    assert dpsgd.epochs_at(records) == epochs


@pytest.mark.parametrize(("records", "batch"), [(64, 32), (20, 20), (1, 1), (9_568, 142)])
def test_a_batch_that_follows_the_data_stays_readable_on_small_sets(
    records: int, batch: int
) -> None:
    assert defaults_for("dpsgd").batch_size_at(records) == batch


@pytest.mark.parametrize("method", ["dpfp", "non_private"])
@pytest.mark.parametrize("records", [1000, 10**8])
def test_unscaled_methods_keep_batch_and_epochs(method: str, records: int) -> None:
    defaults = defaults_for(method)
    assert defaults.batch_size_at(records) == defaults.batch_size
    assert defaults.epochs_at(records) == defaults.epochs


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("records", [1, 10, 5000])
def test_small_sets_get_a_batch_they_can_fill_and_no_fewer_epochs(
    method: str, records: int
) -> None:
    defaults = defaults_for(method)
    assert 1 <= defaults.batch_size_at(records) <= records
    assert defaults.epochs_at(records) == defaults.epochs


@pytest.mark.parametrize("method", [m for m in METHODS if {"all", "head"} <= {*scopes_of(m)}])
def test_a_head_learns_faster_than_an_encoder(method: str) -> None:
    head, whole = defaults_for(method, "head"), defaults_for(method, "all")
    assert head.learning_rate > whole.learning_rate


def test_head_only_dpsgd_takes_a_quarter_of_the_records_a_step() -> None:
    head = defaults_for("dpsgd", "head")
    assert head.batch_size_at(1000) == 250
    assert head.epochs_at(10**6) == 20
