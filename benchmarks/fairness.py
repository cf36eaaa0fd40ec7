"""Our DP-SGD beside Opacus itself: accuracy, examples a second and memory, at equal ε and settings.

  python benchmarks/fairness.py --data-dir /path/to/SST-2 --output runs/fairness

One run at a time, on one thread, the methods in turns within each seed. Prints Markdown tables;
committed results are in docs/fairness.md. Stopped, the same command goes on where it was.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from dpfp_ray import compare
from dpfp_ray.results.cells import Cell, cells_of
from dpfp_ray.results.contests import contests_of
from dpfp_ray.results.runs import read_runs
from dpfp_ray.results.statistics import Pair
from dpfp_ray.results.store import load_records

HEADS = ["dpsgd:head", "opacus:head"]
ENCODER = {"max_train": 512, "max_dev": 100, "batch_size": 64, "epochs": 1}
ONE_AT_A_TIME: dict[str, Any] = {"concurrency": 1, "cpus_per_worker": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="SST-2 in GLUE's layout")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    where = {"output": arguments.output, "ledger": arguments.output / "ledger"}
    sst2 = {"task": "sst2", "data_dir": arguments.data_dir, "representation": "mean"}
    run("sst2", where, methods=HEADS, epsilon=[1, 3, 8], seeds=arguments.seeds, **sst2)
    accuracy_table(arguments.output / "sst2")
    for mode in ("ghost", "functorch"):
        run(f"sst2-{mode}", where, methods=["opacus:head"], grad_sample_mode=mode, seeds=2, **sst2)
    for mode in ("ghost", "hooks"):
        both = ["dpsgd", "opacus"] if mode == "ghost" else ["opacus"]
        run(f"demo-{mode}", where, methods=both, grad_sample_mode=mode, seeds=3, **ENCODER)
    for name in ("sst2", "sst2-ghost", "sst2-functorch", "demo-ghost", "demo-hooks"):
        cost_lines(arguments.output / name)


def run(name: str, where: dict[str, Path], **asked: Any) -> None:
    compare(output=where["output"] / name, ledger=where["ledger"], **asked, **ONE_AT_A_TIME)


def cells_in(store: Path) -> list[Cell]:
    return cells_of(read_runs(load_records(store)))


def accuracy_table(store: Path) -> None:
    """Both methods at each ε, and the paired test over dev rows and seeds."""
    print("\n| ε | dpsgd | opacus | dpsgd − opacus, 95% | p | ε of opacus by PRV, RDP |")
    print("| --- | --- | --- | --- | --- | --- |")
    for contest in contests_of(cells_in(store)):
        by_name = {cell.base_method: cell for cell in contest.ranked}
        ours, theirs = by_name["dpsgd"], by_name["opacus"]
        pair = contest.pair(ours, theirs)
        claim = theirs.first.record["privacy"]["claim"]["epsilon"]
        own = ", ".join(f"{value:.3f}" for value in claim.values())
        shown = " | ".join([percent(ours), percent(theirs), difference(pair), own])
        print(f"| {contest.budget.epsilon if contest.budget else '—':g} | {shown} |")


def percent(cell: Cell) -> str:
    return f"{100 * cell.accuracy:.2f} ± {100 * (cell.spread or 0):.2f}"


def difference(pair: Pair | None) -> str:
    if pair is None:
        return "— | —"
    low, high = pair.interval
    return f"{100 * pair.difference:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}] | {pair.p:.2f}"


def cost_lines(store: Path) -> None:
    """Examples a second and peak memory: the mean over seeds, and the seeds."""
    for cell in cells_in(store):
        record = cell.first.record
        mode = record["plan"]["grad_sample_mode"] if cell.base_method == "opacus" else "ghost, ours"
        rates = column(cell.runs, "examples_per_second")
        memory = column(cell.runs, "peak_memory_bytes")
        print(
            f"| {store.name}, ε = {cell.key.epsilon:g} | {cell.key.method} ({mode}) "
            f"| {mean(rates):,.0f} ({', '.join(f'{rate:,.0f}' for rate in rates)}) "
            f"| {mean(memory) / 2**20:,.0f} |"
        )


def column(runs: Sequence[Any], name: str) -> list[float]:
    return [run.row[name] for run in runs]


if __name__ == "__main__":
    main()
