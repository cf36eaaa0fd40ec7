"""How our pictures look: colours, sizes, axes, and the files they become.

Colours are Okabe & Ito's, told apart by all common kinds of colour vision; every method also has
its own marker and line, so that a grey print can be read. Names from data are drawn as they are:
matplotlib's $…$ markup is off.
"""

import io
import textwrap
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpfp_ray.results.cells import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Colour, marker and dashes of a method, or of its head-only variant.
_STYLES = {
    "non_private": ("#000000", "x", "--"),
    "dpfp": ("#D55E00", "o", "-"),
    "dpfp release_once": ("#CC79A7", "D", "-."),
    "dpfp moments": ("#E69F00", "v", "-."),
    "dpsgd": ("#0072B2", "s", "-"),
    "dpsgd head": ("#56B4E9", "P", ":"),
    "rgp": ("#009E73", "^", "-"),
    "objpert head": ("#882255", "8", "-"),
}


# A method without a look of its own keeps its name and takes one of these: as many as a comparison
# of all methods and scopes needs. Most colours are of Paul Tol's muted scheme (colour-blind safe).
_MORE = (
    ("#7F7F7F", "*", ":"),
    ("#8C564B", "<", ":"),
    ("#4D4D4D", ">", "-."),
    ("#332288", "h", ":"),
    ("#117733", "p", "-."),
    ("#999933", "d", "-."),
    ("#44AA99", "H", ":"),
    ("#CC6677", "p", ":"),
    ("#AA4499", "8", "-."),
    ("#661100", "d", ":"),
    ("#6A3D9A", "H", "-."),
)
_SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "axes.formatter.use_mathtext": False,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9.0,
    "legend.framealpha": 0.9,
    "lines.linewidth": 1.8,
    "lines.markersize": 6.5,
    "hatch.linewidth": 0.6,
    "text.parse_math": False,
    "svg.fonttype": "none",  # text stays text: it can be searched, and read aloud
    "svg.hashsalt": "dpfp-ray",  # ids depend on what is drawn and on nothing else
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
COLOURS = "cividis"  # reads alike for all, light is more, also in grey
_FONTS = b"font-family: 'DejaVu Sans', Verdana, sans-serif"
_PNG_DPI = 160
_WIDTH = 7.0  # inches
_FOOT_WIDTH = 96  # characters of the command beneath


@dataclass(frozen=True)
class Drawing:
    """A finished figure: the same picture as SVG and PNG, and what to say about it."""

    name: str
    title: str
    caption: str
    command: str
    svg: bytes
    png: bytes


_DRAWING = threading.RLock()


@contextmanager
def drawing_alone() -> Iterator[None]:
    """Our style, for one thread at a time: settings and fonts belong to the whole process."""
    import matplotlib

    with _DRAWING, matplotlib.rc_context(_SETTINGS):
        yield


@contextmanager
def canvas(height: float = 4.0) -> Iterator[tuple["Figure", "Axes"]]:
    """A figure and its axes, without pyplot, which keeps state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with drawing_alone():
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, figure.add_subplot()


def finish(figure: "Figure", name: str, title: str, caption: str, command: str) -> Drawing:
    """Put title and command around the picture and write it out, the same bytes every time."""
    title = clean(title)
    figure.suptitle(title, fontsize=11.5, x=0.02, ha="left", fontweight="bold")
    lines = textwrap.wrap(clean(command), _FOOT_WIDTH, break_on_hyphens=False)
    beneath = "\n".join(lines[:3])
    figure.supxlabel(beneath, fontsize=7, x=0.02, ha="left", color="#555555", family="monospace")
    # Left to itself, matplotlib would lay out and draw five times for two files.
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine(None)
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    figure.savefig(png, format="png", dpi=_PNG_DPI, metadata={"Software": None, "Title": title})
    # Where DejaVu is not installed, Verdana is as wide and the labels still fit.
    vector = svg.getvalue().replace(b"font-family: 'DejaVu Sans'", _FONTS)
    return Drawing(name, title, caption, command, vector, png.getvalue())


def clean(text: str, longest: int = 400) -> str:
    """Control characters would make an SVG that no XML reader accepts."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return printable if len(printable) <= longest else printable[: longest - 1] + "…"


def tagged_label(cell: Cell) -> str:
    """A method's title, with what else a figure has to say of its score."""
    tags = (" (tuned)" if cell.tuning else "") + (" (one class)" if cell.one_class else "")
    return cell.title + tags


def styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and dashes for each method of a figure.

    Methods of `_STYLES` always look the same. The others do too, unless two of one figure would
    look alike: their place in `_MORE` comes from their name.
    """
    looks: dict[str, tuple[str, str, str]] = {}
    for name in names:
        start = zlib.crc32(name.encode("utf-8", "replace")) % len(_MORE)
        spare = [*_MORE[start:], *_MORE[:start]]
        free = [look for look in spare if look not in looks.values()] or spare
        looks[name] = _STYLES.get(name, free[0])
    return {name: _options(look) for name, look in looks.items()}


def line_styles() -> list[dict[str, Any]]:
    """Looks for lines that are no methods."""
    return [_options(look) for look in (*_STYLES.values(), *_MORE)]


def _options(look: tuple[str, str, str]) -> dict[str, Any]:
    return dict(zip(("color", "marker", "linestyle"), look, strict=True))


def plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Ticks at the values that were run, in plain digits."""
    axis.set_ticks(list(values), labels=[short(value) for value in values])
    axis.set_minor_locator(_no_ticks())


def short(value: float, form: str = "g") -> str:
    """5e-06 is written 5e-6 in the paper, and 0.0001 beside it is 1e-4."""
    number_text = format(value, form)
    if 0 < abs(value) < 1e-3:
        digits, power = f"{value:.2e}".split("e")
        number_text = f"{float(digits):g}e{int(power)}"
    return number_text.replace("e-0", "e-").replace("e+0", "e")


def log_x_axis(axes: "Axes", values: Sequence[float], base: int = 10) -> None:
    """A log scale of x whose labels are plain numbers; linear if the values span little."""
    from matplotlib.ticker import FuncFormatter

    low, high = min(values), max(values)
    axis = axes.xaxis
    if low <= 0 or high / low < 3:
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        return
    axes.set_xscale("log", base=base)
    plain_log_labels(axis, base, high / low < 1e3)


def plain_log_labels(axis: Any, base: int = 10, dense: bool = False) -> None:
    """Plain numbers at each power; with `dense` at 1, 2 and 5 of each decade, if they fit."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    subs = (1.0, 2.0, 5.0) if base == 10 and dense else (1.0,)
    axis.set_major_locator(LogLocator(base=base, subs=subs, numticks=6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axis.set_minor_locator(_no_ticks())


def legend(axes: "Axes", **options: Any) -> None:
    """Beside the data, never on it."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, **options
        )


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
