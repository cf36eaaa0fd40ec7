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


LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 13)
)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (LAUGHS, "holds more than 100,000 values"),
        ("!!python/object/apply:os.system [id]\n", r"is not valid YAML.*python/object"),
        ("[" * 5_000, "nested too deeply"),
        (f"epsilon: {'1:' * 20_000}1\n", "more than 300 digits"),
        ("epsilon: \0", "is not valid YAML"),
    ],
    ids=["aliases", "tag", "nested", "number", "control"],
)
def test_a_harmful_plan_file_is_refused(tmp_path: Path, plan: str, why: str) -> None:
    (tmp_path / "plan.yaml").write_text(plan)
    with pytest.raises(UserError, match=why):
        read_plan_file(tmp_path / "plan.yaml")
