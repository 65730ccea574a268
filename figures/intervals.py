"""Rows with intervals: doses before training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.style import frame, legend_key, name_ends, new_figure, styles, tidy
from repro.judge.check import Checked
from repro.report.doses import ACCURACY, BASE, ENTROPY, doses, paper_rises


def dose(checked: Checked, expected: Path, title: str) -> Figure | None:
    """Return the figure of doses before training; None if only BF16 has records.

    On the left how far each treatment raises the entropy of own finished completions, beside Fig.
    5 at step 0. On the right accuracy against entropy: BF16 at several temperatures is a line, and
    what lies below it is lost to rounding beyond exploring.
    """
    entropy, found = checked.evidence.values(ENTROPY), doses(checked)
    if not found:
        return None
    looks, paper = styles(checked.selection.target.arms), paper_rises(expected)
    arms = [arm for arm in looks if arm in found and found[arm].arm.temperature_factor == 1]
    labels = [looks[arm].label for arm in arms]
    # The right panel's label needs its height, however few the rows.
    height = 1.7 + sum(0.12 + 0.17 * (label.count("\n") + 1) for label in labels)
    figure = new_figure(11.5, max(3.9, 0.3 + height))
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    for place, arm in enumerate(arms):
        rise, own, base = found[arm].rise, entropy[arm], entropy[BASE]
        draws, colour = [own[draw] - base[draw] for draw in own if draw in base], looks[arm].colour
        if rise.low is not None and rise.high is not None:
            left.plot([rise.low, rise.high], [place, place], color=colour, linewidth=2)
        left.plot(rise.value, place, "o", color=colour, markersize=5)
        left.plot(draws, [place] * len(draws), "|", color=colour, alpha=0.8, markersize=10)
        if arm in paper:
            left.plot(paper[arm], place, "D", color="#000000", markersize=4.5, zorder=3)
    left.set_yticks(range(len(arms)), labels, fontsize=8.5)
    left.set_ylim(len(arms) - 0.4, -0.6)
    tidy(left, "x")
    left.axvline(0, color="#9a9a9a", linewidth=0.8)
    left.set_xlabel("entropy less BF16's, nats")
    _costs(right, checked, entropy)
    keys = [
        legend_key("mean, 95 % interval over draws", marker="o"),
        legend_key("a draw of the rounding", marker="|", linestyle=""),
        legend_key("the paper, 7B, step 0", "#000000", marker="D", linestyle=""),
    ]
    note = f"{len(entropy[BASE])} orders of channels, each another draw of every rounding; entropy"
    frame(figure, title, f"{note} of own finished completions, before any training", keys)
    return figure


def _costs(axes: Axes, checked: Checked, entropy: Mapping[str, Mapping[object, float]]) -> None:
    arms = {arm.name: arm for arm in checked.selection.target.arms}
    looks, accuracy = styles(arms.values()), checked.evidence.values(ACCURACY)
    points = {
        arm: (fmean(entropy[arm].values()), fmean(accuracy[arm].values()))
        for arm in looks
        if arm in entropy and arm in accuracy
    }
    tempered = [points[arm] for arm in points if arm == BASE or arms[arm].temperature_factor != 1]
    axes.plot(*zip(*sorted(tempered), strict=True), color=looks[BASE].colour, linewidth=1.4)
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
