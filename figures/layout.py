"""What pictures share besides colours: an empty figure, its frame of text, labels at lines' ends.

Direct labels at the ends of lines stand in place of a legend wherever there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from textwrap import wrap

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from figures.palette import colour, short

# Letters of a note in an inch, at its size.
_LETTERS = 14
# Of the legend: letters in an inch, inches of a key's mark with the gaps around it, and of a line.
_KEY_LETTERS = 16.5
_KEY_MARK = 0.6
_KEY_LINE = 0.18
# Inches of a picture of curves, which has room for `_NAMES` names at the ends of its lines.
_CURVES_HEIGHT = 4.6
_NAMES = 12


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches, drawn without any window."""
    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: Axes) -> None:
    """Leave only what carries information: no box, light grid lines behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def tidy_rows(axes: Axes) -> None:
    """Do the same where each row is named at its left: grid lines by value, no marks at names."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)


def draw_interval(
    axes: Axes,
    place: float,
    mean: float,
    ends: tuple[float | None, float | None],
    values: Sequence[float],
    tone: str,
    *,
    tick: float = 11,
) -> None:
    """Draw a row at a height: its interval a line, the mean a dot, a tick of a size per value."""
    low, high = ends
    if low is not None and high is not None:
        axes.plot([low, high], [place, place], color=tone, linewidth=2)
    axes.plot(mean, place, "o", color=tone, markersize=6)
    axes.plot(values, [place] * len(values), "|", color=tone, markersize=tick, alpha=0.8)


def frame(figure: Figure, title: str, note: str, keys: Sequence[Artist]) -> None:
    """Write the title, the keys of the legend below it, and the note at the foot.

    What is drawn stays below the keys; the note is broken where the figure ends.
    """
    width, height = figure.get_size_inches()
    figure.text(0.01, 1 - 0.08 / height, title, fontsize=12, va="top")
    place = (0.003, 1 - 0.30 / height)
    columns = _columns([str(key.get_label()) for key in keys], width)
    figure.legend(handles=list(keys), loc="upper left", bbox_to_anchor=place, ncols=columns,
                  frameon=False, fontsize=8.5, borderaxespad=0.2)  # fmt: skip
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    lines = ceil(len(keys) / columns) if keys else 1
    engine.set(rect=(0.006, 0, 0.988, 1 - (0.40 + _KEY_LINE * lines) / height))
    foot(figure, note, tone="#505050")


def _columns(labels: Sequence[str], width: float) -> int:
    """Return how many keys fit side by side in a figure of `width` inches, at least one."""
    for columns in range(len(labels), 1, -1):
        # As matplotlib deals them out: down a column before the next begins.
        widest = [max(map(len, column)) for column in np.array_split(labels, columns)]
        if sum(widest) / _KEY_LETTERS + columns * _KEY_MARK <= width:
            return columns
    return 1


def foot(figure: Figure, note: str, *, tone: str = "#555555") -> None:
    """Write the note at the foot, broken where the figure ends."""
    width = int(_LETTERS * figure.get_size_inches()[0])
    lines = [part for line in note.split("\n") for part in wrap(line, width)]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=8, color=tone)


def name_line(axes: Axes, arm: str, *, end: tuple[float, float], at: tuple[float, float]) -> None:
    """Write an arm's short label at `at`, joined to the `end` of its line by a thin stroke."""
    axes.annotate(
        short(arm),
        xy=end,
        xytext=at,
        color=colour(arm),
        fontsize=8.5,
        va="center",
        annotation_clip=False,
        arrowprops={
            "arrowstyle": "-",
            "color": colour(arm),
            "linewidth": 0.6,
            "relpos": (0, 0.5),
            "shrinkA": 1,
            "shrinkB": 0,
        },
    )


def height_of_curves(names: int) -> float:
    """Return the height, in inches, of a picture whose lines have `names` names at their ends."""
    return _CURVES_HEIGHT * max(1.0, names / _NAMES)


def spread_names(heights: Sequence[float], limits: tuple[float, float]) -> list[float]:
    """Return heights for the names of lines that end at `heights`, a line of text apart.

    Parameters
    ----------
    limits
        Of the axis, in a picture of `height_of_curves`.
    """
    share = 0.052 / max(1.0, len(heights) / _NAMES)
    return spread(heights, share * (limits[1] - limits[0]))


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Return the positions moved apart so that neighbours are at least `gap` apart.

    Their order stays, and so does the middle of each crowd.
    """
    order_of = sorted(range(len(positions)), key=lambda index: positions[index])
    crowds: list[list[int]] = []
    for index in order_of:
        crowds.append([index])
        while len(crowds) > 1 and _bottom(crowds[-1], positions, gap) < (
            _top(crowds[-2], positions, gap) + gap
        ):
            last = crowds.pop()
            crowds[-1] += last
    placed = [0.0] * len(positions)
    for crowd in crowds:
        for place, index in enumerate(crowd):
            placed[index] = _bottom(crowd, positions, gap) + place * gap
    return placed


def _bottom(crowd: Sequence[int], positions: Sequence[float], gap: float) -> float:
    centre = sum(positions[index] for index in crowd) / len(crowd)
    return centre - gap * (len(crowd) - 1) / 2


def _top(crowd: Sequence[int], positions: Sequence[float], gap: float) -> float:
    return _bottom(crowd, positions, gap) + gap * (len(crowd) - 1)
