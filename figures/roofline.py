"""Time of a decoder block's linear layers over the rows of x, against bfloat16 and the floor.

The floor is what the device's own measured rates allow: the weights' bytes at the copy rate, or
the arithmetic at the matmul rate, whichever is longer. Medians over seeds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import captions
from figures.style import COLOURS, Style, frame, new_figure, styles, tidy
from repro.evidence.record import Record
from repro.judge.check import Checked
from repro.spec.shapes import shape_named

_OURS = re.compile(r"seconds_ours_(\w+)_(\d+)")
_BYTES_PER_WEIGHT = 9 / 16


# Rows of x, then microseconds of the four layers together: ours, bfloat16's, the floor's.
Timed = tuple[int, float, float, float]


def times(checked: Checked) -> dict[str, dict[str, list[Timed]]]:
    """Return {block: {arm: times}} of what the records time, from few rows of x to many."""
    found: dict[str, dict[str, list[Timed]]] = {}
    for arm, by_seed in checked.evidence.records.items():
        timed = [*by_seed.values()]
        matches = filter(None, map(_OURS.fullmatch, timed[0].metrics))
        for block, count in sorted((match[1], int(match[2])) for match in matches):
            ours, bf16 = (
                _median(timed, f"seconds_{by}_{block}_{count}") for by in ("ours", "bf16")
            )
            point = (count, ours * 1e6, bf16 * 1e6, _floor(timed, block, count) * 1e6)
            found.setdefault(block, {}).setdefault(arm, []).append(point)
    return found


def _median(records: Sequence[Record], metric: str) -> float:
    values = [record.value(metric) for record in records]
    return median(value for value in values if value is not None)


def _floor(records: Sequence[Record], block: str, count: int) -> float:
    timing = [record.facts["timing"] for record in records]
    copy = median(float(item["bytes_per_second"]) for item in timing)
    matmul = median(float(item["flops_per_second"]) for item in timing)
    weights = sum(N * K for N, K in shape_named(block).projections().values())
    return max(weights * _BYTES_PER_WEIGHT / copy, 2 * count * weights / matmul)


def draw(checked: Checked, title: str) -> Figure | None:
    """Return the figure: a column per block; above the time, below the gain over bfloat16."""
    found = times(checked)
    if not found:
        return None
    blocks = sorted(found, key=lambda name: int(name.rstrip("b")))
    figure = new_figure(5.0 * len(blocks), 7.0)
    grid = figure.subplots(2, len(blocks), sharex=True, squeeze=False)
    looks = styles(checked.selection.target.arms)
    for column, block in zip(grid.T, blocks, strict=True):
        above, below = column
        tidy(above)
        tidy(below)
        _draw_lines(above, below, found[block], looks)
        above.set_title(f"Qwen2.5-{block.upper()}, four linear layers", loc="left", fontsize=10)
        above.set_yscale("log")
        above.yaxis.set_major_formatter("{x:g}")
        below.set_ylim(bottom=0.0)
        below.set_xscale("log", base=2)
        below.set_xticks(sorted({time[0] for of_arm in found[block].values() for time in of_arm}))
        below.xaxis.set_major_formatter("{x:g}")
        below.tick_params(axis="x", labelrotation=45)
        below.set_xlabel("rows of x")
    grid[0][0].set_ylabel("microseconds")
    grid[1][0].set_ylabel("times as fast as BF16")
    timed = [r for r in checked.evidence.every_record() if any(map(_OURS.fullmatch, r.metrics))]
    note = "medians; floor: 4-bit weights at the measured copy or matmul rate"
    keys = grid[0][0].get_legend_handles_labels()[0]
    frame(figure, title, f"{captions.origin(timed)}; {note}", keys)
    return figure


def _draw_lines(
    above: Axes, below: Axes, found: Mapping[str, Sequence[Timed]], looks: Mapping[str, Style]
) -> None:
    """Draw each format's line and, by the rows of the first, bfloat16's and the floor."""

    def draw_line(arm: str, place: int, **look: Any) -> None:
        columns = [*zip(*found[arm], strict=True)]
        above.plot(columns[0], columns[place], **look)
        below.plot(columns[0], [time[2] / time[place] for time in found[arm]], **look)

    arms = [arm for arm in looks if arm in found]
    for arm in arms:
        draw_line(arm, 1, color=looks[arm].colour, marker="o", markersize=3, label=looks[arm].label)
    draw_line(arms[0], 2, color=COLOURS["bf16"], label="BF16")
    draw_line(arms[0], 3, color="#000000", linestyle=":", label="floor of 4 bits")
