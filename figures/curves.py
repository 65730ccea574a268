"""Curves: over training steps, of rollouts over batch, of linear layers over the rows of x."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import ceil
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator

from figures import captions
from figures.style import (
    COLOURS,
    Style,
    frame,
    ink,
    legend_key,
    looks_of,
    new_figure,
    styles,
    tidy,
    write_beside,
)
from repro.evidence.estimate import Interval, mean_interval
from repro.evidence.origins import grouped_by
from repro.evidence.record import Record
from repro.judge.check import Checked
from repro.report.doses import BASE
from repro.report.systems_rates import comparisons, measured_rates, printed_rates
from repro.spec.shapes import SHAPES, shape_named

WINDOW = 5
# Arms of one format share its colour, so each has a marker and a dash of its own.
_MARKED = tuple(zip(cycle("os^D"), ("-", "--", ":", "-.") * 4, strict=False))
_BYTES_PER_WEIGHT = 9 / 16
# Of a line, as many as are told apart.
_STEPS = 50
_PAPER: dict[str, Any] = {"markerfacecolor": "none", "markersize": 7}
# A white edge lifts a mean from the runs behind it.
_EDGE = withStroke(linewidth=3.0, foreground="white")
_MEAN: dict[str, Any] = {"linewidth": 1.8, "path_effects": [_EDGE]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A mean at a place of the horizontal axis; the paper's value, None where it has none."""

    place: float
    mean: Interval
    paper: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The interval's ends; the mean itself where there is none."""
        low, high = (self.mean.value if x is None else x for x in (self.mean.low, self.mean.high))
        return low, high


# Points (step, value) of each run, and with them the means over runs.
Runs = list[list[tuple[float, float | None]]]
Curves = tuple[list[Point], Runs]


def training_points(checked: Checked, series: str, window: int = WINDOW) -> dict[str, Curves]:
    """Return the curves of each arm whose records have the series, by training step from 1."""
    curves = {}
    for arm, by_seed in checked.evidence.records.items():
        seeds = [v for record in by_seed.values() if (v := record.series.get(series))]
        runs: Runs = [[*enumerate(smooth(values, window), start=1)] for values in seeds]
        if means := _means(runs):
            curves[arm] = means, runs
    return curves


def _means(runs: Runs) -> list[Point]:
    """Return the means over runs, in the order of their places."""
    known = [point for run in runs for point in run if point[1] is not None]
    by_place = grouped_by(sorted(known, key=itemgetter(0)), itemgetter(0))
    return [
        Point(place=place, mean=mean_interval([y for _, y in points if y is not None]))
        for place, points in by_place.items()
    ]


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
    """Return the centred moving average, over fewer values at the ends; None stays out of it."""
    half = window // 2
    smoothed: list[float | None] = []
    for place in range(len(values)):
        near = [v for v in values[max(0, place - half) : place + half + 1] if v is not None]
        smoothed.append(sum(near) / len(near) if near else None)
    return smoothed


def training(checked: Checked, series: str, title: str, ylabel: str) -> Figure | None:
    """Return the figure of a series over training steps, None without any such series.

    A panel has a centred moving average of each run of an arm, and the mean of these.
    As in the paper's Figs. 4, 7 and 8 a panel has an arm beside what it is compared with: 16-bit
    LoRA, else the first arm, and those before it that a claim names with it.
    """
    target, curves = checked.selection.target, training_points(checked, series)
    arms = [arm.name for arm in target.arms if arm.name in curves]
    if not arms:
        return None
    base = BASE if BASE in arms else arms[0]
    looks, compared = styles(target.arms), [claim.contrast.keys() for claim in target.claims]
    means = {arm: [(point.place, point.mean.value) for point in curves[arm][0]] for arm in arms}
    rows, columns = ceil(len(arms) / 2), min(2, len(arms))
    figure = new_figure(6.0, max(3.6, 1.1 + 1.5 * rows))
    grid = [*figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat]
    if len(grid) > len(arms):
        # Not the last one: only the last row numbers its steps.
        grid.pop(1).set_axis_off()
    for place, (arm, axes) in enumerate(zip(arms, grid, strict=True)):
        tidy(axes)
        look, runs = looks[arm], curves[arm][1]
        for run in runs:
            _draw_line(axes, run, look, linewidth=0.6, label="a run")
        _draw_line(axes, means[arm], look, zorder=3, label="mean of the runs", **_MEAN)
        for other in arms[:place]:
            if other == base or {other, arm} in compared:
                label = f"mean of {looks[other].label}"
                _draw_line(axes, means[other], looks[other], linestyle="--", label=label, **_MEAN)
        seeds = f"{len(runs)} seeds" if len(runs) > 1 else "1 seed"
        axes.set_title(f"{look.label}: {seeds}", color=ink(look.colour), fontsize=9, loc="left")
    for axes in grid[-columns:]:
        axes.set_xlabel("training step")
    figure.supylabel(ylabel, fontsize=10)
    keys = {f"{line.get_label()}": line for axes in reversed(grid) for line in axes.lines}
    note = f"{captions.origin(checked.evidence.every_record())}; moving average over {WINDOW} steps"
    frame(figure, title, note, [*keys.values()])
    return figure


def tested(checked: Checked, title: str) -> Figure | None:
    """Return the figure of the accuracy on the test split along training, a line per arm.

    Sampled as at the end, which is the last point; bands are 95 % t intervals over seeds, and runs
    are thin lines. None where no run was tested along the way.
    """
    target, found = checked.selection.target, heldout_points(checked)
    if not found:
        return None
    looks = styles(target.arms)
    figure = new_figure(6.0, 3.6)
    axes = figure.subplots()
    tidy(axes)
    lines: list[Line2D] = []
    for (arm, (means, runs)), (marker, dashes) in zip(found.items(), _MARKED, strict=False):
        look = looks[arm]
        for run in runs:
            shown: dict[str, Any] = {"linewidth": 0.6, "linestyle": dashes}
            axes.plot(*zip(*run, strict=True), color=look.colour, **shown)
        places = [point.place for point in means]
        if len(runs) > 2:
            low, high = zip(*(point.ends for point in means), strict=True)
            axes.fill_between(places, low, high, color=look.colour, alpha=0.15, linewidth=0)
        heights = [point.mean.value for point in means]
        label = f"{look.label}: {len(runs)} seeds"
        shown = {"marker": marker, "linestyle": dashes, "label": label} | _MEAN
        lines += axes.plot(places, heights, color=look.colour, **shown)
    axes.set_xlabel("training step")
    axes.set_ylabel("right on the test split, %")
    frame(figure, title, captions.origin(checked.evidence.every_record()), lines)
    return figure


def heldout_points(checked: Checked) -> dict[str, Curves]:
    """Return the curves of each arm tested, in percent by training step."""
    found = {}
    for arm, by_seed in checked.evidence.records.items():
        runs: Runs = []
        for record in by_seed.values():
            steps, heights = (record.series.get(f"test_{of}", ()) for of in ("steps", "accuracy"))
            end = record.metrics["accuracy"].value if steps else None
            if end is not None:
                places = [*steps, record.facts["optimizer_steps"]]
                runs.append([*zip(map(float, places), [*heights, end], strict=True)])
        if runs:
            found[arm] = _means(runs), runs
    return found


def _draw_line(
    axes: Axes, points: Sequence[tuple[float, float | None]], style: Style, **look: Any
) -> None:
    """Draw a moving average at no more steps than the eye tells apart, the last among them."""
    stride = min(WINDOW, ceil(len(points) / _STEPS))
    places, heights = zip(*points[:-1:stride], points[-1], strict=True)
    axes.plot(places, heights, color=style.colour, **look)


# (model, arm) to its points.
Rates = Mapping[tuple[str, str], Sequence[Point]]


def rates(checks: Sequence[Checked], expected: Path) -> Rates:
    """Return tokens per second by batch of targets that time rollouts, smallest models first."""
    found: dict[tuple[str, str], list[Point]] = {}
    for checked in checks:
        printed = printed_rates(checked.selection.target, expected)
        for model, batch, arm, values in measured_rates(checked):
            mean = mean_interval([*values.values()])
            paper = printed.get((f"{model} batch {batch}", arm))
            found.setdefault((model, arm), []).append(Point(place=batch, mean=mean, paper=paper))
    ordered = sorted(found, key=lambda key: [*SHAPES].index(key[0]))
    return {key: sorted(found[key], key=lambda point: point.place) for key in ordered}


def gains(checks: Sequence[Checked], expected: Path) -> Rates:
    """Return how many times 16-bit LoRA's tokens per second others' are, by batch."""
    found: dict[tuple[str, str], dict[int, Point]] = {}
    for checked in checks:
        for item in comparisons(checked, expected):
            if item.slow == BASE and item.ratio is not None:
                point = Point(place=item.place, mean=item.ratio, paper=item.paper)
                found.setdefault((item.model, item.fast), {})[item.place] = point
    return {key: [points[place] for place in sorted(points)] for key, points in found.items()}


def by_batch(checks: Sequence[Checked], expected: Path, title: str) -> Figure:
    """Return the figure: a column per model, above the rates, below how many times LoRA's.

    Means with 95 % t intervals, below with those of verdicts; open circles are the paper's cells.
    """
    lines, ratios, looks = rates(checks, expected), gains(checks, expected), looks_of(checks)
    models = list(dict.fromkeys(model for model, _ in lines))
    figure = new_figure(1.0 + 2.9 * len(models), 6.4)
    grid = figure.subplots(2, len(models), sharex=True, sharey="row", squeeze=False)
    for (above, below), model in zip(grid.T, models, strict=True):
        for arm, style in looks.items():
            _draw_rates(above, lines.get((model, arm), ()), style)
            gained = ratios.get((model, arm), ())
            _draw_rates(below, gained, style)
            for point in gained:
                ratio, ours = point.mean.value, ink(style.colour)
                at = (point.place, ratio)
                write_beside(below, f"{ratio:.2f}", at, (0, 6), ha="center", fontsize=8, color=ours)
        places = sorted({p.place for (name, _), of in lines.items() if name == model for p in of})
        _frame_column(above, below, f"Qwen2.5-{model.upper()}", "{x:,.0f}", places, "batch")
        above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        above.minorticks_off()
        below.axhline(1.0, color=looks[BASE].colour, linewidth=1.2)
        below.set_ylim(0, 1.12 * max(p.ends[1] for of in ratios.values() for p in of))
        room = max(places[-1] / places[0], 2) ** 0.13
        below.set_xlim(places[0] / room, places[-1] * room)
        below.minorticks_off()
    grid[0][0].set_ylabel("tokens per second")
    grid[1][0].set_ylabel("times 16-bit LoRA's")
    records = [record for checked in checks for record in checked.evidence.every_record()]
    note = f"{captions.origin(records)}; mean and 95 % interval\n{captions.rollouts(records)}"
    frame(figure, title, note, _keys(lines, looks))
    return figure


def _frame_column(
    above: Axes, below: Axes, title: str, form: str, places: Sequence[float], xlabel: str
) -> None:
    """Set title and axes of two panels over powers of two: a logarithmic one, and ratios below."""
    tidy(above)
    tidy(below)
    above.set_title(title, fontsize=10, loc="left")
    above.set_yscale("log")
    above.yaxis.set_major_formatter(form)
    below.set_xscale("log", base=2)
    below.set_xticks(places)
    below.xaxis.set_major_formatter("{x:g}")
    below.set_xlabel(xlabel)


def _draw_rates(axes: Axes, points: Sequence[Point], style: Style) -> None:
    """Draw a line with its intervals, and the paper's values as open circles."""
    for point in points:
        if point.paper is not None:
            axes.plot(point.place, point.paper, "o", color=style.colour, **_PAPER)
    means = [point.mean.value for point in points]
    spread = [(of - p.ends[0], p.ends[1] - of) for p, of in zip(points, means, strict=True)]
    if points:
        look: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "capsize": 2}
        places, ends = [p.place for p in points], [*zip(*spread, strict=True)]
        axes.errorbar(places, means, yerr=ends, marker="o", markersize=4, **look)


def _keys(lines: Rates, looks: Mapping[str, Style]) -> list[Line2D]:
    """Return the legend: a line per arm, and the marks that occur."""
    points = [point for of_line in lines.values() for point in of_line]
    handles = [
        legend_key(style.label, style.colour, linestyle=style.line, marker="o", markersize=4)
        for style in looks.values()
    ]
    if any(point.paper is not None for point in points):
        said = "the paper, on one H100-80GB"
        handles.append(legend_key(said, marker="o", linestyle="", **_PAPER))
    return handles


# Rows of x, then microseconds of the four layers together: ours, bfloat16's, the floor's.
Timed = tuple[int, float, float, float]


def times(checked: Checked) -> dict[str, dict[str, list[Timed]]]:
    """Return {block: {arm: times}} of what the records time, from few rows of x to many."""
    found: dict[str, dict[str, list[Timed]]] = {}
    ratios = [one for one in checked.selection.target.metrics if one.quantity == "ratio"]
    for arm, by_seed in checked.evidence.records.items():
        timed = [*by_seed.values()]
        cells = ((one.model, one.batch) for one in ratios if one.name in timed[0].metrics)
        for block, count in cells:
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


def linear_layers(checked: Checked, title: str) -> Figure | None:
    """Return the figure of a decoder block's linear layers, a column per block.

    The time stands above the gain over bfloat16. The floor is what the device's own measured rates
    allow: the weights' bytes at the copy rate, or the arithmetic at the matmul rate, whichever is
    longer. Values are medians over seeds.
    """
    found = times(checked)
    if not found:
        return None
    blocks = sorted(found, key=[*SHAPES].index)
    figure = new_figure(5.0 * len(blocks), 7.0)
    grid = figure.subplots(2, len(blocks), sharex=True, squeeze=False)
    looks = styles(checked.selection.target.arms)
    for (above, below), block in zip(grid.T, blocks, strict=True):
        _draw_layers(above, below, found[block], looks)
        heading = f"Qwen2.5-{block.upper()}, four linear layers"
        rows = sorted({time[0] for of_arm in found[block].values() for time in of_arm})
        _frame_column(above, below, heading, "{x:g}", rows, "rows of x")
        below.set_ylim(bottom=0.0)
        below.tick_params(axis="x", labelrotation=45)
    grid[0][0].set_ylabel("microseconds")
    grid[1][0].set_ylabel("times as fast as BF16")
    arms = {arm for of_block in found.values() for arm in of_block}
    timed = [record for record in checked.evidence.every_record() if record.arm in arms]
    note = "medians; floor: 4-bit weights at the measured copy or matmul rate"
    keys = grid[0][0].get_legend_handles_labels()[0]
    frame(figure, title, f"{captions.origin(timed)}; {note}", keys)
    return figure


def _draw_layers(
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
