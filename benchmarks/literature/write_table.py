"""The table, the commands and the picture of docs/literature.md, from results.yaml.

    python benchmarks/literature/write_table.py

Text outside the marked blocks of the page is written by hand and kept.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from accounts import Account, Code, Result, accounts, read_results, shown_place, upwards

from dpfp_ray.reports.plots import Drawing, canvas, finish, legend, plain_log_labels

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PICTURE = DOCS / "literature.md", DOCS / "images/literature.png"
COMMAND = "python benchmarks/literature/write_table.py"
BLOCK = re.compile(r"(<!-- literature: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PLACE = re.compile(r"https://\S+|(?<![\w/.-])[\w./-]+\.(?:py|md|sh|ipynb|csv)(?:#L\d+)?")
HEADINGS = (
    *("result", "model, method", "stated ε", "δ", "n, B, E", "σ", "batches in the code"),
    *("ε if they were Poisson", "**supported ε**", "supported / stated"),
)
SAMPLERS = {
    "poisson": "Poisson",
    "shuffled": "shuffled",
    "blocks": "blocks, shuffled",
    "order": "fixed order",
}


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def named(result: Result) -> str:
    number = result.paper.removeprefix("arXiv:")
    if number == result.paper:
        return result.name
    return f"[{result.name}](https://arxiv.org/abs/{number})"


def batches(code: Code | None) -> str:
    return (
        f"{SAMPLERS[code.sampler]} ([{shown_place(code.line)}]({code.link}))"
        if code
        else "not known"
    )


def facts(result: Result) -> list[str]:
    """The first five cells of a row."""
    stated = [f"{result.stated[key]:.4g}" if result.stated else "?" for key in ("epsilon", "delta")]
    settings = [f"{number:,}" for number in result.settings.values()] or ["?"]
    return [named(result), f"{result.model}, {result.method}", *stated, "; ".join(settings)]


def bounded_row(one: Account) -> list[str]:
    numbers = [f"{one.poisson:.2f}", f"**{upwards(one.supported):.2f}**", f"{one.ratio:.1f}"]
    return [*facts(one.result), f"{one.sigma:.3f}", batches(one.result.code), *numbers]


def unbounded_row(result: Result) -> list[str]:
    verdict = str(result.no_bound).partition(":")[0]
    return [*facts(result), "?", batches(result.code), "", f"**{verdict}**", ""]


def reasons(results: Sequence[Result]) -> str:
    """Why some rows have no number."""
    return "".join(f"- {named(one)}: {one.no_bound}.\n" for one in results if one.no_bound)


def code_list(results: Sequence[Result]) -> str:
    codes = {one.code.link: one.code for one in results if one.code}
    lines = []
    for code in sorted(codes.values(), key=lambda code: code.repository.lower()):
        also = ", ".join(f"[{n}]({place['link']})" for n, place in enumerate(code.also, start=1))
        pinned = f"[{code.repository}, {shown_place(code.line)}]({code.link})"
        lines.append(f"- {pinned}: {code.shows}{f' Also: {also}.' if also else ''}\n")
    return "".join(lines)


def linked(source: str, code: Code | None) -> str:
    """A source, with links in place of addresses and of paths in the repository of its code."""

    def link(match: re.Match[str]) -> str:
        place = match[0]
        target = place if "://" in place or code is None else code.at(place)
        return f"[{shown_place(place)}]({target})"

    return PLACE.sub(link, source)


def source_list(results: Sequence[Result]) -> str:
    """The sources of stated ε and settings; results with the same ones share a line."""
    shared: dict[str, list[str]] = {}
    for result in results:
        sources = [linked(source, result.code) for source in result.sources]
        shared.setdefault(". ".join(sources), []).append(result.name)
    return "".join(f"- {'; '.join(names)}: {source}.\n" for source, names in shared.items())


def command_list(found: Sequence[Account]) -> str:
    lines = [
        "\n".join([f"# {one.result.name}: σ = {one.sigma:.3f}", *one.commands()]) for one in found
    ]
    return "```sh\n" + "\n".join(lines) + "\n```\n"


def blocks(results: Sequence[Result], found: Sequence[Account]) -> dict[str, str]:
    rows = [bounded_row(one) for one in found]
    rows += [unbounded_row(one) for one in results if one.no_bound]
    return {
        "table": table(HEADINGS, rows),
        "reasons": reasons(results),
        "codes": code_list(results),
        "sources": source_list(results),
        "commands": command_list(found),
    }


def filled(text: str, made: Mapping[str, str]) -> str:
    """A document with its blocks as they are now."""
    return BLOCK.sub(lambda block: block[1] + made[block[2]] + block[3], text)


def picture(found: Sequence[Account]) -> Drawing:
    """Stated ε and supported ε of each result, the largest ratio on top."""
    with canvas(1.4 + 0.24 * len(found)) as (figure, axes):
        rows = range(len(found))
        stated = [one.result.stated["epsilon"] for one in found]
        supported = [one.supported for one in found]
        axes.hlines(rows, stated, supported, color="#BBBBBB", zorder=1)
        axes.plot(stated, rows, "o", markerfacecolor="white", color="#0072B2", label="stated")
        axes.plot(supported, rows, "s", color="#D55E00", label="supported by a theorem")
        axes.set_xscale("log")
        plain_log_labels(axes.xaxis, dense=True)
        axes.set_xlabel("ε at the stated δ")
        axes.set_yticks(rows, labels=[one.result.name for one in found], fontsize=8)
        axes.set_ylim(len(found) - 0.5, -0.5)
        legend(axes)
        caption = "An open circle is the ε that was published, a square the ε of a theorem."
        return finish(figure, "literature", "Stated and supported ε", caption, COMMAND)


def main() -> None:
    results = read_results()
    found = accounts(results)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(page, blocks(results, found)), encoding="utf-8")
    PICTURE.write_bytes(picture(found).png)


if __name__ == "__main__":
    main()
