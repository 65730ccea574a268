"""Time of a decoder block's linear layers over the rows of x, against bfloat16 and the floor.

The floor is what the device's own measured rates allow: the weights' bytes at the copy rate, or
the arithmetic at the matmul rate, whichever is longer. Medians over seeds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRow:
    """One format at one number of rows of x; microseconds of the four linear layers together."""

    arm: str
    block: str
    rows: int
    ours: float
    bf16: float
    floor: float


def rows(checked: Checked) -> list[RooflineRow]:
    """Return a row for each arm, block and number of rows that the records time."""
    table = []
    for arm, by_seed in checked.evidence.records.items():
        timed = [*by_seed.values()]
        for match in filter(None, map(_OURS.fullmatch, timed[0].metrics)):
            block, count = match[1], int(match[2])
            row = RooflineRow(
                arm=arm,
                block=block,
                rows=count,
                ours=_median(timed, match[0]) * 1e6,
                bf16=_median(timed, f"seconds_bf16_{block}_{count}") * 1e6,
                floor=_floor(timed, block, count) * 1e6,
            )
            table.append(row)
    return sorted(table, key=lambda row: (row.arm, row.block, row.rows))


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
    table = rows(checked)
    if not table:
        return None
    blocks = sorted({row.block for row in table}, key=lambda name: int(name.rstrip("b")))
    figure = new_figure(5.0 * len(blocks), 7.0)
    grid = figure.subplots(2, len(blocks), sharex=True, squeeze=False)
    looks = styles(checked.selection.target.arms)
    for column, block in zip(grid.T, blocks, strict=True):
        of_block = [row for row in table if row.block == block]
        above, below = column
        tidy(above)
        tidy(below)
        _draw_lines(above, below, of_block, looks)
        above.set_title(f"Qwen2.5-{block.upper()}, four linear layers", loc="left", fontsize=10)
        above.set_yscale("log")
        above.yaxis.set_major_formatter("{x:g}")
        below.set_ylim(bottom=0.0)
        below.set_xscale("log", base=2)
        below.set_xticks(sorted({row.rows for row in of_block}))
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
    above: Axes, below: Axes, table: Sequence[RooflineRow], looks: Mapping[str, Style]
) -> None:
    """Draw each format's line and, by the rows of the first, bfloat16's and the floor."""

    def draw_line(line: Sequence[RooflineRow], times: Sequence[float], **look: Any) -> None:
        counts = [row.rows for row in line]
        above.plot(counts, times, **look)
        below.plot(counts, [row.bf16 / time for row, time in zip(line, times, strict=True)], **look)

    lines = {arm: line for arm in looks if (line := [row for row in table if row.arm == arm])}
    for arm, line in lines.items():
        draw_line(line, [row.ours for row in line], color=looks[arm].colour, marker="o",
                  markersize=3, label=looks[arm].label)  # fmt: skip
    first = next(iter(lines.values()))
    draw_line(first, [row.bf16 for row in first], color=COLOURS["bf16"], label="BF16")
    draw_line(first, [row.floor for row in first], color="#000000", linestyle=":",
              label="floor of 4 bits")  # fmt: skip
