"""Held-out accuracy over sampled tokens (after Fig. 4, 7, 8, 12, 13): what "grows faster" is about.

One line per arm: the mean over seeds of the held-out accuracy, each seed's curve drawn straight
between its evaluations and held after the last, with the 95 % t interval of that mean. The axis is
tokens, as in the area that is tested, so an arm that answers at length is not ahead for it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from figures.captions import caption, rate_of
from figures.layout import foot, height_of_curves, name_line, new_figure, spread_names, tidy
from figures.palette import colour, dash, order
from repro.evidence.record import Record
from repro.evidence.statistics import mean_interval

NAME = "heldout_accuracy"
_POINTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutRow:
    """One arm after so many sampled tokens: percent, mean over seeds and its interval."""

    arm: str
    tokens: float
    mean: float
    low: float | None
    high: float | None
    n: int
    rate: float | None = None


def rows(records: Sequence[Record]) -> list[HeldoutRow]:
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
            interval = mean_interval([height(*curve, tokens_here) for curve in curves[arm]])
            table.append(
                HeldoutRow(
                    arm=arm,
                    tokens=tokens_here,
                    mean=interval.value,
                    low=interval.low,
                    high=interval.high,
                    n=interval.n,
                    rate=rate,
                )
            )
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


def draw(rows: Sequence[HeldoutRow], where: str = "", *, supervised: bool = False) -> Figure:
    """Return the figure; `where` is said behind its title.

    Parameters
    ----------
    supervised
        Whether the tokens are those of worked solutions, and not sampled ones.
    """
    tokens = "training tokens" if supervised else "sampled tokens"
    arms = order(list({row.arm for row in rows}))
    figure = new_figure(8.0, height_of_curves(len(arms)))
    axes = figure.subplots()
    tidy(axes)
    ends = []
    for arm in arms:
        part = [row for row in rows if row.arm == arm]
        places = [row.tokens / 1000 for row in part]
        axes.plot(
            places,
            [row.mean for row in part],
            color=colour(arm),
            linestyle=dash(arm),
            linewidth=1.8,
        )
        if all(row.low is not None for row in part):
            # A t interval knows nothing of the ends of a share.
            low = [max(0.0, row.low or 0.0) for row in part]
            high = [min(100.0, row.high or 0.0) for row in part]
            axes.fill_between(places, low, high, color=colour(arm), alpha=0.10, linewidth=0)
        ends.append(part[-1])
    axes.set_xlim(0, max(row.tokens for row in ends) / 1000 * 1.01)
    heights = spread_names([row.mean for row in ends], axes.get_ylim())
    for row, place in zip(ends, heights, strict=True):
        name_line(
            axes, row.arm, end=(row.tokens / 1000, row.mean), at=(1.06 * row.tokens / 1000, place)
        )
    axes.set_xlabel(f"{'' if supervised else 'sampled '}training tokens, thousands")
    axes.set_ylabel("held-out accuracy, percent")
    figure.suptitle(f"Held-out accuracy over {tokens}{where}", fontsize=12, x=0.01, ha="left")
    note = caption(rows, "mean and its 95 % t interval, cut at 0 and 100")
    foot(figure, note)
    return figure
