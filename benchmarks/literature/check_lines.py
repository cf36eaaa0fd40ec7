"""Whether the lines that results.yaml names are in the repositories, at the commits that it names.

    python benchmarks/literature/check_lines.py CLONES

CLONES has a git clone (bare or not) of each repository as OWNER/NAME. What is not there is listed,
and is no failure; a line without the word that it should have is one.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from accounts import Code, read_results

LINK = re.compile(r"https://github\.com/([^/]+/[^/]+)/blob/(\w+)/(.+?)#L(\d+)$")


def pinned_lines(code: Code) -> Iterator[tuple[str, str]]:
    """Links to lines of files, and a word of each."""
    yield code.link, code.has
    for place in code.also:
        if "has" in place:
            yield place["link"], place["has"]


def line_at(link: str, clones: Path) -> str | None:
    """The text of a line; None where there is no clone of its repository."""
    match = LINK.match(link)
    assert match, link
    repository, commit, path, number = match.groups()
    if not (clones / repository).exists():
        return None
    show = ["git", "-C", str(clones / repository), "show", f"{commit}:{path}"]
    lines = subprocess.run(show, capture_output=True, text=True, check=True).stdout.splitlines()
    return lines[int(number) - 1]


def verdict(link: str, word: str, clones: Path) -> str:
    line = line_at(link, clones)
    if line is None:
        return "no clone"
    return "right" if word in line else "WRONG"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clones", type=Path, metavar="CLONES")
    clones = parser.parse_args().clones
    codes = {result.code.link: result.code for result in read_results() if result.code}
    wrong = 0
    for link, word in sorted({pair for code in codes.values() for pair in pinned_lines(code)}):
        state = verdict(link, word, clones)
        wrong += state == "WRONG"
        print(f"{state}  {link}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
