"""Held-out accuracy over sampled tokens (after Fig. 4, 7, 8, 12, 13): what "grows faster" is about.

One line per arm: the mean over seeds of the held-out accuracy, each seed's curve drawn straight
between its evaluations and held after the last, with the 95 % t interval of that mean. The axis is
tokens, as in the area that is tested, so an arm that answers at length is not ahead for it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from matplotlib.figure import Figure

from figures.captions import caption, rate_of
from figures.curves import CurveRow, draw_lines, mean_row, mean_words, name_lines
from figures.layout import foot, height_of_curves, new_figure, tidy
from figures.palette import order
from repro.evidence.record import Record

NAME = "heldout_accuracy"
_POINTS = 40
# In one unit of the axis, which is labelled in thousands.
_TOKENS = 1000


def rows(records: Sequence[Record]) -> list[CurveRow]:
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


def draw(rows: Sequence[CurveRow], where: str = "") -> Figure:
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
