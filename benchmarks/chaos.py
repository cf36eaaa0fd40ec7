"""Kill, damage and resume at random, and compare every end with a twin that nobody disturbed.

    .venv/bin/python benchmarks/chaos.py --minutes 30 --seed 1 --output benchmarks/chaos.md
    .venv/bin/python benchmarks/chaos.py --faults 20 --verbs train       # a minute, without Ray
    .venv/bin/python benchmarks/chaos.py --minutes 4 --kept FILE         # a piece; see pieces.py
    .venv/bin/python benchmarks/chaos.py --join FILE FILE --output benchmarks/chaos.md

One round is one command (train, audit, sweep, compare; tiny model, tiny data) that is disturbed one
to four times and run again until it ends. Then all must be as in the twin: records without their
times, weights to the last bit, the names of all files, and the ledger's sum. Of a run that was told
no seed, the seed is read from its files, and the twin is given it.

All choices of a round follow from the seed and its number; what a choice meets depends on the
clock. One command runs at a time (two, where the fault is a second driver). Exit code 1 if anything
was lost. Ctrl-C ends the round that runs, and prints the table.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from disturb import faults
from disturb.faults import Scene
from disturb.process import Hangs, Process
from disturb.works import ROOT, SEED, SEED_KNOWN, Work, all_works, differences, essence, without
from pieces import MORE, Kept

VERBS = {"train": 12.0, "audit": 6.0, "sweep": 2.0, "compare": 1.0}  # how often, against others
LINE_SECONDS = 60.0
ENDED = "had ended"
TRIES = 6  # clean runs that a round may need: after damage, one restores what was damaged


@dataclass
class Done:
    """One fault and what came of it."""

    verb: str
    fault: str
    detail: str
    code: int | None
    lost: list[str] = field(default_factory=list)

    @property
    def missed(self) -> bool:
        """It came when there was nothing left to disturb."""
        return self.detail in (ENDED, faults.NOT_THERE)


@dataclass
class Twin:
    folder: dict[str, Any]
    spent: Any
    seconds: float


class Lost(Exception):
    """Something was lost, or said in the wrong way."""


@dataclass
class Story:
    """What was done so far, and in how many rounds of each verb."""

    done: list[Done]
    rounds: Counter[str]

    @staticmethod
    def of(facts: Mapping[str, Any]) -> "Story":
        done = [Done(**one) for one in facts.get("done", [])]
        return Story(done, Counter(facts.get("rounds", {})))

    def facts(self) -> dict[str, Any]:
        return {"done": [asdict(one) for one in self.done], "rounds": dict(self.rounds)}

    @property
    def faults(self) -> int:
        return sum(not done.missed for done in self.done)

    @property
    def lost(self) -> list[str]:
        return [line for done in self.done for line in done.lost]


class Chaos:
    """The rounds so far; `world` is a folder for all that they write."""

    def __init__(
        self,
        world: Path,
        seed: int,
        verbs: Sequence[str],
        unseeded: float,
        story: Story,
        first: int = 0,
    ) -> None:
        self.world, self.seed, self.unseeded = world, seed, unseeded
        self.works = all_works(world, verbs)
        self.done, self.rounds = story.done, story.rounds
        self.twins: dict[tuple[Work, int], Twin] = {}
        self.number = first or self.rounds.total()
        # What a run reads of others' work must be there before the first, or twins would differ.
        self.environment = {
            "DPFP_CACHE": str(world / "cache"),
            "DPFP_SAVE_SECONDS": "0.02",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": str(world),
            "RAY_object_store_memory": str(100 * 2**20),
            "RAY_worker_niceness": "0",  # at Ray's own 15, trials starve beside other work
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        if any(work.forked for work in self.works):
            import dpfp_ray.auditing.audit
            import dpfp_ray.cli.audit
            import dpfp_ray.cli.train
            import dpfp_ray.training.train  # noqa: F401  (forked commands need not import it)

    # --- one round ---

    def round(self) -> None:
        self.number += 1
        self.rng = Random(f"{self.seed} {self.number}")
        weights = [VERBS[w.verb] / sum(o.verb == w.verb for o in self.works) for w in self.works]
        [work] = self.rng.choices(self.works, weights)
        known = self.rng.random() >= self.unseeded
        place = self.world / f"round-{self.number}"
        folder, ledger = place / "work", place / "ledger"
        place.mkdir()
        before = len(self.done)
        self.seed_seen: int | None = None
        twin = self.twin(work, SEED)
        try:
            for _ in range(self.rng.randint(1, 4)):
                self.disturb(work, folder, ledger, SEED if known else None, twin.seconds)
            self.finish(work, folder, ledger, SEED if known else None)
            if not known:
                seed = self.seed_seen
                if seed is None:
                    raise Lost("the seed was never kept, so nothing could have been continued")
                twin = self.twin(work, seed)
            left = differences(essence(folder, seed_known=known), self.of_twin(twin, known))
            left += differences(self.spent(ledger), twin.spent, "ledger")
            if left:
                raise Lost("; ".join(left[:8]))
        except (Lost, Hangs, AssertionError) as problem:
            if len(self.done) == before:
                self.done.append(Done(work.verb, "none", "", None))
            kept = f"{work.verb} {work.name}: {type(problem).__name__}: {problem}; see {place}"
            self.done[-1].lost.append(kept)
            print(f"LOST {kept}", file=sys.stderr, flush=True)
        else:
            shutil.rmtree(place)
        self.rounds[work.verb] += 1

    def disturb(
        self, work: Work, folder: Path, ledger: Path, seed: int | None, seconds: float
    ) -> None:
        states = [path for path in work.states(folder) if path.stat().st_size]
        if states and self.rng.random() < 0.4 and not (folder / "result.json").exists():
            return self.damage(work, folder, ledger, seed, states)
        fitting = [fault for fault in faults.RUNNING if work.verb in fault.verbs]
        [fault] = self.rng.choices(fitting, [fault.weight for fault in fitting])
        process = self.start(work, folder, ledger, seed)
        scene = Scene(
            work,
            folder,
            lambda: self.start(work, folder, ledger, seed),
            process,
            self.rng,
            seconds,
            lambda: self.see_seed(work, folder),
        )
        self.note(Done(work.verb, fault.name, "", None))
        codes: tuple[int, ...] = ()
        if scene.wait():
            self.done[-1].detail = fault.do(scene)
            codes = fault.codes
        else:
            self.done[-1].detail = ENDED
        self.see_seed(work, folder)
        self.check_end(process, codes)

    def check_end(self, process: Process, codes: tuple[int, ...]) -> None:
        code = self.done[-1].code = process.end()
        if code not in (0, *codes):
            raise Lost(f"ended with {code}: {process.said[-1500:]}")
        if "Traceback" in process.said:
            raise Lost(f"traceback: {process.said[-1500:]}")
        # Half of the time the next command starts while the remains of this one still run.
        if self.rng.random() < 0.5 and not process.gone():
            left = [f"{pid} {process.title(pid)}" for pid in process.members()]
            process.kill_all()
            raise Lost(f"processes were left running: {'; '.join(left)}")

    def damage(
        self, work: Work, folder: Path, ledger: Path, seed: int | None, states: list[Path]
    ) -> None:
        """Something wrong while nothing runs; the next command says so or goes on as if nothing."""
        self.see_seed(work, folder)
        if seed is not None and self.rng.random() < 0.2:
            self.note(Done(work.verb, faults.OTHER_SEED, "", None))
            process = self.start(work, folder, ledger, seed + 1)
            self.done[-1].code = process.end()
            if process.code != faults.REFUSED or "--seed" not in process.said:
                raise Lost(f"went on with another seed: {process.said[-500:]}")
            return
        path = self.rng.choice(states)
        name = self.rng.choice(sorted(faults.AT_REST))
        whole, times = path.read_bytes(), path.stat()
        self.note(Done(work.verb, name, faults.AT_REST[name](path, self.rng), None))
        process = self.start(work, folder, ledger, seed)
        code = self.done[-1].code = process.end()
        self.see_seed(work, folder)
        if "Traceback" in process.said or code not in (0, faults.REFUSED):
            raise Lost(f"ended with {code}: {process.said[-1500:]}")
        if code == faults.REFUSED:
            if path.name not in process.said and path.name.split(".")[0] not in process.said:
                raise Lost(f"refused without a word of {path.name}: {process.said[-500:]}")
            self.done[-1].detail += "; refused until restored"
            path.write_bytes(whole)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def finish(self, work: Work, folder: Path, ledger: Path, seed: int | None) -> None:
        for _ in range(TRIES):
            process = self.start(work, folder, ledger, seed)
            process.until(lambda: self.see_seed(work, folder))
            if process.end() == 0 and "Traceback" not in process.said:
                return
            if not process.said.count("is in use by"):  # the remains of a driver before
                break
        raise Lost(f"undisturbed, it ended with {process.code}: {process.said[-1500:]}")

    # --- twins ---

    def twin(self, work: Work, seed: int) -> Twin:
        if (work, seed) not in self.twins:
            place = self.world / f"twin-{work.verb}-{work.name}-{seed}"
            shutil.rmtree(place, ignore_errors=True)
            began = time.monotonic()
            process = self.start(work, place / "work", place / "ledger", seed)
            if process.end() != 0:
                raise SystemExit(f"{' '.join(process.arguments)}\n{process.said}")
            seconds = time.monotonic() - began
            facts = essence(place / "work", seed_known=True)
            self.twins[work, seed] = Twin(facts, self.spent(place / "ledger"), seconds)
            shutil.rmtree(place)
        return self.twins[work, seed]

    @staticmethod
    def of_twin(twin: Twin, known: bool) -> Any:
        return twin.folder if known else without(twin.folder, SEED_KNOWN)

    # --- small things ---

    def start(self, work: Work, folder: Path, ledger: Path, seed: int | None) -> Process:
        environment = {**self.environment, "DPFP_LEDGER": str(ledger)}
        return Process(work.command(folder, seed), environment, work.forked)

    def spent(self, ledger: Path) -> Any:
        """The ledger's sums, one for each group of people."""
        said = Process(
            ["ledger", "show", "--json", "--ledger", str(ledger)], self.environment, True
        )
        if said.end() != 0:
            raise Lost(f"the ledger cannot be read: {said.said[-500:]}")
        found = json.loads(said.said)
        return [
            {key: group[key] for key in ("epsilon", "private_epsilon", "delta", "guarantee")}
            for group in found["groups"]
        ]

    def see_seed(self, work: Work, folder: Path) -> bool:
        """Remember the secret seed while it is there. Never true: something to wait with."""
        if (found := work.secret_seed(folder)) is not None:
            self.seed_seen = found
        return False

    def note(self, done: Done) -> None:
        self.done.append(done)


def table(story: Story) -> str:
    """What was done to what, how the disturbed commands ended, and what was lost."""
    groups: dict[tuple[str, str], list[Done]] = {}
    order = [*(f.name for f in faults.RUNNING), *sorted(faults.AT_REST), faults.OTHER_SEED]
    for done in story.done:
        groups.setdefault((done.verb, done.fault), []).append(done)
    lines = ["| command | fault | times | too late | ended with | lost |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for verb in VERBS:
        for name in [*order, "none"]:
            if found := groups.get((verb, name)):
                met = [done for done in found if not done.missed]
                codes = Counter(str(done.code) for done in met)
                ends = ", ".join(f"{code} ({n})" for code, n in sorted(codes.items()))
                lost = sum(len(done.lost) for done in found)
                late = len(found) - len(met)
                lines.append(f"| {verb} | {name} | {len(met)} | {late} | {ends} | {lost} |")
    rounds = ", ".join(f"{n} {verb}" for verb, n in story.rounds.items())
    lines += ["", f"{story.faults} faults in {story.rounds.total()} rounds ({rounds}); "]
    lines[-1] += f"lost: {len(story.lost) or 'nothing'}."
    return "\n".join([*lines, *(f"- {line}" for line in story.lost)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--unseeded", type=float, default=0.3, help="share of rounds without --seed"
    )
    parser.add_argument("--round", type=int, help="with the --seed: this round alone")
    parser.add_argument("--kept", help="a file: go on where the piece before stopped")
    parser.add_argument("--verbs", default=",".join(VERBS), help="some of: %(default)s")
    parser.add_argument("--json", action="store_true", help="every fault as a JSON object")
    parser.add_argument("--output", help="also write the table to this file")
    parser.add_argument("--join", nargs="+", help="run nothing: one table of these --kept files")
    arguments = parser.parse_args(argv)
    if arguments.join:
        return join(arguments.join, arguments.output)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    began, said = time.monotonic(), 0.0
    world = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))  # short: Ray's sockets lie below
    verbs = arguments.verbs.split(",")
    kept = Kept(arguments.kept, seed=arguments.seed, verbs=verbs, unseeded=arguments.unseeded)
    story = Story.of(kept.facts)
    first = (arguments.round or 1) - 1
    chaos = Chaos(world, arguments.seed, verbs, arguments.unseeded, story, first)
    try:
        while (time.monotonic() - began) / 60 < arguments.minutes and (
            arguments.faults is None or story.faults < arguments.faults
        ):
            chaos.round()
            kept.write(**story.facts())
            if arguments.round:
                break
            if time.monotonic() - said > LINE_SECONDS:
                said = time.monotonic()
                print(
                    f"{(said - began) / 60:.0f} min: {story.faults} faults, "
                    f"{story.rounds.total()} rounds, {len(story.lost)} lost",
                    file=sys.stderr,
                    flush=True,
                )
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        if not story.lost:
            shutil.rmtree(world, ignore_errors=True)
    if arguments.json:
        print(json.dumps([asdict(done) for done in story.done], indent=1))
    else:
        print(table(story))
    if arguments.output:
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        how = f"{kept.words}, load at the end {load}"
        Path(arguments.output).write_text(report(table(story), words_of(arguments), how))
    if story.lost:
        return 1
    return MORE if arguments.faults and story.faults < arguments.faults else 0


def words_of(arguments: argparse.Namespace) -> str:
    words = f"benchmarks/chaos.py --seed {arguments.seed} --minutes {arguments.minutes:g}"
    if arguments.faults:
        words += f" --faults {arguments.faults}"
    if arguments.kept:
        words += " --kept FILE"
    if arguments.verbs != ",".join(VERBS):
        words += f" --verbs {arguments.verbs}"
    return words


def join(files: Sequence[str], output: str | None) -> int:
    """The table of several runs, such as one without Ray and one with it."""
    story, words, minutes, commits = Story([], Counter()), [], [], []
    for file in files:
        one = json.loads(Path(file).read_text())
        part, settings = Story.of(one["facts"]), one["settings"]
        story = Story(story.done + part.done, story.rounds + part.rounds)
        flags = f"--seed {settings['seed']} --verbs {','.join(settings['verbs'])}"
        words.append(f"benchmarks/chaos.py {flags}")
        minutes.append(f"{one['seconds'] / 60:.0f}")
        commits += [commit for commit in one["commits"] if commit not in commits]
    print(table(story))
    if output:
        how = f"{' + '.join(minutes)} minutes in pieces, commit {', '.join(commits)}"
        text = report(table(story), "`, `".join(words), how)
        Path(output).write_text(text)
    return 1 if story.lost else 0


def report(found: str, words: str, how: str) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    return (
        "# Chaos: kills, faults and resumes, against undisturbed twins\n\n"
        f"`{words}` on {now}, {how}; {machine}, shared.\n"
        "What is done and compared: the program's first lines. An exit code below 0 is a signal; 2 "
        "is one line\nthat says what is wrong, 130 an interrupted command, 0 a command that ended "
        "as if nothing had been. *Too late*: the command had ended, or what was to be killed was "
        "not\nthere; these are not counted as faults.\n\n"
        f"{found}\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
