"""Doses before training: how far each raises the entropy, beside Fig. 5, and what that costs.

On the left a row per arm: its entropy on own finished completions less BF16's, a tick per draw of
the rounding, the mean with its 95 % interval, and the paper's 7B model at step 0. On the right
accuracy against entropy: BF16 at several temperatures is a line, and what lies below it is lost to
rounding beyond exploring.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.layout import (
    draw_interval,
    frame,
    name_line,
    new_figure,
    spread_names,
    tidy,
    tidy_rows,
)
from figures.palette import colour, order, short
from repro.evidence.record import Record
from repro.evidence.verdicts.statistics import mean_interval

NAME = "doses"
_BASE = "bf16_lora"
Values = Mapping[str, Mapping[int, float]]  # by arm and seed


def values_of(records: Sequence[Record], metric: str) -> dict[str, dict[int, float]]:
    """Return a metric of the records of doses by arm and seed."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        estimate = record.metrics.get(metric)
        if record.procedure == "dose" and estimate is not None and estimate.value is not None:
            found.setdefault(record.arm, {})[record.seed] = estimate.value
    return found


def draw(records: Sequence[Record], paper: Mapping[str, float], where: str = "") -> Figure | None:
    """Return the figure, None without records of doses beside BF16's.

    Parameters
    ----------
    paper
        By how much formats raise the entropy at step 0 of its Fig. 5, nats.
    """
    entropy = values_of(records, "entropy_finished")
    accuracy = values_of(records, "accuracy_lenient")
    arms = [arm for arm in order([*entropy]) if arm != _BASE]
    tempered = {
        record.arm for record in records if record.config["arm"].get("temperature_factor", 1) != 1
    }
    if _BASE not in entropy or not arms:
        return None
    figure = new_figure(11.0, 1.9 + 0.29 * len(arms))
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _rises(left, entropy, [arm for arm in arms if arm not in tempered], paper)
    _costs(right, entropy, accuracy, arms, tempered)
    keys = [
        Line2D([], [], color="#444444", marker="o", label="mean, 95 % interval over draws"),
        Line2D([], [], color="#444444", marker="|", linestyle="", label="a draw of the rounding"),
        Line2D([], [], color="#000000", marker="D", linestyle="", label="the paper, 7B, step 0"),
    ]
    draws = len(entropy[_BASE])
    note = f"{draws} orders of channels, each another draw of every rounding; entropy "
    note += "of own finished completions, before any training"
    frame(figure, f"How large each treatment is{where}", note, keys)
    return figure


def _rises(axes: Axes, entropy: Values, arms: Sequence[str], paper: Mapping[str, float]) -> None:
    for place, arm in enumerate(reversed(arms)):
        draws = [entropy[arm][s] - entropy[_BASE][s] for s in entropy[arm] if s in entropy[_BASE]]
        interval = mean_interval(draws)
        ends = (interval.low, interval.high)
        draw_interval(axes, place, interval.value, ends, draws, colour(arm), tick=10)
        if arm in paper:
            axes.plot(paper[arm], place, "D", color="#000000", markersize=4.5, zorder=3)
    axes.axvline(0, color="#9a9a9a", linewidth=0.8)
    axes.set_yticks(range(len(arms)), [short(arm) for arm in reversed(arms)], fontsize=8.5)
    axes.set_xlabel("entropy less BF16's, nats")
    tidy_rows(axes)


def _costs(
    axes: Axes, entropy: Values, accuracy: Values, arms: Sequence[str], tempered: Collection[str]
) -> None:
    points = {
        arm: (fmean(entropy[arm].values()), fmean(accuracy[arm].values()))
        for arm in [_BASE, *arms]
        if accuracy.get(arm)
    }
    line = sorted(points[arm] for arm in points if arm == _BASE or arm in tempered)
    axes.plot(*zip(*line, strict=True), color=colour(_BASE), linewidth=1.4)
    widest = max(x for arm, (x, _) in points.items() if arm not in tempered)
    shown = {arm: point for arm, point in points.items() if point[0] <= widest + 0.05}
    heights = [y for _, y in shown.values()]
    left, low, high = min(x for x, _ in shown.values()), min(heights), max(heights)
    margin = 0.12 * (high - low or 1.0)
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(left - 0.03, widest + 0.05)
    places = spread_names(heights, axes.get_ylim())
    for (arm, point), place in zip(shown.items(), places, strict=True):
        axes.plot(*point, "o", color=colour(arm), markersize=6)
        name_line(axes, arm, end=point, at=(widest + 0.07, place))
    axes.set_xlabel("entropy, nats; line: BF16 by temperature")
    axes.set_ylabel("right, percent of completions at T = 1")
    tidy(axes)
