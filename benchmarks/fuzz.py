"""Feed the product spoilt inputs: no traceback, no hang, no half-written file, whatever comes.

    .venv/bin/python benchmarks/fuzz.py --cases 10000 --seed 1 --output benchmarks/fuzz.md
    .venv/bin/python benchmarks/fuzz.py --only states --cases 500
    .venv/bin/python benchmarks/fuzz.py --only plans --seed 1 --case 123     # one case again
    .venv/bin/python benchmarks/fuzz.py --seed 1 --minutes 4 --kept FILE     # a piece (pieces.py)
    .venv/bin/python benchmarks/fuzz.py --join FILE FILE --output benchmarks/fuzz.md

Cases are of six kinds (plans, search spaces, data files, records, states, HTTP requests); case
number n of a kind follows from the seed alone. They run in this process' children, a few hundred in
each, so that a crash costs one case. What goes wrong is told once for each place in the code, with
the smallest input that still does it. Exit code 1 if anything went wrong, 3 if time was up before
the last case.
"""

import argparse
import json
import os
import pickle
import platform
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.cases import Case, Inputs, data, plans, records, spaces
from fuzzing.http_requests import http
from fuzzing.judge import run_case
from fuzzing.minimise import minimise
from fuzzing.states import states
from pieces import MORE, Kept

from dpfp_ray.data import demo
from dpfp_ray.system.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
AREAS: dict[str, Callable[[Inputs, Random], Case]] = {
    "plans": plans,
    "spaces": spaces,
    "data": data,
    "records": records,
    "states": states,
    "http": http,
}
BATCH = 100  # cases in one process
MEMORY = 6 * 2**30  # bytes that a process may allocate
LINE_SECONDS = 60.0


@dataclass
class Wrong:
    """One way to fail, and the smallest input that was found for it."""

    area: str
    number: int
    kind: str
    details: str
    shown: str
    payload: str
    times: int = 1


@dataclass
class Found:
    """What came out so far; a `kind` of "" is a case that ended well."""

    counts: Counter[tuple[str, str]]  # by area and kind
    wrong: dict[tuple[str, str, str], Wrong]  # by area, kind and place

    @staticmethod
    def of(facts: dict[str, Any]) -> "Found":
        wrong = [Wrong(**one) for one in facts.get("wrong", [])]
        return Found(
            Counter({(area, kind): n for area, kind, n in facts.get("counts", [])}),
            {(one.area, one.kind, place(one.details)): one for one in wrong},
        )

    def facts(self) -> dict[str, Any]:
        return {
            "counts": [[area, kind, n] for (area, kind), n in self.counts.items()],
            "wrong": [asdict(one) for one in self.wrong.values()],
        }


def case_of(inputs: Inputs, area: str, seed: int, number: int) -> Case:
    return AREAS[area](inputs, Random(f"{seed} {area} {number}"))


def run_number(inputs: Inputs, area: str, seed: int, number: int) -> tuple[str, str, Case]:
    case = case_of(inputs, area, seed, number)
    kind, details, _ = run_case(lambda folder: case.run(case.payload, folder), allowed(inputs))
    return kind, details, case


def allowed(inputs: Inputs) -> tuple[str, ...]:
    """Where a case may write besides its own folder."""
    return (str(inputs.world),)


def run_batch(
    inputs: Inputs, area: str, seed: int, numbers: Sequence[int]
) -> Iterator[tuple[int, str, str]]:
    """(number, what is wrong, details) of each case, from a child; one that it dies of, too."""
    left = list(numbers)
    while left:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            inputs.app = None  # one of the parent's would have the locks of its threads
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            with os.fdopen(writing, "wb") as out:
                for number in left:
                    kind, details, _ = run_number(inputs, area, seed, number)
                    said = pickle.dumps((number, kind, details))
                    out.write(struct.pack("<I", len(said)) + said)
                    out.flush()
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as told:
            while header := told.read(4):
                number, kind, details = pickle.loads(told.read(struct.unpack("<I", header)[0]))
                left.remove(number)
                yield number, kind, details
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if left and code != 0:
            yield left.pop(0), "crash", f"the process ended with {code}"


def smallest(inputs: Inputs, area: str, seed: int, number: int, kind: str) -> Case:
    """The case with the smallest payload that goes wrong in the same way and place."""
    case = case_of(inputs, area, seed, number)
    if kind in ("crash", "hang"):
        return case

    def signature(payload: object) -> tuple[str, str]:
        kind, details, _ = run_case(lambda folder: case.run(payload, folder), allowed(inputs))
        return kind, place(details) or details.partition(":")[0]

    first = signature(case.payload)
    found = minimise(case.payload, lambda payload: signature(payload) == first)
    return Case(case.area, case.shown, found, case.run)


def place(details: str) -> str:
    """Where in the code, if a traceback says so."""
    return details.rpartition(" at ")[2] if " at " in details else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=10_000, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=AREAS, help="one kind")
    parser.add_argument("--case", type=int, help="with --only: this number alone, in this process")
    parser.add_argument("--minutes", type=float, help="begin no further cases after so many")
    parser.add_argument("--kept", help="a file: go on where the piece before stopped")
    parser.add_argument("--join", nargs="+", help="run nothing: one table of these --kept files")
    parser.add_argument("--json", action="store_true", help="what went wrong, as a JSON list")
    parser.add_argument("--output", help="also write the table to this file")
    arguments = parser.parse_args(argv)
    if arguments.join:
        return join(arguments.join, arguments.output)
    world = Path(tempfile.mkdtemp(prefix="fuzz-"))
    sys.path[:0] = [str(ROOT)]  # for the tests' tiny models
    os.environ |= {
        "DPFP_CACHE": str(world / "cache"),
        "DPFP_LEDGER": str(world / "ledger"),
        "MPLCONFIGDIR": str(world / "matplotlib"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    tempfile.tempdir = str(world)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    areas = [arguments.only] if arguments.only else list(AREAS)
    kept = Kept(arguments.kept, cases=arguments.cases, seed=arguments.seed, areas=areas)
    found = Found.of(kept.facts)
    setattr(demo, "pip_download", no_download)  # noqa: B010 - not its own name
    try:
        inputs = Inputs(world)
        if arguments.case is not None:
            kind, details, case = run_number(
                inputs, arguments.only or "plans", arguments.seed, arguments.case
            )
            print(f"{case.shown}\n{case.payload!r}\n{kind or 'nothing wrong'} {details}")
            return 1 if kind else 0
        minutes = float("inf") if arguments.minutes is None else arguments.minutes
        run_all(inputs, areas, arguments.cases, arguments.seed, 60 * minutes, found)
    finally:
        shutil.rmtree(world, ignore_errors=True)
    kept.write(**found.facts())
    shown = table(found, areas)
    print(json.dumps(found.facts()["wrong"], indent=1) if arguments.json else shown)
    if arguments.output:
        words = f"benchmarks/fuzz.py --cases {arguments.cases} --seed {arguments.seed}"
        Path(arguments.output).write_text(report(shown, words, kept.words))
    if found.wrong:
        return 1
    return 0 if found.counts.total() == arguments.cases else MORE


def no_download(*asked: object, **options: object) -> Path:
    """The demo's data, which is what a plan without any data means."""
    raise UserError("nothing is loaded from anywhere here")


def join(files: Sequence[str], output: str | None) -> int:
    """The table of several runs of single kinds, side by side."""
    all_of_them = [json.loads(Path(file).read_text()) for file in files]
    found = Found(Counter(), {})
    words, how = [], []
    for one in all_of_them:
        part, settings = Found.of(one["facts"]), one["settings"]
        found.counts += part.counts
        found.wrong |= part.wrong
        words.append(f"--only {','.join(settings['areas'])} --cases {settings['cases']}")
        words[-1] += f" --seed {settings['seed']}"
        how.append(f"{one['seconds'] / 60:.0f}")
    commits = dict.fromkeys(commit for one in all_of_them for commit in one["commits"])
    areas = [area for area in AREAS if any(where == area for where, _ in found.counts)]
    shown = table(found, areas)
    print(shown)
    if output:
        how_long = f"{' + '.join(how)} minutes, in pieces, commit {', '.join(commits)}"
        text = report(shown, "`, `".join(f"benchmarks/fuzz.py {one}" for one in words), how_long)
        Path(output).write_text(text)
    return 1 if found.wrong else 0


def run_all(
    inputs: Inputs, areas: Sequence[str], cases: int, seed: int, seconds: float, found: Found
) -> None:
    """All cases that `found` does not have yet, as far as the `seconds` allow."""
    counts, wrong = found.counts, found.wrong
    began = said = time.monotonic()
    if {"data", "records"} & set(areas):
        inputs.result  # noqa: B018  (before the first fork: all children use the same run)
    for area in areas:
        done = sum(n for (where, _), n in counts.items() if where == area)
        numbers = range(done, cases // len(areas) + (areas.index(area) < cases % len(areas)))
        for start in range(0, len(numbers), BATCH):
            if time.monotonic() - began > seconds:
                return
            for number, kind, details in run_batch(
                inputs, area, seed, numbers[start : start + BATCH]
            ):
                counts[area, kind] += 1
                key = area, kind, place(details)
                if kind and key in wrong:
                    wrong[key].times += 1
                elif kind:
                    case = smallest(inputs, area, seed, number, kind)
                    shown = repr(case.payload)
                    wrong[key] = Wrong(area, number, kind, details, case.shown, shown[:1500])
                    print(f"{asdict(wrong[key])}", file=sys.stderr, flush=True)
                if time.monotonic() - said > LINE_SECONDS:
                    said = time.monotonic()
                    print(
                        f"{(said - began) / 60:.0f} min: {counts.total():,} cases, {len(wrong)} "
                        "ways to fail",
                        file=sys.stderr,
                        flush=True,
                    )


KINDS = ("traceback", "hang", "crash", "half-written", "outside")


def table(found: Found, areas: Sequence[str]) -> str:
    counts, wrong = found.counts, list(found.wrong.values())
    lines = [f"| cases of | number | {' | '.join(KINDS)} | other |"]
    lines.append("| --- " * (3 + len(KINDS)) + "|")
    for area in areas:
        own = {kind: n for (where, kind), n in counts.items() if where == area}
        other = sum(n for kind, n in own.items() if kind and kind not in KINDS)
        cells = [sum(own.values()), *(own.get(kind, 0) for kind in KINDS), other]
        lines.append(f"| {area} | {' | '.join(f'{cell:,}' for cell in cells)} |")
    lines += ["", f"{sum(counts.values()):,} cases, {len(wrong) or 'no'} ways to fail."]
    for one in wrong:
        lines.append(f"- {one.area} {one.number}: {one.kind} ({one.times} times) {one.details}")
        lines.append(f"  `{one.shown}` with {one.payload}")
    return "\n".join(lines)


def report(found: str, words: str, how: str) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    return (
        "# Fuzz: spoilt inputs\n\n"
        f"`{words}` on {now}, {how}; {machine}, shared.\n"
        "*other*: no reason, several lines or control codes after exit code 2; another exit code; a"
        "\nstate that was read and is not what was written; an answer of the service that is no "
        "answer.\n\n"
        f"{found}\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
