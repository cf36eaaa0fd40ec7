import pytest

from dpfp_ray.sweeps.cluster import Resources, plan_resources
from dpfp_ray.system.errors import UserError

LAPTOP = [{"CPU": 8.0, "memory": 1e9}]
THREE = [{"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 1.0}]
GPUS = [{"CPU": 16.0, "GPU": 4.0}, {"CPU": 16.0, "GPU": 4.0}]


def test_one_thread_a_trial_fills_a_laptop() -> None:
    assert plan_resources(LAPTOP) == Resources(1, 0.0, 1, 8)


def test_fewer_trials_get_more_threads() -> None:
    assert plan_resources(LAPTOP, concurrency=3) == Resources(2, 0.0, 1, 3)


def test_a_worker_does_not_span_nodes() -> None:
    assert plan_resources(THREE, workers=2) == Resources(2, 0.0, 2, 1)
    assert plan_resources(THREE, workers=3) == Resources(1, 0.0, 3, 1)
    assert plan_resources(THREE, cpus=2).slots == 2


def test_concurrency_is_at_most_what_fits() -> None:
    assert plan_resources(THREE, concurrency=100) == Resources(1, 0.0, 1, 5)


def test_a_cluster_that_may_grow_is_asked_for_all_that_could_be_used() -> None:
    nobody = [{"memory": 1e9}]  # a head that runs nothing
    assert plan_resources(THREE, concurrency=100, may_grow=True) == Resources(1, 0.0, 1, 100)
    assert plan_resources(nobody, concurrency=3, may_grow=True) == Resources(1, 0.0, 1, 3)
    assert plan_resources(LAPTOP, concurrency=3, may_grow=True) == Resources(2, 0.0, 1, 3)
    assert plan_resources(THREE, may_grow=True).slots == 5  # nobody said how many
    with pytest.raises(UserError, match="do not fit"):
        plan_resources(nobody, may_grow=True)


def test_gpus_limit_and_share_the_cores() -> None:
    assert plan_resources(GPUS, gpus=1) == Resources(4, 1, 1, 8)
    assert plan_resources(GPUS, gpus=0.5).slots == 16
    assert plan_resources(GPUS, workers=4, gpus=1) == Resources(4, 1, 4, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 6}, ["6 workers of 1 CPUs", "2 CPUs, 2 CPUs, 1 CPUs", "--workers"]),
        ({"cpus": 3}, ["1 workers of 3 CPUs"]),
        ({"gpus": 1.0}, ["1 GPUs", "0 GPUs", "--gpus-per-worker"]),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, float], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        plan_resources(THREE, **options)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value
