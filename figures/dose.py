"""The dose-response: steps to the take-off against the KL that an arm starts with.

A point per dose, both on logarithmic axes, with the interval that holds for all points together;
below one is sooner than BF16. Markers say where the noise comes from. The diamond is the paper's
own effect at its own dose, which its entropy places among the arms; where the two arms around it
are far apart, a band between them says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from figures.layout import frame, new_figure, spread
from repro.report.dose_response import PAPER_RISE, DoseResponse, Kind, Response, arm_name
from repro.report.pictures import DOSE

NAME = DOSE
_PAPER, _GREY = "#c0392b", "#a6a6a6"
_KINDS: dict[Kind, tuple[str, str, str]] = {
    "rounding": ("o", "#20588a", "rounding"),
    "added noise": ("^", "#6c3483", "NVFP4 with AQN"),
    "Gaussian noise": ("s", "#17807e", "Gaussian noise on weights"),
}
# Quotients that a tick says, of which those within the axis are drawn.
_TICKS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0)
# Shares of the axis' length: between points of nearly one dose, and between their names above.
_POINTS_APART, _NAMES_APART = 0.012, 0.034


def draw(result: DoseResponse, where: str) -> Figure:
    """Return the figure.

    Parameters
    ----------
    where
        Said behind the title.
    """
    figure = new_figure(10.4, 5.6)
    axes = figure.subplots()
    responses = result.responses
    low, high = _doses_drawn(result)
    width = math.log10(high / low)
    logarithms = [math.log10(one.dose.kl) for one in responses]
    places = spread(logarithms, _POINTS_APART * width)
    names = spread(logarithms, _NAMES_APART * width)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(*_heights(result))
    _paper(axes, result)
    for one, place, name in zip(responses, places, names, strict=True):
        _point(axes, one, 10**place, 10**name)
    _frame(axes)
    frame(figure, f"Dose and response on the needle at 4 %{where}", _note(result), _keys(result))
    return figure


def _doses_drawn(result: DoseResponse) -> tuple[float, float]:
    doses = [one.dose.kl for one in result.responses]
    if result.place is not None:
        doses += [result.place.below.kl, result.place.above.kl]
    return min(doses) / 1.8, max(doses) * 1.8


def _heights(result: DoseResponse) -> tuple[float, float]:
    ends = [end for one in result.responses for end in (one.ratio, one.low, one.high) if end]
    return 0.86 * min(*ends, result.paper_ratio), 1.16 * max(*ends, 1.0)


def _point(axes: Axes, one: Response, place: float, name: float) -> None:
    marker, tone, _ = _KINDS[one.dose.kind]
    if not one.took_off:
        tone = _GREY
    if one.low is not None and one.high is not None:
        axes.plot([place, place], [one.low, one.high], color=tone, linewidth=2.0, zorder=3)
    face = tone if one.took_off else "white"
    axes.plot(place, one.ratio, marker, color=tone, markerfacecolor=face, markersize=7, zorder=4)
    axes.annotate(
        arm_name(one.dose.arm),
        xy=(place, one.high or one.ratio),
        xytext=(name, 1.02),
        textcoords=axes.get_xaxis_transform(),
        rotation=90,
        ha="center",
        va="bottom",
        fontsize=8.5,
        color=tone,
        annotation_clip=False,
        arrowprops={"arrowstyle": "-", "color": "#c4c4c4", "linewidth": 0.6, "shrinkA": 0},
    )


def _paper(axes: Axes, result: DoseResponse) -> None:
    axes.axhline(1.0, color="#808080", linewidth=1.0, zorder=1)
    axes.annotate(
        "no effect", xy=(1, 1), xycoords=axes.get_yaxis_transform(), xytext=(-4, 3),
        textcoords="offset points", ha="right", fontsize=8.5, color="#606060",
    )  # fmt: skip
    if result.place is None:
        return
    place = result.place
    if place.is_wide:
        axes.axvspan(place.below.kl, place.above.kl, color=_PAPER, alpha=0.08, linewidth=0)
    axes.axvline(place.kl, color=_PAPER, linewidth=1.0, linestyle=":", zorder=1)
    axes.plot(place.kl, result.paper_ratio, "D", color=_PAPER, markersize=9, zorder=5)
    axes.annotate(
        f"the paper: {result.paper_ratio:.2g}", xy=(place.kl, result.paper_ratio), xytext=(-9, 0),
        textcoords="offset points", ha="right", va="center", fontsize=9, color=_PAPER,
    )  # fmt: skip


def _frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(FixedLocator(_apart([t for t in _TICKS if low <= t <= high])))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(LogLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("KL from BF16 before training, nats per token of completions")
    axes.set_ylabel("steps to the take-off, over BF16's")


def _apart(ticks: Sequence[float]) -> list[float]:
    """Return the ticks without those too near their neighbour; one is always said."""
    readable = [1.0]
    span = math.log(max(ticks) / min(ticks)) if len(ticks) > 1 else 1.0
    for tick in ticks:
        if min(abs(np.log(np.array(readable) / tick))) > 0.06 * span:
            readable.append(tick)
    return sorted(readable)


def _note(result: DoseResponse) -> str:
    most = max(one.dose.draws for one in result.responses)
    pairs = sorted({one.pairs for one in result.responses})
    counts = f"{pairs[0]}" if len(pairs) == 1 else f"{pairs[0]} to {pairs[-1]}"
    words = (
        f"points: mean of {counts} pairs of runs, with intervals that hold for all points together "
        f"(95 %); doses: mean of up to {most} rounding draws; points of nearly one dose are moved "
        "apart"
    )
    rise = f"{100 * PAPER_RISE:+.0f} % (Fig. 5, step 0)"
    if result.place is None:
        return (
            f"{words}\nthe paper's dose is not drawn: no two recorded arms have its entropy, "
            f"{rise}, between them"
        )
    place = result.place
    neighbours = f"{arm_name(place.below.arm)} and {arm_name(place.above.arm)}"
    return (
        f"{words}\nthe paper's dose: where own entropy is {rise}, interpolated on log KL between "
        f"{neighbours}" + ("; band: from one to the other" if place.is_wide else "")
    )


def _keys(result: DoseResponse) -> list[Line2D]:
    present = {one.dose.kind for one in result.responses}
    keys = [
        Line2D([], [], color=tone, marker=marker, linewidth=2.0, label=words)
        for kind, (marker, tone, words) in _KINDS.items()
        if kind in present
    ]
    if result.place is not None:
        words = "the paper's effect at its dose"
        keys.append(Line2D([], [], color=_PAPER, marker="D", linestyle="", label=words))
    if not all(one.took_off for one in result.responses):
        words = "more than half of the runs did not take off"
        keys.append(Line2D([], [], color=_GREY, marker="o", markerfacecolor="white",
                           linestyle="", label=words))  # fmt: skip
    return keys
