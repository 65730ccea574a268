"""How pictures look: colours by format and noise, lines by the rest, and the words around them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from textwrap import wrap
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from scipy.optimize import isotonic_regression

from repro.judge.check import Checked
from repro.spec.arm import Arm

GREY = "#505050"
# In the order in which arms are drawn; told apart with the common kinds of colour blindness, too.
COLOURS = {
    "full": "#000000",
    "bf16": "#5a5a5a",
    "nf4": "#b8860b",
    "mxfp4": "#2f7fb5",
    "nvfp4": "#c0392b",
    "noise": "#6c3483",
}
Line = Literal["-", "--", ":", "-."] | tuple[float, tuple[float, ...]]
LINES: tuple[Line, ...] = (
    "-",
    "--",
    ":",
    "-.",
    (0.0, (5.0, 1.5, 1.0, 1.5, 1.0, 1.5)),
    (0.0, (1.0, 4.0)),
)
# Letters in an inch: of a note, and of the legend with the inches of a mark and of a line.
_NOTE_LETTERS, _KEY_LETTERS, _KEY_MARK, _KEY_LINE = 14, 16.5, 0.6, 0.18
# From the end of a line to its name.
_STROKE = {"arrowstyle": "-", "linewidth": 0.6, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 0}
_ASIDE = re.compile(r" \((QLoRA|QeRL|QeRL without AQN)\)|^control: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How an arm is drawn, and what it is called."""

    label: str
    colour: str
    line: Line


def styles(arms: Iterable[Arm]) -> dict[str, Style]:
    """Return the style of each arm of a picture, in the order in which they are drawn.

    The colour says format and noise; of arms of one colour each has a line of another kind.
    """
    seen: Counter[str] = Counter()
    found = {}
    for arm in sorted(arms, key=lambda arm: [*COLOURS].index(_factor(arm))):
        factor = _factor(arm)
        line = LINES[seen[factor] % len(LINES)]
        label = _ASIDE.sub("", arm.label)
        found[arm.name] = Style(label=label, colour=COLOURS[factor], line=line)
        seen[factor] += 1
    return found


def looks_of(checks: Iterable[Checked]) -> dict[str, Style]:
    """Return the style of each arm of several targets."""
    arms = {arm.name: arm for checked in checks for arm in checked.selection.target.arms}
    return styles(arms.values())


def _factor(arm: Arm) -> str:
    if arm.training == "full":
        return "full"
    if arm.noise is not None and arm.noise.form != "as_published":
        return "noise"
    rounded = arm.weight_format if arm.rounding is None else arm.rounding.format
    return rounded if rounded in COLOURS else "bf16"


def ink(colour: str) -> str:
    """Return the colour of words about what is drawn in `colour`: darker, as words are thin."""
    return to_hex(tuple(0.78 * np.array(to_rgb(colour))))


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches, drawn without any window."""
    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: Axes, lines: str = "y") -> None:
    """Leave only what carries information: no box, light grid lines behind the data.

    With `lines` x the rows are named at their left, and the grid is by value.
    """
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x" if lines == "x" else "y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    if lines == "x":
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)


def frame(figure: Figure, title: str, note: str, keys: Sequence[Artist] = ()) -> None:
    """Write the title, the keys of the legend below it, and the note at the foot.

    What is drawn stays below the keys; the note is broken where the figure ends.
    """
    width, height = figure.get_size_inches()
    figure.text(0.01, 1 - 0.08 / height, title, fontsize=12, va="top")
    columns = _columns([str(key.get_label()) for key in keys], width)
    if keys:
        look: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "borderaxespad": 0.2}
        look |= {"loc": "upper left", "bbox_to_anchor": (0.003, 1 - 0.30 / height)}
        figure.legend(handles=list(keys), ncols=columns, **look)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    above = 0.40 + _KEY_LINE * ceil(len(keys) / columns)
    engine.set(rect=(0.006, 0, 0.988, 1 - above / height))
    lines = [part for line in note.split("\n") for part in wrap(line, int(_NOTE_LETTERS * width))]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=8, color=GREY)


def legend_key(label: str, colour: str = GREY, **look: Any) -> Line2D:
    """Return a key of the legend: a line, or a mark with `linestyle=""`."""
    return Line2D([], [], color=colour, label=label, **look)


def write_beside(
    axes: Axes, words: str, at: tuple[float, float], away: tuple[float, float], **look: Any
) -> None:
    """Write words some points away from a place, so that no line strikes them through."""
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.5}
    axes.annotate(words, at, xytext=away, textcoords="offset points", bbox=behind, **look)


def _columns(labels: Sequence[str], width: float) -> int:
    """Return how many keys fit side by side in a figure of `width` inches, at least one."""
    for columns in range(len(labels), 1, -1):
        # As matplotlib deals them out: down a column before the next begins.
        widest = [max(map(len, column)) for column in np.array_split(labels, columns)]
        if sum(widest) / _KEY_LETTERS + columns * _KEY_MARK <= width:
            return columns
    return 1


def name_ends(
    axes: Axes, ends: Sequence[tuple[Style, float, float]], *, at: float, gap: float
) -> None:
    """Write each style's label next to the end (x, y) of its line, joined by a thin stroke.

    The labels begin at `at` on the horizontal axis, and lie apart by at least `gap`, a share of the
    vertical axis.
    """
    low, high = axes.get_ylim()
    places = apart([y for _, _, y in ends], gap * (high - low))
    for (style, x, y), place in zip(ends, places, strict=True):
        stroke = _STROKE | {"color": style.colour}
        look: dict[str, Any] = {"color": ink(style.colour), "fontsize": 8.5, "va": "center"}
        look |= {"annotation_clip": False, "arrowprops": stroke}
        axes.annotate(style.label, (x, y), xytext=(at, place), **look)


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Return the heights, in the same order, moved as little as sets them `gap` apart."""
    ranks = np.argsort(heights)
    offsets = gap * np.arange(len(ranks))
    placed = np.empty(len(ranks))
    placed[ranks] = isotonic_regression(np.array(heights)[ranks] - offsets).x + offsets
    return [float(value) for value in placed]
