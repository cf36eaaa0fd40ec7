"""`dpfp VERB --flag value`: parses, dispatches, and turns a user's mistake into one line.

Results go to stdout, progress to stderr. Bad input exits with 2, what Ctrl-C stopped with 130, what
SIGTERM stopped with 143, a sweep or comparison in which trials failed with 1.
"""

import argparse
import math
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from dpfp_ray import __version__
from dpfp_ray.system.errors import Guess, UserError
from dpfp_ray.system.signals import signal_of, stopped_by_signals

VERBS = {
    "demo": "the whole story in three minutes: a sweep, a comparison, an audit and a report",
    "calibrate": "the noise that a privacy budget asks for, without any data",
    "train": "one run: one method, one budget, one task",
    "predict": "labels and probabilities from a finished run, for a text, a file or stdin",
    "export": "a finished run as a model that plain transformers loads, with its model card",
    "statement": "what a run promises about its records, in the forms that others ask for",
    "compare": "several methods at equal ε on one task, and one table",
    "results": "query the records of runs, comparisons and sweeps",
    "report": "tables, figures and one page to publish, from any number of results",
    "audit": "measure what a trained model leaks, and hold it against the stated ε",
    "bench": "how fast a step is on this machine's CPU or GPU, and how much memory it takes",
    "check": "whether a method's training does what its ε counts on, on made-up data",
    "ledger": "what the people in the data have paid for everything, and what they may ever pay",
    "sweep": "explore hyperparameters under one privacy budget, on Ray",
    "submit": "run any of these on a Ray cluster, as a job",
    "glossary": "what the words mean: nominal, zero_out, carriers, …",
    "serve": "live results: a page and a JSON API, on Ray Serve",
}
LONGEST = 1000  # characters
WORDS = "What the words mean: dpfp glossary [WORD]"


class Parser(argparse.ArgumentParser):
    """argparse with errors in one line, and with finite numbers only."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register("type", float, finite)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {shortened(message)} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


class HelpAll(argparse.Action):
    """`--help` with the flags that few people need."""

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.rare = ()
        parser.print_help()
        parser.exit()


class VerbParser(Parser):
    """A verb's parser, which imports the verb only when its words are to be parsed."""

    verb: str = ""
    rare: Sequence[argparse.Action] = ()

    def load(self) -> None:
        """Import the verb and take its flags, once; `--help` leaves rare ones to `--help-all`."""
        if self.verb:
            module = import_module(f"dpfp_ray.cli.{self.verb}")
            from dpfp_ray.cli.options import rare_flags

            self.verb, self.description = "", module.__doc__
            self.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(self)
            if rare := rare_flags(self._actions):
                self.rare, text = rare, f"all flags, {len(rare)} more"
                self.add_argument("--help-all", action=HelpAll, nargs=0, help=text)
            self.epilog = f"{self.epilog}\n\n{WORDS}" if self.epilog else WORDS
            self.set_defaults(command=module.command)

    def format_help(self) -> str:
        texts = [action.help for action in self.rare]
        for action in self.rare:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in zip(self.rare, texts, strict=True):
                action.help = text

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.load()
        words = list(args)
        for word in words[: words.index("--")] if "--" in words else words:
            flag, equals, value = word.partition("=")
            if flag.startswith("-") and equals and value == "--":  # argparse would drop the value
                self.error(f"argument {flag}: -- is no value")
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:  # said here, so that the line names this verb's help
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


def finite(text: str) -> float:
    """The type of every flag with `type=float`."""
    if not math.isfinite(number := float(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return number


def build_parser() -> Parser:
    about = "Differentially private fine-tuning, measured honestly."
    parser = Parser(prog="dpfp", description=about, epilog=WORDS)
    parser.add_argument("--version", action="version", version=f"dpfp-ray {__version__}")
    options: Any = {"dest": "verb", "metavar": "VERB", "required": True}
    verbs = parser.add_subparsers(**options, parser_class=VerbParser)
    for verb, summary in VERBS.items():
        verbs.add_parser(verb, help=summary).verb = verb
    return parser


def shortened(text: str) -> str:
    """One line that a person can read, also of a path of thousands of characters, or of one with
    line breaks and codes that a terminal would obey."""
    line = "".join(
        letter if letter.isprintable() or letter == "\u00a0" else ascii(letter)[1:-1]
        for letter in text
    )
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """One line, without the file and line of our code that Python would show."""
    mark = "" if isinstance(message, Guess) else "warning: "
    print(f"dpfp: {mark}{message}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return 0
    arguments = parser.parse_args(argv)
    warnings.showwarning = show_warning
    try:
        with stopped_by_signals():
            code = int(arguments.command(arguments) or 0)
        sys.stdout.flush()  # a closed pipe shows here, not when Python exits
        return code
    except UserError as error:
        say(str(error))
        if error.at_once:
            os._exit(2)
        return 2
    except BrokenPipeError:  # `dpfp … | head`: nobody reads on, and that is fine
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # of a file or a disk that nobody below had something to say about
        from dpfp_ray.system.cache import FULL

        if error.filename is None and error.errno not in FULL:
            raise
        say(("" if error.filename is None else f"{error.filename}: ") + str(error.strerror))
        return 2
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # Whoever reads a finished run trusts its result.json; one that was damaged fails anywhere.
        if not hasattr(arguments, "run"):
            raise
        # The place is named, so that a fault of ours does not pass for damage.
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        why = f"{arguments.run} cannot be used ({type(error).__name__} at {where}: {error}"
        fix = "); if its result.json is damaged, restore it from a backup, or run again; if it is "
        say(shortened(why) + fix + "whole, report this line as a fault")
        return 2
    except RecursionError:
        say("what was given is nested too deeply")
        return 2
    except RuntimeError as error:
        if "home directory" not in str(error):
            raise
        say("a path begins with ~ and a user whom this machine does not know; write it out")
        return 2
    except KeyboardInterrupt as stop:  # one with a message says where the work is saved
        number = signal_of(stop)
        name = "dpfp: interrupted" if number == signal.SIGINT else "dpfp: stopped by SIGTERM"
        print(str(stop) or name, file=sys.stderr)
        return 128 + number


def say(line: str) -> None:
    print(f"dpfp: {shortened(line)}", file=sys.stderr, flush=True)
