"""Where the search spaces that ship with the project are."""

from pathlib import Path

from dpfp_ray.errors import UserError


def space_path(name: str) -> Path:
    """`search_spaces/NAME.yaml`, in a checkout or in an installed package."""
    path = Path(__file__).parent / "search_spaces" / f"{name}.yaml"
    if not path.exists():
        raise UserError(f"there is no search space named {name!r}")
    return path
