"""Every speed bar, measured in one run: `make bench` writes benchmarks/RESULTS.md.

    python benchmarks/bench.py                     # about 25 minutes on two quiet cores
    python benchmarks/bench.py --quick             # about 3: fewer rounds, no `make demo`
    python benchmarks/bench.py --only dpfp,noise   # some; nothing is written without --output
    python benchmarks/bench.py --data-dir SST-2    # the bars' own rows; else the demo's sentences

Contestants take turns in one process, round by round, and only ratios within a round count
(speed/race.py). Nothing else should run on the machine; its load is recorded.
"""

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from speed import kernels, on_ray, steps
from speed.bars import Bar, missing_bar
from speed.contestants import Where

from dpfp_ray.training.machine import available_cores, use_threads

RESULTS = Path(__file__).parent / "RESULTS.md"
PARTS: dict[str, Callable[[Where], list[Bar]]] = {
    "dpfp": steps.dpfp,
    "opacus": steps.opacus,
    "dpsgd": steps.dpsgd,
    "trainer": steps.trainer,
    "shares": steps.shares,
    "flops": kernels.flops,
    "padding": kernels.padding,
    "calibration": kernels.calibrations,
    "noise": kernels.noise,
    "sweep": on_ray.sweeps,
    "closed_form": on_ray.closed_form,
    "workers": on_ray.workers,
    "ray_train": on_ray.ray_train,
    "demo": on_ray.demo,
}
NOT_QUICK = ("demo",)


def machine() -> str:
    """What it ran on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "transformers", "opacus", "ray")
    )
    cpu = names[0] if names else platform.processor()
    return f"{cpu}, {available_cores()} cores; Python {platform.python_version()}, {packages}"


def measure(names: list[str], where: Where) -> tuple[list[Bar], list[str]]:
    """The bars, and what each part took."""
    bars: list[Bar] = []
    notes: list[str] = []
    for name in names:
        use_threads(None)
        load, started = os.getloadavg()[0], time.perf_counter()
        try:
            found = PARTS[name](where)
        except Exception as error:  # the other bars are worth having
            traceback.print_exc()
            found = [missing_bar(name, "≥ 0", f"failed: {type(error).__name__}: {error}")]
        took = time.perf_counter() - started
        for bar in found:
            print(f"{bar.outcome:9} {bar.name}: {bar.value} ({bar.goal})", file=sys.stderr)
        bars += found
        notes.append(f"{name} {took:.0f} s (load {load:.1f})")
    return bars, notes


def report(bars: list[Bar], notes: list[str], command: str) -> str:
    count = {outcome: sum(bar.outcome == outcome for bar in bars) for outcome in ("met", "missed")}
    head = [
        "# Speed: every bar in one run",
        "",
        f"    {command}",
        "",
        f"{machine()}. {time.strftime('%Y-%m-%d')}.",
        "",
        "Contestants take turns in one process, and ratios are those within a round: in bold",
        "their median, in brackets its 95% interval. A bar is *met* or *missed* if the whole",
        "interval is on one side of the goal, else *not known*. A ratio is measured until its",
        f"interval is within ±3% or its time is up. {count['met']} met, {count['missed']} missed, "
        f"{len(bars) - sum(count.values())} not known.",
        "",
        "| bar | goal | found | outcome | how |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows = [
        f"| {bar.name} | {bar.goal} | {bar.value} | {bar.outcome} | {bar.how} |" for bar in bars
    ]
    tail = [
        "",
        "Time and load (of the last minute) at the start of each part: " + ", ".join(notes) + ".",
    ]
    return "\n".join([*head, *rows, *tail, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data-dir", help="a folder with SST-2's train.tsv and dev.tsv")
    parser.add_argument("--output", type=Path, help=f"default, if all is measured: {RESULTS.name}")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    given = parser.parse_args()
    where = Where(given.data_dir and str(Path(given.data_dir).resolve()), given.quick)
    if given.peak:
        use_threads(None)
        print(json.dumps(steps.peak_memory(given.peak, where)))
        return
    names = given.only.split(",") if given.only else list(PARTS)
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        parser.error(f"no bar is called {unknown[0]}; there are {', '.join(PARTS)}")
    if given.quick and not given.only:
        names = [name for name in names if name not in NOT_QUICK]
    bars, notes = measure(names, where)
    command = ["python benchmarks/bench.py", *(Path(word).name for word in sys.argv[1:])]
    text = report(bars, notes, " ".join(command))  # without the paths of this machine
    print(text)
    output = given.output or (None if given.only or given.quick else RESULTS)
    if output:
        output.write_text(text)


if __name__ == "__main__":
    main()
