"""Plan files that were made to do harm."""

from pathlib import Path

import pytest

from dpfp_ray.plan.values import read_plan_file
from dpfp_ray.system.errors import UserError


def test_a_plan_file_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match="/dev/zero is larger than 4 MB"):
        read_plan_file("/dev/zero")


@pytest.mark.slow
def test_a_plan_file_of_two_million_values_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("[" + "1," * 2_000_000 + "]")
    with pytest.raises(UserError, match="holds more than 100,000 values"):
        read_plan_file(tmp_path / "plan.yaml")


def test_merge_keys_that_double_each_other_are_refused(tmp_path: Path) -> None:
    lines = [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 60)]
    (tmp_path / "plan.yaml").write_text("\n".join(["a0: &a0 {x: 1}", *lines]))
    with pytest.raises(UserError, match="holds more than 100,000 values"):
        read_plan_file(tmp_path / "plan.yaml")
