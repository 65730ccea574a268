"""The dose-response: steps to the take-off against the dose of each arm.

A dose is the KL that an arm starts with, on a logarithmic axis, or what it adds to the entropy of
the deciding token, on one that is linear about nothing (`repro.report.dose_response`). A point per
dose, with the interval that holds for all points together; below one is sooner than BF16. Markers
say where the noise comes from. The diamond is the paper's own effect at its own dose; where that is
interpolated between arms that are far apart, a band between them says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from figures.layout import frame, new_figure, spread
from repro.report.dose_response import PAPER_RISE, Axis, DoseResponse, Kind, Response, arm_name
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
# Places on the axis of entropy that a tick says, and up to where that axis is about linear.
_RISES = (-0.05, -0.02, -0.01, 0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_LINEAR = 0.02
# Shares of the axis' length: between points of nearly one dose, and between their names above.
_POINTS_APART, _NAMES_APART = 0.012, 0.034


def _rise_of(length: float) -> float:
    return _LINEAR * math.sinh(length)


def _length_of(rise: float) -> float:
    return math.asinh(rise / _LINEAR)


# From a dose to a length along the axis, and back.
_SCALES: dict[Axis, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "kl": (math.log10, lambda length: float(10**length)),
    "decision": (_length_of, _rise_of),
}


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
    forth, back = _SCALES[result.axis]
    low, high = _doses_drawn(result)
    lengths = [forth(one.dose.on(result.axis)) for one in responses]
    width = high - low
    places = spread(lengths, _POINTS_APART * width)
    names = spread(lengths, _NAMES_APART * width)
    if result.axis == "kl":
        axes.set_xscale("log")
    else:
        axes.set_xscale("asinh", linear_width=_LINEAR)
    axes.set_yscale("log")
    axes.set_xlim(back(low), back(high))
    axes.set_ylim(*_heights(result))
    _paper(axes, result)
    for one, place, name in zip(responses, places, names, strict=True):
        _point(axes, one, back(place), back(name))
        if result.axis == "decision":
            _sideways(axes, one, back(place))
    _frame(axes, result)
    frame(figure, f"Dose and response on the needle at 4 %{where}", _note(result), _keys(result))
    return figure


def _doses_drawn(result: DoseResponse) -> tuple[float, float]:
    """Return from where to where the axis goes, in lengths along it."""
    forth, _ = _SCALES[result.axis]
    doses = [forth(one.dose.on(result.axis)) for one in result.responses]
    if result.place is not None:
        ends = (result.place.below, result.place.above)
        doses += [forth(result.place.at), *(forth(dose.on(result.axis)) for dose in ends)]
    margin = math.log10(1.8) if result.axis == "kl" else 0.35
    return min(doses) - margin, max(doses) + margin


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


def _sideways(axes: Axes, one: Response, place: float) -> None:
    """Draw how well the dose itself is known."""
    rise = one.dose.rise
    if rise is not None and rise.low is not None and rise.high is not None:
        tone = _KINDS[one.dose.kind][1] if one.took_off else _GREY
        moved = place - rise.value
        ends = [rise.low + moved, rise.high + moved]
        axes.plot(ends, [one.ratio, one.ratio], color=tone, linewidth=0.8, alpha=0.5, zorder=2)


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
        ends = (place.below.on(result.axis), place.above.on(result.axis))
        axes.axvspan(*ends, color=_PAPER, alpha=0.08, linewidth=0)
    axes.axvline(place.at, color=_PAPER, linewidth=1.0, linestyle=":", zorder=1)
    axes.plot(place.at, result.paper_ratio, "D", color=_PAPER, markersize=9, zorder=5)
    axes.annotate(
        f"the paper: {result.paper_ratio:.2g}", xy=(place.at, result.paper_ratio), xytext=(-9, 0),
        textcoords="offset points", ha="right", va="center", fontsize=9, color=_PAPER,
    )  # fmt: skip


def _frame(axes: Axes, result: DoseResponse) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(FixedLocator(_apart([t for t in _TICKS if low <= t <= high])))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    if result.axis == "kl":
        axes.xaxis.set_major_locator(LogLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("KL from BF16 before training, nats per token of completions")
    else:
        ends = axes.get_xlim()
        axes.xaxis.set_major_locator(FixedLocator([t for t in _RISES if ends[0] <= t <= ends[1]]))
        axes.xaxis.set_major_formatter(FuncFormatter(_percent))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("entropy of the deciding token over BF16's, first ten steps")
    axes.set_ylabel("steps to the take-off, over BF16's")


def _percent(value: float, _: object) -> str:
    return f"{100 * value:+g} %" if value else "0 %"


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
        f"(95 %); doses: mean of up to {most} rounding draws"
    )
    if result.axis == "decision":
        words += ", their own 95 % intervals thin"
    words += "; points of nearly one dose are moved apart"
    rise = f"{100 * PAPER_RISE:+.0f} % (Fig. 5, step 0)"
    if result.place is None:
        return (
            f"{words}\nthe paper's dose is not drawn: no two recorded arms have its entropy, "
            f"{rise}, between them"
        )
    place = result.place
    if result.axis == "decision":
        return f"{words}\nthe paper's dose: its rise of entropy over all tokens, {rise}"
    neighbours = f"{arm_name(place.below.arm)} and {arm_name(place.above.arm)}"
    return (
        f"{words}\nthe paper's dose: where the deciding token's entropy is {rise}, interpolated on "
        f"log KL between {neighbours}" + ("; band: from one to the other" if place.is_wide else "")
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
