"""How fast a step is on this machine, and how much memory it takes: the table of docs/gpu.md.

Examples:

  dpfp bench --device cuda
  dpfp bench --device cuda --models large --methods non_private,dpsgd --batches 256 --json

Random weights and made-up rows: nothing is downloaded, and no ledger is charged. A cell that cannot
be measured here, for want of a GPU or of memory, says so.
"""

import argparse
from typing import TYPE_CHECKING, Any

from dpfp_ray.cli.options import adder, positive
from dpfp_ray.system.whole_files import to_json

if TYPE_CHECKING:
    from dpfp_ray.training.bench import Speed

LISTS = ("models", "methods", "precisions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--device cuda|cpu", "where (default: a GPU where torch sees one)", default="")
    add("--models LIST", "of mini, base, large (default: all)")
    add("--methods LIST", "of non_private, dpfp, dpsgd (default: all)")
    add("--precisions LIST", "of fp32, bf16 (default: both)")
    add("--batches LIST", "rows of a step (default: 32,1024)")
    add("--length N", "tokens of a row (default: 128)", type=positive, default=128)
    add("--seconds S", "of measured steps for each cell (default: 5)", type=float, default=5.0)
    add("--json", "print the cells as a JSON list")


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray import UserError, bench

    given: dict[str, Any] = {
        name: tuple(getattr(arguments, name).split(","))
        for name in LISTS
        if getattr(arguments, name)
    }
    given |= {name: getattr(arguments, name) for name in ("device", "length", "seconds")}
    if arguments.batches:
        try:
            given["batches"] = tuple(positive(word) for word in arguments.batches.split(","))
        except (ValueError, argparse.ArgumentTypeError):
            text = f"--batches {arguments.batches}: give whole numbers of 1 or more, as in 32,1024"
            raise UserError(text) from None
    speeds = bench(**given)
    if arguments.json:
        print(to_json([vars(speed) for speed in speeds]))
        return 0
    heads = ("model", "method", "precision", "B", "ms a step", "examples/s", "of non-private")
    print(f"| {' | '.join((*heads, 'peak GiB'))} |")
    print("| --- " * (len(heads) + 1) + "|")
    for speed in speeds:
        print(line(speed), flush=True)
    return 0


def line(speed: "Speed") -> str:
    """A line of the Markdown table."""
    if speed.seconds_per_step is None:
        cells = [speed.note, "", "", ""]
    else:
        share, peak = speed.of_non_private, speed.peak_memory_bytes or 0
        cells = [
            f"{1000 * speed.seconds_per_step:,.1f}",
            f"{speed.examples_per_second:,.0f}",
            "—" if share is None else f"{share:.2f}",
            f"{peak / 2**30:.1f}",
        ]
    kind = (speed.model, speed.method, speed.precision, f"{speed.batch_size:,}")
    return f"| {' | '.join((*kind, *cells))} |"
