"""Check records of the study that somebody else sends, before they stand beside ours.

  python benchmarks/study/check_records.py SENT              # what each record says of itself
  python benchmarks/study/check_records.py SENT --again 2    # and two of its cells, run once more
  python benchmarks/study/check_records.py SENT sst2-frozen  # the cells of one plan

SENT has the form of `records/`: PLAN/CELL/result.json, by a plan of `plans/`. Nearly all of a
record follows from the rest of it and from public facts, and is computed again: scores from
answers, T, p and ε from plan and σ, what is promised from the plan. What must be believed, the
answers themselves, is drawn by lot and trained again: the score must be one that the sent seeds let
expect. Loss, calibration error, times and memory are believed; nothing is ranked by them. Prints a
line for each fault, and ends with 1 if there is one.
"""

import argparse
import math
import secrets
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from cells import PLANS, Cell, all_cells
from run import run_cell

from dpfp_ray import Plan, UserError
from dpfp_ray.data.tasks import load_task
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.statement import guarantee, statement
from dpfp_ray.results.paired import mcnemar, student
from dpfp_ray.training.dev_scores import (
    DevPredictions,
    best_epoch,
    fingerprint_rows,
    measure,
    quote,
)
from dpfp_ray.training.prepare import possible_representations
from dpfp_ray.training.record import Record, plan_of, read_record
from dpfp_ray.training.run_folder import RESULT

CLOSE = 1e-4  # relative, of two versions' accountants and two machines' arithmetic
OUTSIDE = 0.002  # of honest runs that are told not to land
FEW_SEEDS = 3  # below it a spread says nothing
LARGEST = 2_000_000  # bytes
BELIEVED = ("calibration_error", "loss")
PROMISES = ("guarantee", "plan_hash", "epsilon", "delta", "accountant", "adjacency", "proved")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sent", type=Path)
    parser.add_argument("only", nargs="*", help="names of plans (default: all that was sent)")
    parser.add_argument("--again", type=int, default=0, metavar="N", help="cells to run once more")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), metavar="DIR")
    parser.add_argument("--plans", type=Path, default=PLANS, metavar="DIR")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    arguments = parser.parse_args(argv)
    cells = {cell.name: cell for cell in all_cells(arguments.data, arguments.plans)}
    found = list(faults(arguments.sent, arguments.only, cells))
    if not found and arguments.again:
        found = list(faults_again(arguments, cells))
    for line in found:
        print(line)
    sent = len(records_in(arguments.sent, arguments.only))
    print(f"{sent:,} records, {len(found):,} faults", file=sys.stderr)
    return 1 if found else 0


def records_in(sent: Path, only: Sequence[str]) -> list[Path]:
    return sorted(file for file in sent.glob(f"*/*/{RESULT}") if is_asked(file, sent, only))


def is_asked(path: Path, sent: Path, only: Sequence[str]) -> bool:
    return not only or path.relative_to(sent).parts[0] in only


def faults(sent: Path, only: Sequence[str], cells: Mapping[str, Cell]) -> Iterator[str]:
    """A line for whatever is wrong with a record, or with two of them."""
    files, seen = records_in(sent, only), dict[str, str]()
    if not files:
        yield f"{sent}: no PLAN/CELL/{RESULT} in it"
    for path in sorted(path for path in sent.rglob("*") if is_asked(path, sent, only)):
        if path.is_symlink() or (path.is_file() and path not in files):
            yield f"{path.relative_to(sent)}: only PLAN/CELL/{RESULT} belongs here"
    for path in files:
        name = path.parent.relative_to(sent).as_posix()
        try:
            lines = list(faults_of(path, cells.get(name), seen))
        except (UserError, ValueError, KeyError, TypeError, OSError) as error:
            lines = [f"unreadable: {error}"]
        yield from (f"{name}: {line}" for line in lines)


def faults_of(path: Path, cell: Cell | None, seen: dict[str, str]) -> Iterator[str]:
    if cell is None or cell.audit is not None:
        yield "no plan asks for a run of this name (audits are not taken)"
        return
    if path.is_symlink() or path.stat().st_size > LARGEST:
        yield f"it is a link, or has more than {LARGEST:,} bytes"
        return
    record = read_record(path.read_bytes())
    cell.record(path.parents[2])  # refuses another plan
    plan = plan_of(record)
    asked = bound(cell.plan, plan.representation, plan.teacher_representation)
    if plan.hash != asked.hash or record["plan_hash"] != asked.hash:
        yield f"its plan is {record['plan_hash']}, that of the cell on these data {asked.hash}"
        return
    if record["select"] != "last" or not record["finished"] or record["audit"]:
        yield "only the last epoch of a finished run counts"
    history = record["history"]
    if not history or [entry["step"] for entry in history] != plan.epoch_ends():
        yield "its history is not that of the plan's epochs"
        return
    yield from wrong_scores(record, cell.plan)
    yield from wrong_privacy(record, plan)
    for key in unique_to_a_run(record):
        if key in seen:
            yield f"it is the run of {seen[key]}"
        seen[key] = path.parent.name


def wrong_scores(record: Record, plan: Plan) -> Iterator[str]:
    """Scores that are not those of the answers, and answers to other rows than dev's."""
    history = record["history"]
    kept = {entry["epoch"]: entry["dev"] for entry in record["predictions"]}
    if set(kept) != {history[-1]["epoch"], best_epoch(history)["epoch"]}:
        yield "the answers are not those of the last and the best epoch"
        return
    for entry in history:
        for name, answers in kept.get(entry["epoch"], {}).items():
            given = DevPredictions(**answers)
            mark, labels = dev_rows(plan)[name]
            if given.fingerprint != mark or not np.array_equal(given.truth(), labels):
                yield f"epoch {entry['epoch']}: its dev rows are not {name}'s"
                continue
            scores = measure(given.answers(), given.truth(), classes=given.classes)
            for key in scores.keys() - BELIEVED:
                if not close(entry["dev"][name].get(key), scores[key]):
                    yield f"epoch {entry['epoch']}: {key} is not that of its answers"
    quoted = quote(history)
    wrong = [key for key in quoted if not close(record["metrics"].get(key), quoted[key])]
    yield from (f"metrics.{key} is not the last epoch's" for key in wrong)


def wrong_privacy(record: Record, plan: Plan) -> Iterator[str]:
    """What plan and σ do not say."""
    privacy, private = record["privacy"], plan.private_part
    sigma = privacy["noise_multiplier"]
    facts: dict[str, Any] = {
        "guarantee": guarantee(plan),
        "delta": plan.delta,
        "sigma": sigma * private.C,
    }
    facts |= {"p": private.p, "steps": private.steps, "draws": private.draws}
    facts |= {"epsilon": record["history"][-1]["epsilon"]}
    for key, value in facts.items():
        if not close(privacy.get(key), value):
            yield f"privacy.{key} is {privacy.get(key)}, it should be {value}"
    if not private.private:
        return
    for entry in record["history"]:
        steps = min(entry["step"], private.steps)
        mech = accounting.mechanism(private, sigma, steps)
        if not close(entry["epsilon"], accounting.epsilons(mech, private.delta or 0.0)):
            yield f"epoch {entry['epoch']}: its ε is not that of σ/C = {sigma:g}"
    spent = record["history"][-1]["epsilon"].get(private.accountant)
    if spent is None or spent > (private.epsilon or 0.0) * (1 + CLOSE):
        yield f"ε = {spent} is over the plan's {private.epsilon}"
    promised = statement(plan, sigma)
    for key in PROMISES:
        if not close(record["statement"].get(key), promised.get(key)):
            yield f"statement.{key} is not what this plan promises"


def unique_to_a_run(record: Record) -> list[str]:
    """A copy of another seed's run has one of these. Losses are real numbers: no two runs share
    them all, but for methods without a draw, whose runs are one run."""
    losses = [scores["loss"] for entry in record["history"] for scores in entry["dev"].values()]
    entry = record["ledger_entry"]
    drawn = record["plan"]["method"] != "public"
    return [*([f"entry {entry}"] if entry else []), *([f"losses {losses}"] if drawn else [])]


def faults_again(arguments: argparse.Namespace, cells: Mapping[str, Cell]) -> Iterator[str]:
    """Cells by lot, trained again from their plans: a line for each that lands elsewhere."""
    groups = defaultdict(list)
    for path in records_in(arguments.sent, arguments.only):
        name = path.parent.relative_to(arguments.sent).as_posix()
        groups[name.rpartition("_")[0]].append((name, read_record(path.read_bytes())))
    chosen = secrets.SystemRandom().sample(sorted(groups), min(arguments.again, len(groups)))
    for group in chosen:
        name = groups[group][0][0]
        with tempfile.TemporaryDirectory() as folder:
            place = argparse.Namespace(
                records=Path(folder), ledger=Path(folder) / "ledger", threads=arguments.threads
            )
            score = run_cell(cells[name], place)
            print(f"{group}: {score:.4f} again", file=sys.stderr)
            again = read_record((Path(folder) / name / RESULT).read_bytes())
        if not lands(again, [record for _, record in groups[group]]):
            yield f"{group}: {score:.4f} again, which its {len(groups[group])} seeds do not expect"


def lands(again: Record, sent: list[Record]) -> bool:
    """Is one more run like these? The dev rows are the same, so only seeds differ. Of fewer than
    three, McNemar's exact test asks the rows instead, which is strict with methods that scatter."""
    scores = [record["metrics"]["accuracy"] for record in sent]
    right = [correct(record) for record in (again, *sent)]
    if len(scores) < FEW_SEEDS:
        return min(mcnemar(right[0], other) for other in right[1:]) >= OUTSIDE
    spread = max(statistics.stdev(scores), 1 / len(right[0]))
    width = float(student(OUTSIDE, len(scores) - 1)) * spread * math.sqrt(1 + 1 / len(scores))
    return abs(again["metrics"]["accuracy"] - statistics.fmean(scores)) <= width


def correct(record: Record) -> np.ndarray[Any, np.dtype[np.bool_]]:
    answers = DevPredictions(**next(iter(record["predictions"][0]["dev"].values())))
    right: np.ndarray[Any, np.dtype[np.bool_]] = answers.answers() == answers.truth()
    return right


@cache
def bound(plan: Plan, chosen: str, teachers: str | None) -> Plan:
    """The plan with what these data say of it: D, classes, δ. Which representation "auto" is, is
    `chosen` by the plan's numbers; it has to be one of those between which they choose."""
    task = load_task(plan)
    possible = possible_representations(plan, paired=task.train.pairs is not None)
    known: dict[str, Any] = {"representation": chosen} if chosen in possible else {}
    known |= {"records": len(task.train), "classes": len(task.label_names)}
    return plan.bind(**known, public_records=plan.max_public, teacher_representation=teachers)


@cache
def dev_rows(plan: Plan) -> dict[str, tuple[str, Any]]:
    task = load_task(plan)
    return {name: (fingerprint_rows(split), split.labels) for name, split in task.dev.items()}


def close(given: Any, value: Any) -> bool:
    """Equal, numbers to `CLOSE`."""
    if isinstance(value, Mapping):
        same = isinstance(given, Mapping) and given.keys() == value.keys()
        return same and all(close(given[key], value[key]) for key in value)
    if isinstance(value, list | tuple):
        same = isinstance(given, list | tuple) and len(given) == len(value)
        return same and all(map(close, given, value))
    if isinstance(value, float) and isinstance(given, float | int) and not isinstance(given, bool):
        return math.isclose(given, value, rel_tol=CLOSE, abs_tol=1e-12) or given == value
    return bool(given == value) and isinstance(given, bool) == isinstance(value, bool)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"study: {error}", file=sys.stderr)
        sys.exit(2)
