"""Files that somebody else may have written, read within limits of time and memory.

A few hundred bytes of YAML can unfold to billions of values, and `/dev/zero` has no end.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpfp_ray.system.errors import UserError

MOST_VALUES = 100_000  # in one YAML file
MOST_DIGITS = 300  # of a whole number in YAML; longer ones take quadratic time, and mean nothing
LARGEST_YAML = 2**22  # bytes


def read_limited(path: Path, most: int) -> bytes:
    """The bytes of a file; a UserError if there are more than `most`."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UserError(f"{path} is larger than {most / 2**20:g} MB; give another file")
    return content


def parse_yaml(content: bytes, name: str, most: int = MOST_VALUES) -> Any:
    """The value in a YAML text; a UserError, which calls the text `name`, if there is none or if
    it holds more than `most` values.

    The values are counted before any is made: merge keys (<<) copy what they merge.
    """
    import yaml

    nodes = 0

    class CountingLoader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            nonlocal nodes
            nodes += 1
            if nodes > most:
                raise _TooMuch
            return super().compose_node(parent, index)

    try:
        loader = CountingLoader(content.decode("utf-8"))
        root = loader.get_single_node()
        for count, node in enumerate(_unfolded(root), start=1):
            number = node.tag == "tag:yaml.org,2002:int" and len(node.value) > MOST_DIGITS
            if count > most or number:
                raise _TooMuch
        return None if root is None else loader.construct_document(root)
    except _TooMuch:
        raise UserError(
            f"{name} holds more than {most:,} values, aliases (*) unfolded, or a number of more "
            f"than {MOST_DIGITS} digits"
        ) from None
    except RecursionError:
        raise UserError(f"{name} is nested too deeply; a plan is a list of key: value") from None
    except (yaml.YAMLError, ValueError) as error:  # also of bytes, dates and endless numbers
        raise UserError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None


class _TooMuch(Exception):
    pass


def _unfolded(root: Any) -> Iterator[Any]:
    """All nodes below `root`, those behind an alias once for each alias."""
    left = [] if root is None else [root]
    while left:
        node = left.pop()
        yield node
        if isinstance(node.value, list):
            for item in node.value:
                left += item if isinstance(item, tuple) else (item,)
