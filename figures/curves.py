"""Curves over training steps: reward (Fig. 4, 7, 8, 12, 13) and entropy (Fig. 5, 14).

One line per arm: the mean over seeds of a centred moving average, with the 95 % t interval of that
mean where it has three seeds or more. Averaging comes first within a seed, then between seeds, so
the interval is over seeds. The controls have a panel of their own, because they are not in the
paper and must not rise.

Held-out accuracy (what "grows faster" is about) is drawn over sampled tokens, as in the area that
is tested, so an arm that answers at length is not ahead for it: each seed's curve is straight
between its evaluations and level after the last.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.captions import ArmRow, caption, rate_of
from figures.layout import foot, height_of_curves, name_line, new_figure, spread_names, tidy
from figures.palette import CONTROLS, colour, dash, order
from repro.evidence.record import Record
from repro.evidence.verdicts.statistics import mean_interval

WINDOW = 5
HELDOUT = "heldout_accuracy"
# Of held-out accuracy: places along the axis, and tokens in one of its units, thousands.
_POINTS = 40
_TOKENS = 1000
# An interval of two seeds is thirteen standard errors wide on either side: it hides the lines.
_BAND_SEEDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRow(ArmRow):
    """One arm at one place: mean over seeds, its interval (None of one or two), learning rate.

    Attributes
    ----------
    place
        Training step, from 1, or training tokens.
    """

    place: float
    mean: float
    low: float | None
    high: float | None


def curve_rows(records: Sequence[Record], series: str, window: int = WINDOW) -> list[CurveRow]:
    """Return one row per arm and step, for the arms whose records have the series."""
    by_arm: dict[str, list[list[float | None]]] = {}
    for record in records:
        values = record.series.get(series)
        if record.ok and values:
            by_arm.setdefault(record.arm, []).append(smooth(values, window))
    rows = []
    for arm in order(list(by_arm)):
        rate = rate_of(records, arm)
        for step in range(max(len(values) for values in by_arm[arm])):
            present = [
                value
                for values in by_arm[arm]
                if step < len(values) and (value := values[step]) is not None
            ]
            if present:
                rows.append(mean_row(arm, step + 1, present, rate))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A picture of one series of records.

    Attributes
    ----------
    name
        In the files' names.
    series
        The first of these that the records have is drawn.
    """

    name: str
    series: tuple[str, ...]
    title: str
    ylabel: str

    def rows(self, records: Sequence[Record]) -> list[CurveRow]:
        """Return a row per arm and step, none where the records have no such series."""
        return next(filter(None, (curve_rows(records, series) for series in self.series)), [])

    def draw(self, rows: Sequence[CurveRow], where: str = "") -> Figure:
        """Return the figure; `where` is said behind its title."""
        return draw_curves(rows, title=f"{self.title}{where}", ylabel=self.ylabel)


# The total reward of controls is another thing (a coin, the format): the share of right answers
# among the sampled completions is drawn of every arm.
REWARD = Series(
    name="reward_curves",
    series=("accuracy", "reward"),
    title="Right answers during training",
    ylabel="share of sampled completions that are right",
)
ENTROPY = Series(
    name="entropy_curves",
    series=("entropy",),
    title="Entropy during training",
    ylabel="mean token entropy, nats",
)


def mean_row(arm: str, place: float, values: Sequence[float], rate: float | None) -> CurveRow:
    """Return the row of an arm whose seeds have these values at a place."""
    interval = mean_interval(values)
    banded = interval.n >= _BAND_SEEDS
    return CurveRow(
        arm=arm,
        place=place,
        mean=interval.value,
        low=interval.low if banded else None,
        high=interval.high if banded else None,
        n=interval.n,
        rate=rate,
    )


def mean_words(rows: Sequence[CurveRow]) -> str:
    """Return what lines and bands show."""
    return "mean and its 95 % t interval" if any(row.low is not None for row in rows) else "mean"


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
    """Return the centred moving average, over fewer values at the ends; None stays out of it."""
    half = window // 2
    smoothed: list[float | None] = []
    for place in range(len(values)):
        near = [v for v in values[max(0, place - half) : place + half + 1] if v is not None]
        smoothed.append(sum(near) / len(near) if near else None)
    return smoothed


def draw_curves(rows: Sequence[CurveRow], *, title: str, ylabel: str) -> Figure:
    """Return the figure: the paper's arms on the left, controls (where recorded) on the right."""
    controls = [row for row in rows if row.arm in CONTROLS]
    paper = [row for row in rows if row.arm not in CONTROLS]
    names = max(len({row.arm for row in part}) for part in (paper, controls))
    figure = new_figure(10.5 if controls else 7.5, height_of_curves(names))
    if controls:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.6, 1])
        panels = [(left, paper, "arms of the paper"), (right, controls, "controls")]
    else:
        panels = [(figure.subplots(), paper, "")]
    low, high = _limits(rows)
    for axes, part, heading in panels:
        axes.set_ylim(low, high)
        _panel(axes, part)
        axes.set_title(heading, fontsize=10, loc="left", color="#444444")
        axes.set_xlabel("training step")
    panels[0][0].set_ylabel(ylabel)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    foot(figure, caption(rows, f"{mean_words(rows)}, moving average over {WINDOW} steps"))
    return figure


def _limits(rows: Sequence[CurveRow]) -> tuple[float, float]:
    bottoms = [row.mean if row.low is None else row.low for row in rows]
    tops = [row.mean if row.high is None else row.high for row in rows]
    low, high = min(bottoms), max(tops)
    margin = 0.04 * (high - low or 1.0)
    return low - margin, high + margin


def _panel(axes: Axes, rows: Sequence[CurveRow]) -> None:
    tidy(axes)
    ends = draw_lines(axes, rows)
    if not ends:
        return
    last = max(row.place for row in ends)
    name_lines(axes, ends, at=last + 0.06 * last)
    axes.set_xlim(1, last + 0.02 * last)


def draw_lines(
    axes: Axes,
    rows: Sequence[CurveRow],
    *,
    unit: float = 1.0,
    limits: tuple[float, float] = (-math.inf, math.inf),
) -> list[CurveRow]:
    """Draw a line with its interval for each arm; return the last row of each.

    Parameters
    ----------
    unit
        Places in one unit of the axis.
    limits
        Where intervals are cut.
    """
    ends = []
    for arm in order(list({row.arm for row in rows})):
        part = [row for row in rows if row.arm == arm]
        places = [row.place / unit for row in part]
        means = [row.mean for row in part]
        axes.plot(places, means, color=colour(arm), linestyle=dash(arm), linewidth=1.8)
        if all(row.low is not None for row in part):
            low = [max(limits[0], row.low or 0.0) for row in part]
            high = [min(limits[1], row.high or 0.0) for row in part]
            axes.fill_between(places, low, high, color=colour(arm), alpha=0.10, linewidth=0)
        ends.append(part[-1])
    return ends


def name_lines(axes: Axes, ends: Sequence[CurveRow], *, at: float, unit: float = 1.0) -> None:
    """Write each arm's name beside the end of its line, at one place of the axis."""
    heights = spread_names([row.mean for row in ends], axes.get_ylim())
    for row, height in zip(ends, heights, strict=True):
        name_line(axes, row.arm, end=(row.place / unit, row.mean), at=(at, height))


def heldout_rows(records: Sequence[Record]) -> list[CurveRow]:
    """Return rows at evenly spaced tokens up to the budget, for arms with evaluations."""
    curves: dict[str, list[tuple[list[float], list[float]]]] = {}
    budget = 0.0
    for record in records:
        tokens = [float(value or 0.0) for value in record.series.get("evaluation_tokens", [])]
        values = [float(v or 0.0) for v in record.series.get("evaluation_accuracy", [])]
        token_budget = record.config["scale"].get("evaluation", {}).get("token_budget", 0)
        if record.ok and token_budget and len(tokens) == len(values) > 1:
            curves.setdefault(record.arm, []).append((tokens, values))
            budget = max(budget, float(token_budget))
    table = []
    for arm in order(list(curves)):
        rate = rate_of(records, arm)
        for point in range(_POINTS + 1):
            tokens_here = budget * point / _POINTS
            values = [height(*curve, tokens_here) for curve in curves[arm]]
            table.append(mean_row(arm, tokens_here, values, rate))
    return table


def height(places: Sequence[float], heights: Sequence[float], place: float) -> float:
    """Return the height of a polyline, held level beyond its ends."""
    right = bisect.bisect_right(places, place)
    if right == 0:
        return heights[0]
    if right == len(places):
        return heights[-1]
    left = right - 1
    share = (place - places[left]) / (places[right] - places[left])
    return heights[left] + share * (heights[right] - heights[left])


def draw_heldout(rows: Sequence[CurveRow], where: str = "") -> Figure:
    """Return the figure; `where` is said behind its title."""
    figure = new_figure(8.0, height_of_curves(len({row.arm for row in rows})))
    axes = figure.subplots()
    tidy(axes)
    # A t interval knows nothing of the ends of a share.
    ends = draw_lines(axes, rows, unit=_TOKENS, limits=(0.0, 100.0))
    last = max(row.place for row in ends) / _TOKENS
    axes.set_xlim(0, last * 1.01)
    name_lines(axes, ends, at=1.06 * last, unit=_TOKENS)
    axes.set_xlabel("sampled training tokens, thousands")
    axes.set_ylabel("held-out accuracy, percent")
    figure.suptitle(f"Held-out accuracy over sampled tokens{where}", fontsize=12, x=0.01, ha="left")
    words = mean_words(rows)
    note = caption(rows, words if words == "mean" else f"{words}, cut at 0 and 100")
    foot(figure, note)
    return figure
