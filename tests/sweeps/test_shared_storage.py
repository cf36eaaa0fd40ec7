"""A store that a machine of the cluster does not see is refused before anything is run."""

from pathlib import Path

import pytest

from dpfp_ray.plan.errors import UserError
from dpfp_ray.sweeps import runner
from dpfp_ray.sweeps.ray_options import RayOptions
from dpfp_ray.sweeps.shared_storage import check_seen_everywhere
from dpfp_ray.sweeps.sweep_trials import InputsOnce


def test_a_store_that_a_node_does_not_see_is_refused(ray_session: None, tmp_path: Path) -> None:
    import ray

    with pytest.raises(UserError, match=r"is not the same folder on .*; use one that all machines"):
        check_seen_everywhere(str(tmp_path), "marker", ray.nodes())
    (tmp_path / "marker").touch()
    check_seen_everywhere(str(tmp_path), "marker", ray.nodes())


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_runner_asks_every_node_where_there_are_several(
    nodes: int, ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    asked: list[str] = []
    living = ray.nodes() * nodes
    monkeypatch.setattr(ray, "nodes", lambda: living)
    monkeypatch.setattr(
        runner, "check_seen_everywhere", lambda storage, marker, found: asked.append(storage)
    )
    with runner.Runner("test", str(tmp_path), RayOptions(seed=5), InputsOnce()) as one:
        one.check_storage()
    assert asked == [str(tmp_path)] * (nodes - 1)
