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

from dpfp_ray.cli.options import add_ledger_flag, adder, given
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import to_json

if TYPE_CHECKING:
    from dpfp_ray.results.predict import Answer

OPTIONS = (
    *("dev", "text_column", "pair_column", "label_column", "header", "bad_rows", "batch"),
    *("threads", "ledger"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("run RUN", "folder of a finished run")
    add("file FILE|-", "rows to predict; - is stdin", nargs="?")
    add("--text TEXT", "predict this text; may be repeated", action="append")
    add("--pair TEXT", "its second text", action="append")
    add("--dev", "predict the run's own dev rows")
    add("--evaluate", "print scores only; the rows need labels")
    add("--json", "one JSON object a line")
    add = adder(parser.add_argument_group("FILE, where it differs from the training file"))
    add("--text-column NAME", "column of the text")
    add("--pair-column NAME", "column of the second text")
    add("--label-column NAME", "column of the label")
    columns = {"dest": "header", "action": "store_const", "const": "none"}
    add("--no-header", "columns are 1, 2, …", **columns)
    add("--bad-rows", "default: as in training", choices=("error", "skip"))
    add("--batch N", "rows at a time (default: 256)", type=int, default=256)
    add("--threads N", "CPU threads (default: all cores)", type=int)
    add_ledger_flag(parser)


def command(arguments: argparse.Namespace) -> int:
    if [bool(arguments.file), bool(arguments.text), arguments.dev].count(True) != 1:
        raise UserError("give one of: a FILE (or - for standard input), --text, --dev")
    options = given(arguments, *OPTIONS)
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
