"""Run the study: every cell of its plans, cheap ones first, each with a record of its own.

  python benchmarks/study/run.py                       # everything; goes on where it was
  python benchmarks/study/run.py sst2-frozen --list    # the cells of one plan and their state
  python benchmarks/study/run.py --workers 2 --threads 1

Stopped or killed at any time, the same command continues: a finished cell is not run again, an
unfinished one goes on from its last minute. Any number of these processes may work side by side.
The secret seed of an unfinished run is in its folder, and goes when the run is finished.
"""

import argparse
import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cells import HERE, PLANS, Cell, all_cells, check_data

from dpfp_ray import UserError

LINE_EVERY_SECONDS = 60.0
LOCKS = ".locks"


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    cells = all_cells(arguments.data, arguments.plans, arguments.only, arguments.max_seeds)
    if arguments.list:
        for cell in cells:
            print(f"{state(cell, arguments.records):10s} {cell.name}")
        return 0
    open_cells = [cell for cell in cells if cell.record(arguments.records) is None]
    check_data(open_cells)
    if arguments.workers == 1:
        return work(cells, arguments)
    return watch(cells, arguments)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", help="names of plans (default: all)")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), metavar="DIR",
                        help="folder of SST-2/ and MNLI/ with GLUE's TSV files "
                        "(default: ../shared/data)")  # fmt: skip
    parser.add_argument("--plans", type=Path, default=PLANS, metavar="DIR")
    parser.add_argument("--records", type=Path, default=HERE / "records", metavar="DIR")
    parser.add_argument("--ledger", type=Path, default=None, metavar="DIR",
                        help="of the study alone (default: ledger beside the records)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="cells side by side")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each of them")
    parser.add_argument("--max-seeds", type=int, metavar="N", help="of each cell at most")
    parser.add_argument("--list", action="store_true", help="run nothing, list the cells")
    arguments = parser.parse_args(argv)
    arguments.ledger = arguments.ledger or arguments.records.parent / "ledger"
    return arguments


def work(cells: list[Cell], arguments: argparse.Namespace) -> int:
    """Run what nobody else runs, in order; 1 if a cell failed."""
    failed = []
    for number, cell in enumerate(cells, start=1):
        with claimed(cell, arguments.records) as mine:
            if not mine or cell.record(arguments.records) is not None:
                continue
            say(f"[{number}/{len(cells)}] {cell.name}")
            started = time.monotonic()
            try:
                accuracy = run_cell(cell, arguments)
            except Exception as error:  # the others are worth their own try
                failed.append(cell.name)
                say(f"{cell.name} failed: {type(error).__name__}: {error}")
                continue
            say(f"{cell.name}: accuracy {accuracy:.4f}, {time.monotonic() - started:.0f} s")
    for name in failed:
        say(f"failed: {name}")
    return 1 if failed else 0


def run_cell(cell: Cell, arguments: argparse.Namespace) -> float:
    """By the front door; what it writes is the record."""
    from dpfp_ray import audit, train

    folder = arguments.records / cell.name
    common = {"output": folder, "threads": arguments.threads, "ledger": arguments.ledger}
    if cell.audit is not None:
        return float(audit(cell.plan, **common, **cell.audit).accuracy)
    return train(cell.plan, weights=False, **common).accuracy


@contextlib.contextmanager
def claimed(cell: Cell, records: Path) -> Iterator[bool]:
    """Whether the cell is this process's; a process that dies loses its claims."""
    lock = lock_of(cell, records)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        file.truncate(0)
        print(os.getpid(), file=file, flush=True)
        yield True


def lock_of(cell: Cell, records: Path) -> Path:
    return records / LOCKS / cell.name.replace("/", "__")


def state(cell: Cell, records: Path) -> str:
    if cell.record(records) is not None:
        return "finished"
    # Asking for the lock instead could make a worker that asks at this moment pass the cell over.
    with contextlib.suppress(OSError, ValueError):
        os.kill(int(lock_of(cell, records).read_text()), 0)
        return "running"
    return "begun" if (records / cell.name).exists() else "to do"


def watch(cells: list[Cell], arguments: argparse.Namespace) -> int:
    """Several workers, and a line a minute about all of them."""
    own = [sys.executable, __file__, *sys.argv[1:], "--workers", "1"]
    workers = [subprocess.Popen(own) for _ in range(arguments.workers)]
    shown = time.monotonic()
    try:
        while any(worker.poll() is None for worker in workers):
            time.sleep(1)
            if time.monotonic() - shown > LINE_EVERY_SECONDS:
                shown = time.monotonic()
                say(progress(cells, arguments.records))
    except KeyboardInterrupt:  # the workers got it too, and save what they do
        pass
    codes = [worker.wait() for worker in workers]
    say(progress(cells, arguments.records))
    return max((abs(code) for code in codes), default=0)


def progress(cells: list[Cell], records: Path) -> str:
    states = {cell.name: state(cell, records) for cell in cells}
    running = [name for name, found in states.items() if found == "running"]
    finished = sum(found == "finished" for found in states.values())
    now = f"; running: {', '.join(running)}" if running else ""
    return f"{time.strftime('%H:%M:%S')}  {finished} of {len(cells)} cells finished{now}"


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        say(f"study: {error}")
        sys.exit(2)
    except KeyboardInterrupt as stopped:
        say(f"study: {str(stopped) or 'stopped'}")
        sys.exit(130)
