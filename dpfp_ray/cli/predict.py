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
Rows that the ledger knows as private records are entered there as used without privacy: scores of
them are exact. Under a total they are refused.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dpfp_ray.cli.options import add_ledger_flag
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import to_json

if TYPE_CHECKING:
    from dpfp_ray.results.predict import Answer

OPTIONS = ("dev", "text_column", "pair_column", "label_column", "header", "bad_rows", "batch")


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
    add_ledger_flag(parser)


def command(arguments: argparse.Namespace) -> int:
    if [bool(arguments.file), bool(arguments.text), arguments.dev].count(True) != 1:
        raise UserError("give one of: a FILE (or - for standard input), --text, --dev")
    options: dict[str, Any] = {n: getattr(arguments, n) for n in (*OPTIONS, "threads", "ledger")}
    if arguments.text:
        options["texts"] = given_texts(arguments.text, arguments.pair or [])
    elif arguments.file == "-":
        options["texts"] = stdin_texts()
    elif arguments.file:
        options["file"] = arguments.file

    from dpfp_ray import evaluate, predict

    if arguments.evaluate:
        scores = evaluate(arguments.run, **options)
        print(to_json(scores.as_json()) if arguments.json else scores)
        return 0
    answers = predict(arguments.run, **options)
    for batch in answers.batches():
        for answer in batch:
            print(to_json(answer.as_json()) if arguments.json else line(answer))
        sys.stdout.flush()
    if answers.labelled:
        print(answers.evaluation(), file=sys.stderr)
    return 0


def given_texts(texts: list[str], pairs: list[str]) -> list[Any]:
    if pairs and len(pairs) != len(texts):
        raise UserError("give one --pair for each --text")
    return list(zip(texts, pairs, strict=True)) if pairs else texts


def stdin_texts() -> Iterator[Any]:
    for number, text in enumerate(sys.stdin, start=1):
        row = tuple(text.rstrip("\r\n").split("\t"))
        if not all(part.strip() for part in row):
            continue  # an empty line asks nothing
        if len(row) > 2:
            raise UserError(
                f"standard input: line {number} has {len(row) - 1} tabs; give one text, or two "
                f"with a tab between"
            )
        yield row


def line(answer: "Answer") -> str:
    texts = "\t".join(" ".join(text.split()) for text in answer.texts)
    return f"{answer.label}\t{answer.score:.4f}\t{texts}"
