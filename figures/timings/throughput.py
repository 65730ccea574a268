"""Rollout throughput by batch (Tables 5 to 8, and this suite's larger batches), a column per model.

Above, tokens per second on two logarithmic axes; below, how many times 16-bit LoRA's they are, seed
by seed, which is what the paper claims and what the upper panels are too steep to show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from figures.layout import frame, new_figure, tidy
from figures.palette import colour
from figures.timings.rates import (
    RateRow,
    arms,
    draw_bound,
    draw_line,
    keys,
    line_of,
    models,
)
from repro.evidence.record import Record
from repro.evidence.verdicts.statistics import mean_interval

BASE = "bf16_lora"
# Inches that title and note need.
_LEAST_WIDTH = 7.0
# What stands behind a number, so that no line strikes it through.
_BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.5}
Margins = Mapping[tuple[str, str], float]


def gains(records: Sequence[Record], rates: Sequence[RateRow], margins: Margins) -> list[RateRow]:
    """Return how many times 16-bit LoRA's each rate is: geometric means, paired by seed.

    Parameters
    ----------
    margins
        (arm, metric) to the least ratio that a claim states.
    """
    by_key: dict[tuple[str, str], dict[int, float]] = {}
    for record in records:
        for metric in record.metrics:
            value = record.value(metric)
            if value is not None:
                by_key.setdefault((record.arm, metric), {})[record.seed] = value
    printed = {(row.model, row.arm, row.place): row.paper for row in rates}
    table = []
    for row in rates:
        metric = f"tokens_per_second_{row.model}_{row.place}"
        base, arm_rates = by_key.get((BASE, metric), {}), by_key[row.arm, metric]
        logs = [
            math.log(arm_rates[seed] / base[seed]) for seed in sorted(arm_rates) if seed in base
        ]
        if row.arm == BASE or not logs:
            continue
        interval = mean_interval(logs)
        printed_base = printed.get((row.model, BASE, row.place))
        times = replace(
            row,
            mean=math.exp(interval.value),
            low=None if interval.low is None else math.exp(interval.low),
            high=None if interval.high is None else math.exp(interval.high),
            n=interval.n,
            must=margins.get((row.arm, metric)),
            goal=None,
            paper=row.paper / printed_base if row.paper and printed_base else None,
        )
        table.append(times)
    return table


def draw(rates: Sequence[RateRow], gains: Sequence[RateRow], title: str, note: str) -> Figure:
    """Return the figure; `note` stands below it."""
    columns = models(rates)
    figure = new_figure(1.0 + 2.9 * len(columns), 6.4)
    grid = figure.subplots(2, len(columns), sharex=True, sharey="row", squeeze=False)
    top = max(row.high or row.mean for row in gains) if gains else 1.0
    for place, model in enumerate(columns):
        above, below = grid[0][place], grid[1][place]
        _draw_rates(above, [row for row in rates if row.model == model])
        _draw_gains(below, [row for row in gains if row.model == model])
        above.set_title(f"Qwen2.5-{model.upper()}", fontsize=10, loc="left")
        below.set_ylim(0, 1.12 * top)
        below.set_xlabel("batch")
    grid[0][0].set_ylabel("tokens per second")
    grid[1][0].set_ylabel("times 16-bit LoRA's")
    must = any(row.must is not None for row in rates) or any(map(_demands, gains))
    goal = any(row.goal is not None for row in rates)
    frame(figure, title, note, keys(rates, must=must, goal=goal))
    return figure


def _draw_rates(axes: Axes, rows: Sequence[RateRow]) -> None:
    tidy(axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for arm in arms(rows):
        draw_line(axes, line_of(rows, rows[0].model, arm))
    for row in rows:
        draw_bound(axes, row, row.must, "-")
        draw_bound(axes, row, row.goal, ":")
    places = sorted({row.place for row in rows})
    room = max(places[-1] / places[0], 2) ** 0.13
    axes.set_xlim(places[0] / room, places[-1] * room)
    axes.set_xticks(places)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()


def _draw_gains(axes: Axes, rows: Sequence[RateRow]) -> None:
    tidy(axes)
    axes.axhline(1.0, color=colour(BASE), linewidth=1.2)
    for arm in arms(rows):
        line = [row for row in rows if row.arm == arm]
        draw_line(axes, line)
        for row in line:
            if _demands(row):
                draw_bound(axes, row, row.must, "-")
            # Below the point where a stroke lies above it.
            up = row.must is None or row.must <= row.mean
            axes.annotate(f"{row.mean:.2f}", (row.place, row.mean), xytext=(0, 6 if up else -13),
                          ha="center", textcoords="offset points", fontsize=8,
                          color=colour(arm), bbox=_BEHIND)  # fmt: skip


def _demands(row: RateRow) -> bool:
    """Whether more is claimed than being faster, for which the line at 1 stands."""
    return row.must is not None and row.must != 1.0


def draw_ranks(rows: Sequence[RateRow], title: str, note: str) -> Figure:
    """Return the figure by LoRA rank at batch 1 (Table 9, Fig. 11), a panel per model.

    Axes begin at zero, so that heights compare as the speeds do.
    """
    columns = models(rows)
    figure = new_figure(max(1.0 + 2.7 * len(columns), _LEAST_WIDTH), 4.4)
    grid = figure.subplots(1, len(columns), squeeze=False)
    for axes, model in zip(grid[0], columns, strict=True):
        _draw_ranks(axes, [row for row in rows if row.model == model])
        axes.set_title(f"Qwen2.5-{model.upper()}", fontsize=10, loc="left")
        axes.set_xlabel("LoRA rank")
    grid[0][0].set_ylabel("tokens per second, batch 1")
    frame(figure, title, note, keys(rows))
    return figure


def _draw_ranks(axes: Axes, rows: Sequence[RateRow]) -> None:
    tidy(axes)
    axes.set_xscale("log", base=2)
    for arm in arms(rows):
        draw_line(axes, line_of(rows, rows[0].model, arm))
    axes.set_xticks(sorted({row.place for row in rows}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.margins(x=0.12)
    axes.set_ylim(0, 1.08 * max(max(row.mean, row.paper or 0.0) for row in rows))
