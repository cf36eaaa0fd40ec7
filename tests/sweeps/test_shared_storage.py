"""A store that a machine of the cluster does not see is refused before anything is run."""

from pathlib import Path

import pytest

from dpfp_ray.plan.errors import UserError
from dpfp_ray.sweeps.shared_storage import check_seen_everywhere


def test_a_store_that_a_node_does_not_see_is_refused(ray_session: None, tmp_path: Path) -> None:
    import ray

    with pytest.raises(UserError, match=r"is not the same folder on .*; use one that all machines"):
        check_seen_everywhere(str(tmp_path), "marker", ray.nodes())
    (tmp_path / "marker").touch()
    check_seen_everywhere(str(tmp_path), "marker", ray.nodes())
