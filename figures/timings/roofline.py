"""Time of a decoder block's linear layers over the rows of x, against bfloat16 and the floor.

The floor is what the device's own measured rates allow: the weights' bytes at the copy rate, or
the arithmetic at the matmul rate, whichever is longer. Drawn from the records of the target
`kernels`; medians over seeds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.layout import frame, new_figure, tidy
from figures.palette import colour, order, short
from repro.evidence.record import Record

NAME = "roofline"
_OURS = re.compile(r"seconds_ours_(\w+)_(\d+)")
# Weights of the four linear layers of a block, fused q/k/v and gate/up.
_WEIGHTS = {
    "7b": (4608 + 3584 + 37888) * 3584 + 3584 * 18944,
    "32b": (7168 + 5120 + 55296) * 5120 + 5120 * 27648,
}
_BYTES_PER_WEIGHT = 9 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRow:
    """One block, one format, one number of rows.

    Attributes
    ----------
    microseconds, bf16, floor
        Of the four linear layers together.
    """

    arm: str
    block: str
    rows: int
    microseconds: float
    bf16: float
    floor: float


def rows(records: Sequence[Record]) -> list[RooflineRow]:
    """Return a row for each arm, block and number of rows that the records time."""
    by_arm: dict[str, list[Record]] = {}
    for record in records:
        if any(_OURS.fullmatch(name) for name in record.metrics):
            by_arm.setdefault(record.arm, []).append(record)
    table = []
    arms = order(list(by_arm))
    for arm in arms:
        timed = by_arm[arm]
        for name in timed[0].metrics:
            match = _OURS.fullmatch(name)
            if match is None:
                continue
            block, count = match[1], int(match[2])
            table.append(
                RooflineRow(
                    arm=arm,
                    block=block,
                    rows=count,
                    microseconds=_median(timed, name) * 1e6,
                    bf16=_median(timed, f"seconds_bf16_{block}_{count}") * 1e6,
                    floor=_floor(timed, block, count) * 1e6,
                )
            )
    # Metrics of a record come in the order of their names, where 1024 stands before 8.
    return sorted(table, key=lambda row: (arms.index(row.arm), row.block, row.rows))


def _median(records: Sequence[Record], metric: str) -> float:
    values = [record.value(metric) for record in records]
    return median(value for value in values if value is not None)


def _floor(records: Sequence[Record], block: str, count: int) -> float:
    timing = [record.effects["timing"] for record in records]
    copy = median(float(item["bytes_per_second"]) for item in timing)
    matmul = median(float(item["flops_per_second"]) for item in timing)
    weights = _WEIGHTS[block]
    return max(weights * _BYTES_PER_WEIGHT / copy, 2 * count * weights / matmul)


def draw(rows: Sequence[RooflineRow], where: str = "", note: str = "") -> Figure:
    """Return the figure: a column per block; above the time, below the gain over bfloat16."""
    blocks = sorted({row.block for row in rows}, key=lambda name: int(name.rstrip("b")))
    figure = new_figure(5.0 * len(blocks), 7.0)
    axes = figure.subplots(2, len(blocks), sharex=True, squeeze=False)
    for column, block in enumerate(blocks):
        block_rows = [row for row in rows if row.block == block]
        for part, draw_part in zip(axes[:, column], (_draw_times, _draw_gains), strict=True):
            tidy(part)
            draw_part(part, block_rows)
        axes[0][column].set_title(f"Qwen2.5-{block.upper()}, four linear layers", loc="left",
                                  fontsize=10)  # fmt: skip
    axes[0][0].set_ylabel("microseconds")
    axes[1][0].set_ylabel("times as fast as BF16")
    keys = axes[0][0].get_legend_handles_labels()[0]
    frame(figure, f"Linear layers over the rows of x{where}", note, keys)
    return figure


def _lines(rows: Sequence[RooflineRow]) -> list[tuple[str, list[RooflineRow]]]:
    """Return (arm, its rows), in the order of the arms."""
    return [
        (arm, [row for row in rows if row.arm == arm])
        for arm in order(sorted({row.arm for row in rows}))
    ]


def _draw_times(axes: Axes, rows: Sequence[RooflineRow]) -> None:
    first = _lines(rows)[0][1]
    counts = [row.rows for row in first]
    axes.plot(counts, [row.bf16 for row in first], color=colour("bf16"), label="BF16")
    for arm, line in _lines(rows):
        axes.plot(
            [row.rows for row in line],
            [row.microseconds for row in line],
            color=colour(arm),
            marker="o",
            markersize=3,
            label=short(arm),
        )
    floor = [row.floor for row in first]
    axes.plot(counts, floor, color="#000000", linestyle=":", label="floor of 4 bits")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")


def _draw_gains(axes: Axes, rows: Sequence[RooflineRow]) -> None:
    axes.axhline(1.0, color=colour("bf16"))
    for arm, line in _lines(rows):
        axes.plot(
            [row.rows for row in line],
            [row.bf16 / row.microseconds for row in line],
            color=colour(arm),
            marker="o",
            markersize=3,
        )
    first = _lines(rows)[0][1]
    counts = [row.rows for row in first]
    axes.plot(counts, [row.bf16 / row.floor for row in first], color="#000000", linestyle=":")
    axes.set_ylim(bottom=0.0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.tick_params(axis="x", labelrotation=45)
    axes.set_xlabel("rows of x")
