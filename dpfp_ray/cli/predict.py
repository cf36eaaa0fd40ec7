"""Labels and probabilities from a finished run, for a sentence, a file or standard input.

Examples:

  dpfp predict runs/demo --text "a warm and funny film"
  dpfp predict runs/demo new.csv > answers.tsv
  dpfp predict runs/demo new.jsonl --json > answers.jsonl
  cat sentences.txt | dpfp predict runs/demo -
  dpfp predict runs/demo test.tsv --evaluate
  dpfp predict runs/demo --dev --evaluate      the run's own dev set: its score again

RUN is the --output of dpfp train, of any method and scope. FILE is any file that training reads,
with the columns that the run was trained with (or --text-column and so on). On standard input
every line is a text; for sentence pairs, two texts with a tab between.

Each line of the answer is label, probability, text; --json gives an object a line with the
probabilities of all classes. Where the rows have labels, accuracy, F1, scores by class and the
confusion matrix follow on stderr, with 95% intervals; --evaluate prints only those, on stdout.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from dpfp_ray.data.whole_files import to_json
from dpfp_ray.plan.errors import UserError

Row = tuple[tuple[str, ...], int | None]  # one text or two, and the class if it is known
COLUMNS = ("text_column", "pair_column", "label_column", "bad_rows", "header")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a finished run")
    parser.add_argument("file", nargs="?", metavar="FILE|-", help="rows to predict; - is stdin")
    parser.add_argument(
        "--text", action="append", metavar="TEXT", help="predict this text; may be repeated"
    )
    parser.add_argument("--pair", action="append", metavar="TEXT", help="its second text")
    parser.add_argument("--dev", action="store_true", help="predict the run's own dev rows")
    parser.add_argument(
        "--evaluate", action="store_true", help="print scores only; the rows need labels"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    group = parser.add_argument_group("FILE, where it differs from the training file")
    group.add_argument("--text-column", metavar="NAME", help="column of the text")
    group.add_argument("--pair-column", metavar="NAME", help="column of the second text")
    group.add_argument("--label-column", metavar="NAME", help="column of the label")
    group.add_argument(
        "--no-header", dest="header", action="store_const", const="none", help="columns are 1, 2, …"
    )
    group.add_argument("--bad-rows", choices=("error", "skip"), help="default: as in training")
    group.add_argument(
        "--batch", type=int, default=256, metavar="N", help="rows at a time (default: 256)"
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray.training.load_model import plan_of, read_run, weights_of
    from dpfp_ray.training.load_model import predictor as make_predictor
    from dpfp_ray.training.machine import use_threads

    record = read_run(arguments.run)
    weights = weights_of(Path(arguments.run).expanduser(), record)
    if arguments.batch < 1:
        raise UserError(f"--batch is {arguments.batch}; give 1 or more")
    use_threads(arguments.threads)
    plan = plan_of(record)
    given = {name: getattr(arguments, name, None) for name in COLUMNS}
    asked = dataclasses.replace(plan, **{k: v for k, v in given.items() if v is not None})
    labels = tuple(record["labels"])
    labelled, rows = rows_asked(arguments, asked, labels)
    if arguments.evaluate and not labelled:
        raise UserError("--evaluate needs labels and these rows have none; give --label-column")
    model = make_predictor(plan, labels, weights)

    answers: list[int] = []
    truth: list[int] = []
    for part in progress(batches(rows, arguments.batch)):
        shares = model.probabilities([t[0] if len(t) == 1 else (t[0], t[1]) for t, _ in part])
        answers += shares.argmax(1).tolist()
        truth += [label for _, label in part if label is not None]
        if not arguments.evaluate:
            for (texts, label), row in zip(part, shares, strict=True):
                known = None if label is None else labels[label]
                print(line(texts, known, model.answer(row), arguments.json))
            sys.stdout.flush()
    if not answers:
        raise UserError("there are no rows to predict; give a FILE with rows, or --text")
    if labelled:
        report(answers, truth, labels, arguments)
    return 0


def rows_asked(
    arguments: argparse.Namespace, plan: Any, labels: tuple[str, ...]
) -> tuple[bool, Iterator[Row]]:
    """Whether they have labels, and the rows, read as they are needed."""
    sources = [bool(arguments.file), bool(arguments.text), arguments.dev]
    if sum(sources) != 1:
        raise UserError("give one of: a FILE (or - for standard input), --text, --dev")
    if arguments.text:
        pairs = arguments.pair or []
        if pairs and len(pairs) != len(arguments.text):
            raise UserError("give one --pair for each --text")
        texts = zip(arguments.text, pairs, strict=True) if pairs else ((t,) for t in arguments.text)
        return False, ((tuple(text), None) for text in texts)
    if arguments.dev:
        return True, dev_rows(plan)
    if arguments.file == "-":
        return False, stdin_rows()
    from dpfp_ray.data.columns import open_split, read_asked
    from dpfp_ray.data.glue import GLUE
    from dpfp_ray.data.readers import CSV, TSV

    glue = GLUE.get(plan.task)
    path = Path(arguments.file).expanduser()
    own = path.suffix.lower() in (*TSV, *CSV)  # others name their columns, whatever training read
    table = open_split(path, glue, plan.header if own else "first_line")
    return read_asked(table, plan, glue, labels)


def stdin_rows() -> Iterator[Row]:
    for number, text in enumerate(sys.stdin, start=1):
        row = tuple(text.rstrip("\r\n").split("\t"))
        if not all(part.strip() for part in row):
            continue  # an empty line asks nothing
        if len(row) > 2:
            raise UserError(
                f"standard input: line {number} has {len(row) - 1} tabs; give one text, or two "
                f"with a tab between"
            )
        yield row, None


def dev_rows(plan: Any) -> Iterator[Row]:
    from dpfp_ray.data.tasks import load_task

    for split in load_task(plan).dev.values():
        for number, text in enumerate(split.texts):
            pair = () if split.pairs is None else (split.pairs[number],)
            yield (text, *pair), int(split.labels[number])
        return  # the first dev set is the one that a run's score is quoted from


def batches(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    while part := list(islice(rows, size)):
        yield part


def progress(parts: Iterator[list[Row]]) -> Iterator[list[Row]]:
    """No bar where answers scroll by on the same screen."""
    from dpfp_ray.data.progress import counted

    return counted(parts, len, "predicting", bar=not sys.stdout.isatty())


def line(texts: tuple[str, ...], known: str | None, answer: Any, as_json: bool) -> str:
    if not as_json:
        shown = "\t".join(" ".join(text.split()) for text in texts)
        return f"{answer.label}\t{answer.score:.4f}\t{shown}"
    fields: dict[str, Any] = {"text": texts[0]}
    if len(texts) == 2:
        fields["pair"] = texts[1]
    fields |= {"label": answer.label, "score": answer.score, "probabilities": answer.probabilities}
    return to_json(fields if known is None else fields | {"right_label": known})


def report(
    answers: list[int], truth: list[int], labels: tuple[str, ...], arguments: argparse.Namespace
) -> None:
    from dpfp_ray.results.evaluation import evaluate_answers, evaluation_text

    found = evaluate_answers(answers, truth, labels)
    if arguments.evaluate and arguments.json:
        print(to_json(found.as_json()))
    elif arguments.evaluate:
        print(evaluation_text(found))
    else:
        print(evaluation_text(found), file=sys.stderr)
