"""Rows with intervals: doses before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.style import GREY, frame, name_ends, new_figure, styles, tidy
from repro.judge.check import Checked
from repro.report.doses import doses, paper_rises

_BASE = "bf16_lora"
_ENTROPY, _ACCURACY = "entropy_finished", "accuracy_lenient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A dot with its interval (None of one value), a tick for each value, the paper's diamond."""

    label: str
    mean: float
    low: float | None
    high: float | None
    colour: str
    values: Sequence[float]
    paper: float | None


def draw_rows(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw rows from above, each named at its left."""
    for place, row in enumerate(rows):
        if row.low is not None and row.high is not None:
            axes.plot([row.low, row.high], [place, place], color=row.colour, linewidth=2)
        axes.plot(row.mean, place, "o", color=row.colour, markersize=5)
        axes.plot(row.values, [place] * len(row.values), "|", color=row.colour, alpha=0.8,
                  markersize=10)  # fmt: skip
        if row.paper is not None:
            axes.plot(row.paper, place, "D", color="#000000", markersize=4.5, zorder=3)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    tidy(axes, "x")


def dose(checked: Checked, expected: Path, title: str) -> Figure | None:
    """Return the figure of doses before training; None if only BF16 has records.

    On the left how far each treatment raises the entropy of own finished completions, beside Fig.
    5 at step 0. On the right accuracy against entropy: BF16 at several temperatures is a line, and
    what lies below it is lost to rounding beyond exploring.
    """
    entropy, found = checked.evidence.values(_ENTROPY), doses(checked)
    if not found:
        return None
    looks, paper = styles(checked.selection.target.arms), paper_rises(expected)
    rows: list[Row] = []
    for arm in (arm for arm in looks if arm in found and found[arm].arm.temperature_factor == 1):
        of, own, base = found[arm].rise, entropy[arm], entropy[_BASE]
        draws = [own[draw] - base[draw] for draw in own if draw in base]
        rows.append(Row(label=looks[arm].label, colour=looks[arm].colour, mean=of.value,
                        low=of.low, high=of.high, values=draws, paper=paper.get(arm)))  # fmt: skip
    # The right panel's label needs its height, however few the rows.
    height = 1.7 + sum(0.12 + 0.17 * (row.label.count("\n") + 1) for row in rows)
    figure = new_figure(11.5, max(3.9, 0.3 + height))
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    draw_rows(left, rows)
    left.axvline(0, color="#9a9a9a", linewidth=0.8)
    left.set_xlabel("entropy less BF16's, nats")
    _costs(right, checked, entropy)
    keys = [
        Line2D([], [], color=GREY, marker="o", label="mean, 95 % interval over draws"),
        Line2D([], [], color=GREY, marker="|", linestyle="", label="a draw of the rounding"),
        Line2D([], [], color="#000000", marker="D", linestyle="", label="the paper, 7B, step 0"),
    ]
    note = f"{len(entropy[_BASE])} orders of channels, each another draw of every rounding; entropy"
    frame(figure, title, f"{note} of own finished completions, before any training", keys)
    return figure


def _costs(axes: Axes, checked: Checked, entropy: Mapping[str, Mapping[object, float]]) -> None:
    arms = {arm.name: arm for arm in checked.selection.target.arms}
    looks, accuracy = styles(arms.values()), checked.evidence.values(_ACCURACY)
    points = {
        arm: (fmean(entropy[arm].values()), fmean(accuracy[arm].values()))
        for arm in looks
        if arm in entropy and arm in accuracy
    }
    tempered = [points[arm] for arm in points if arm == _BASE or arms[arm].temperature_factor != 1]
    axes.plot(*zip(*sorted(tempered), strict=True), color=looks[_BASE].colour, linewidth=1.4)
    widest = max(x for arm, (x, _) in points.items() if arms[arm].temperature_factor == 1)
    shown = {arm: point for arm, point in points.items() if point[0] <= widest + 0.05}
    for arm, point in shown.items():
        axes.plot(*point, "o", color=looks[arm].colour, markersize=6)
    axes.set_xlim(min(x for x, _ in shown.values()) - 0.03, widest + 0.05)
    low, high = min(y for _, y in shown.values()), max(y for _, y in shown.values())
    margin = 0.12 * (high - low or 1.0)
    axes.set_ylim(low - margin, high + margin)
    ends = [(looks[arm], *point) for arm, point in shown.items()]
    name_ends(axes, ends, at=widest + 0.07, gap=0.052)
    axes.set_xlabel("entropy, nats; line: BF16 by temperature")
    axes.set_ylabel("right, percent of completions at T = 1")
    tidy(axes)
