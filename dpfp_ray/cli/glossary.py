"""What the words of this tool mean.

Examples:

  dpfp glossary
  dpfp glossary nominal
  dpfp glossary zero_out carriers

The same text is docs/glossary.md, and stands at the end of every report and results page.
"""

import argparse
import textwrap
from dataclasses import asdict

from dpfp_ray.cli.options import adder
from dpfp_ray.system.whole_files import to_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    adder(parser)("words WORD", "default: all of them", nargs="*")
    adder(parser)("--json", "print a list, one object a word")


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray import glossary

    terms = glossary(*arguments.words)
    if arguments.json:
        print(to_json([asdict(term) for term in terms]))
        return 0
    for term in terms:
        print(textwrap.fill(f"{term.name}: {term.text}", 80, subsequent_indent="  "))
    return 0
