"""A bar for passes of an encoder over many rows."""

import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


def bar_of_rows(
    parts: list[npt.NDArray[np.int64]], description: str
) -> Iterator[npt.NDArray[np.int64]]:
    """Each of `parts`, counted on stderr if somebody looks."""
    from rich.progress import Progress, TextColumn

    from dpfp_ray.data.terminal import stderr

    columns = [*Progress.get_default_columns(), TextColumn("{task.completed:,.0f} rows")]
    with Progress(*columns, console=stderr, disable=not sys.stderr.isatty()) as bar:
        # Rows are sorted by length: those still to come cost more, so time left is a lower bound.
        task = bar.add_task(description, total=sum(len(part) for part in parts))
        for part in parts:
            yield part
            bar.advance(task, len(part))
