"""Workers find each other by the address that Ray knows, and give back what they held."""

import os
from pathlib import Path

import pytest

from dpfp_ray.sweeps.worker_group import INTERFACE, GroupConfig, interface_of, use_node_interface
from tests.support.ray_runs import wait_for


def test_an_address_of_this_machine_has_an_interface() -> None:
    assert interface_of("127.0.0.1") in ("lo", "lo0")


def test_an_address_of_no_interface_leaves_the_choice_to_gloo() -> None:
    assert interface_of("203.0.113.9") is None  # of a network for documentation


def test_an_interface_that_the_user_has_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "ib0")
    use_node_interface()
    assert os.environ[INTERFACE] == "ib0"


@pytest.mark.slow
def test_workers_that_cannot_meet_give_back_what_they_held(
    ray_session: None, tmp_path: Path
) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def free() -> float:
        return ray.available_resources().get("CPU", 0.0)

    trainer = TorchTrainer(
        lambda: None,
        torch_config=GroupConfig(init_method="by pigeon"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="apart", storage_path=str(tmp_path)),
    )
    with pytest.raises(Exception, match="pigeon"):
        trainer.fit()
    wait_for(lambda: free() == ray.cluster_resources()["CPU"], "all CPUs to be free")
