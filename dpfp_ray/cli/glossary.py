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

from dpfp_ray.data.whole_files import to_json
from dpfp_ray.plan.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="WORD", help="default: all of them")
    parser.add_argument("--json", action="store_true", help="print a list, one object a word")


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray.report.glossary import glossary, look_up

    found = [] if arguments.words else glossary()
    for word in arguments.words:
        known = look_up(word)
        if not known:
            raise UserError(f"the glossary does not know {word!r}; dpfp glossary shows all words")
        found += [term for term in known if term not in found]
    if arguments.json:
        print(to_json([asdict(term) for term in found]))
        return 0
    for term in found:
        print(textwrap.fill(f"{term.name}: {term.text}", 80, subsequent_indent="  "))
    return 0
