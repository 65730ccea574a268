"""Rows of tokens per second, shared by the pictures over batch and over LoRA rank.

A row is one model, one arm, one place (a batch or a rank): the mean over seeds with its 95 % t
interval, the paper's cell where it printed one, and what this suite demands of it where it does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from figures.palette import colour, order, short
from repro.evidence.paper import PaperCell
from repro.evidence.record import Record
from repro.evidence.verdicts.expectation import Expectation
from repro.evidence.verdicts.statistics import Interval, mean_interval
from repro.report.systems_rates import rates_of_cells

Bars = Mapping[tuple[str, str], Expectation]
Place = tuple[str, str, int]
_RATE = re.compile(r"tokens_per_second_(\d+b)_(\d+)")
_RANK = re.compile(r"_r\d+(?=_|$)")
_GREY = "#555555"
# A stroke's ends, as factors of its place on a logarithmic axis.
_STROKE = 1.35


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRow:
    """Tokens per second of one model and arm at one batch or rank, or how many times another's.

    Attributes
    ----------
    arm
        Without a rank in its name.
    low, high
        95 % t interval over seeds, None with one.
    must, goal
        Least accepted, and what was hoped for; None where nothing is demanded.
    paper
        The paper's cell, None where it has none.
    """

    model: str
    arm: str
    place: int
    mean: float
    low: float | None
    high: float | None
    n: int
    must: float | None = None
    goal: float | None = None
    paper: float | None = None


def rate_rows(
    records: Sequence[Record],
    cells: Sequence[PaperCell] = (),
    bars: Bars | None = None,
    *,
    by_rank: bool = False,
) -> list[RateRow]:
    """Return a row for each model, arm and batch; by rank, each model, format and LoRA rank."""
    stated = bars or {}
    seeds: dict[Place, list[float]] = {}
    bar_at: dict[Place, Expectation] = {}
    for record in records:
        for metric in record.metrics:
            match, value = _RATE.fullmatch(metric), record.value(metric)
            if match is None or value is None:
                continue
            place = int(record.config["arm"]["lora_rank"]) if by_rank else int(match[2])
            key = (match[1], plain(record.arm), place)
            seeds.setdefault(key, []).append(value)
            if (record.arm, metric) in stated:
                bar_at[key] = stated[record.arm, metric]
    printed = rates_of_cells(cells)
    rows = [
        _row(key, mean_interval(values), bar_at.get(key), printed.get(key))
        for key, values in seeds.items()
    ]
    arms = order(list({row.arm for row in rows}))
    return sorted(rows, key=lambda row: (_size(row.model), arms.index(row.arm), row.place))


def _row(key: Place, interval: Interval, bar: Expectation | None, paper: float | None) -> RateRow:
    return RateRow(
        model=key[0],
        arm=key[1],
        place=key[2],
        mean=interval.value,
        low=interval.low,
        high=interval.high,
        n=interval.n,
        must=None if bar is None else bar.accept[0],
        goal=None if bar is None else bar.goal,
        paper=paper,
    )


def plain(arm: str) -> str:
    """Return an arm's name without its rank: `nf4_lora_r16_bitsandbytes` is QLoRA's by theirs."""
    return _RANK.sub("", arm)


def models(rows: Sequence[RateRow]) -> list[str]:
    """Return the models, smallest first."""
    return sorted({row.model for row in rows}, key=_size)


def arms(rows: Sequence[RateRow]) -> list[str]:
    """Return the arms in the order of the paper's tables."""
    return order(list({row.arm for row in rows}))


def line_of(rows: Sequence[RateRow], model: str, arm: str) -> list[RateRow]:
    """Return one model's and arm's rows, in the order of their places."""
    return [row for row in rows if row.model == model and row.arm == arm]


def draw_line(axes: Axes, line: Sequence[RateRow]) -> None:
    """Draw one arm's line with its intervals, and the paper's values as hollow marks."""
    if not line:
        return
    places, means = [row.place for row in line], [row.mean for row in line]
    down = [row.mean - (row.mean if row.low is None else row.low) for row in line]
    up = [(row.mean if row.high is None else row.high) - row.mean for row in line]
    tone = colour(line[0].arm)
    axes.errorbar(places, means, yerr=[down, up], color=tone, marker="o", markersize=4, capsize=2)
    for row in line:
        if row.paper is not None:
            axes.plot(row.place, row.paper, "o", color=tone, markerfacecolor="none", markersize=7)


def draw_bound(axes: Axes, row: RateRow, bound: float | None, style: str) -> None:
    """Draw a short stroke at what is demanded of a row, where something is."""
    if bound is not None:
        ends = [row.place / _STROKE, row.place * _STROKE]
        axes.plot(ends, [bound, bound], color=colour(row.arm), linestyle=style, linewidth=1.5)


def keys(rows: Sequence[RateRow], *, goal: bool = False, must: bool = False) -> list[Line2D]:
    """Return the legend: a line per arm, and the marks that occur."""
    handles = [
        Line2D([], [], color=colour(arm), marker="o", markersize=4, label=short(arm))
        for arm in arms(rows)
    ]
    if any(row.paper is not None for row in rows):
        handles.append(Line2D([], [], color=_GREY, marker="o", markerfacecolor="none", markersize=7,
                            linestyle="", label="the paper, on one H100-80GB"))  # fmt: skip
    if must:
        handles.append(Line2D([], [], color=_GREY, linewidth=1.5, label="bar"))
    if goal:
        handles.append(Line2D([], [], color=_GREY, linewidth=1.5, linestyle=":", label="goal"))
    return handles


def _size(model: str) -> int:
    return int(model.rstrip("b"))
