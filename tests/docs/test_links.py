"""What the documentation names exists: links, files of the tree, verbs and flags."""

import re
from pathlib import Path

import pytest

from dpfp_ray.cli.main import VERBS, VerbParser

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "dashboards", "docs", "examples")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
)
page_by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

LINK = re.compile(r"\]\(([^)\s]+)\)")
SUFFIXES = "py|md|ipynb|yaml|yml|json|toml|txt|html|css|js|png|cff"
PATH = re.compile(rf"(?<![\w./:-])((?:\.\.?/)*[a-z_.]+/[\w./-]*\w\.(?:{SUFFIXES}))\b")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FLAG = re.compile(r"(?<!\S)--[a-z][a-z-]*")
# What a run writes, and a reader's own files, are not in the tree.
WRITTEN_BY_RUNS = ("runs/", "records/", "states/")
# Flags that the text discusses and that belong to other programs.
OTHER_PROGRAMS = {"--prometheus": "dashboards/check.py"}


def named_files(text: str) -> set[str]:
    """Paths in running text and inline code. Fenced blocks are read for their commands only."""
    return {
        path for path in PATH.findall(FENCE.sub("", text)) if not path.startswith(WRITTEN_BY_RUNS)
    }


def exists(path: str, page: Path) -> bool:
    """From the top of the tree, from the package (`privacy/accounting.py`) or from the page."""
    return any((start / path).exists() for start in (ROOT, ROOT / "dpfp_ray", page.parent))


def sections(page: Path) -> set[str]:
    """Headings as GitHub names them in addresses: lower case, hyphens, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> list[list[str]]:
    """Each `dpfp …` of code as its words, `dpfp submit -- sweep …` as two commands."""
    code = [*FENCE.findall(text), *INLINE.findall(FENCE.sub("", text))]
    lines = [line for block in code for line in block.replace("\\\n", " ").splitlines()]
    # Indented blocks are code as well.
    lines += [line for line in FENCE.sub("", text).splitlines() if line.startswith("    ")]
    found = []
    for line in lines:
        for command in re.findall(r"(?:^|[\s/])dpfp ([a-z].*)", line.partition("  #")[0]):
            for part in re.split(r" -- (?=[a-z])", command.partition(" && ")[0]):
                found.append(part.split())
    return found


def flags_of(verb: str) -> set[str]:
    parser = VerbParser()
    parser.verb = verb
    parser.load()
    return set(parser._option_string_actions)


@page_by_page
def test_relative_links_lead_to_files(page: Path) -> None:
    targets = {link.partition("#")[0] for link in LINK.findall(page.read_text())}
    local = {target for target in targets if target and "://" not in target}
    assert {target for target in local if not (page.parent / target).exists()} == set()


@page_by_page
def test_links_to_a_section_lead_to_a_heading(page: Path) -> None:
    links = [link.partition("#") for link in LINK.findall(page.read_text()) if "://" not in link]
    missing = [
        f"{path}#{section}"
        for path, _, section in links
        if section and section not in sections(page.parent / path if path else page)
    ]
    assert missing == []


@page_by_page
def test_named_files_exist(page: Path) -> None:
    text = page.read_text()
    made_by_it = {
        line.split("`")[1] for line in text.splitlines() if line.startswith("## ") and "`" in line
    }
    missing = {path for path in named_files(text) if not exists(path, page)}
    assert missing - made_by_it == set()


@page_by_page
def test_commands_use_known_verbs_and_flags(page: Path) -> None:
    unknown = []
    for verb, *words in commands(page.read_text()):
        known = flags_of(verb) if verb in VERBS else {"--help", "--version"}
        if verb not in VERBS:
            unknown.append(verb)
        unknown += [f"{verb} {flag}" for flag in FLAG.findall(" ".join(words)) if flag not in known]
    assert unknown == []


@page_by_page
def test_flags_without_a_verb_are_known_to_some_verb(page: Path) -> None:
    known = set().union(*map(flags_of, VERBS)) | set(OTHER_PROGRAMS)
    alone = [code for code in INLINE.findall(FENCE.sub("", page.read_text())) if code[0] in "-…"]
    assert {flag for code in alone for flag in FLAG.findall(code) if flag not in known} == set()


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("see `dpfp_ray/gone.py` and docs/privacy.md.", {"dpfp_ray/gone.py", "docs/privacy.md"}),
        ("https://example.org/a/b.html, runs/demo/report/index.html", set()),
        ("```\ncat missing/file.py\n```", set()),
    ],
)
def test_files_are_found_in_running_text(text: str, files: set[str]) -> None:
    assert named_files(text) == files


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "```sh\n.venv/bin/dpfp train --lr 1 \\\n  --x 2\n```",
            [["train", "--lr", "1", "--x", "2"]],
        ),
        ("run `dpfp submit --wait -- sweep a.yaml`", [["submit", "--wait"], ["sweep", "a.yaml"]]),
        ("the word dpfp outside code", []),
    ],
)
def test_commands_are_found_in_code(text: str, found: list[list[str]]) -> None:
    assert commands(text) == found
