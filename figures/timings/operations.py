"""The kernels around the linear layer, each against its bar: shares of a rate, ratios of times.

Left, what share of the device's measured copy rate an operation reaches; right, the time of the
plain way over ours (backward, portable layer, logprobs) and of the layer with its adapter over the
layer without. Points are means of the seeds with their range; the mark is the accepted bound.
Drawn from the records of the target `kernels` alone: others have shares and ratios of other things.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.layout import foot, new_figure, tidy
from repro.evidence.record import Record

NAME = "operations"
TARGET = "kernels"
Bounds = Mapping[tuple[str, str], tuple[float | None, float | None]]
_SHARE = re.compile(r"(\w+)_share(?:_(\w+))?")
_RATIO = re.compile(
    r"(ratio_backward|portable_ratio|logprobs_ratio|prefill_attention_ratio|adapter_factor)"
    r"(?:_(\w+))?"
)
_TITLES = {
    "ratio_backward": "dX over BF16's",
    "portable_ratio": "portable layer over BF16's",
    "logprobs_ratio": "logprobs over product and softmax",
    "adapter_factor": "layer with LoRA, over without",
    "prefill_attention_ratio": "prefill attention over torch's",
    "attend_step": "decode attention",
    "choose": "draw of a token",
    "norm": "RMSNorm with noise",
    "add_norm": "RMSNorm, residual, noise",
    "add_adapter": "adapter's share added",
    "adapted_swiglu": "SwiGLU with an adapter",
    "swiglu": "SwiGLU",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow:
    """One metric of one arm.

    Attributes
    ----------
    panel
        `share` of the copy rate, or `ratio` of times.
    mean, low, high
        Over the seeds: mean, least and largest.
    least, most
        Accepted bounds, or None.
    """

    panel: str
    label: str
    mean: float
    low: float
    high: float
    least: float | None
    most: float | None


def rows(records: Sequence[Record], bounds: Bounds) -> list[OperationRow]:
    """Return a row for each share and ratio that has a bar, those of one kind together.

    Parameters
    ----------
    bounds
        (arm, metric) to the accepted interval's ends, None where it is open.
    """
    values: dict[tuple[str, str], list[float]] = {}
    for record in records:
        for metric in record.metrics if record.target == TARGET else ():
            value = record.value(metric)
            if value is not None and _panel(metric):
                values.setdefault((record.arm, metric), []).append(value)
    table = []
    for (arm, metric), seeds in values.items():
        if (arm, metric) not in bounds:
            continue
        least, most = bounds[arm, metric]
        table.append(
            OperationRow(
                panel=_panel(metric),
                label=_label(arm, metric),
                mean=fmean(seeds),
                low=min(seeds),
                high=max(seeds),
                least=least,
                most=most,
            )
        )
    return sorted(table, key=lambda row: (row.panel, _natural(row.label)))


def _panel(metric: str) -> str:
    if _SHARE.fullmatch(metric):
        return "share"
    return "ratio" if _RATIO.fullmatch(metric) else ""


def _label(arm: str, metric: str) -> str:
    match = _SHARE.fullmatch(metric) or _RATIO.fullmatch(metric)
    if match is None:
        raise ValueError(f"{metric} is neither a share nor a ratio")
    words = [_TITLES.get(match[1], match[1])]
    if match[2]:
        # Sizes are written 7B; a last number is rows of x.
        *kinds, last = match[2].split("_")
        words += [kind.upper() for kind in kinds]
        words.append(f"M = {last}" if last.isdigit() else last.upper())
    if arm != "operations":
        words.insert(1, arm.upper())
    return ", ".join([words[0], " ".join(words[1:])]) if words[1:] else words[0]


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a sorting key in which 64 stands before 1024."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def draw(rows: Sequence[OperationRow], where: str = "", origin: str = "") -> Figure:
    """Return the figure: shares on the left, ratios on the right; `origin` ends its note."""
    panels = [[row for row in rows if row.panel == name] for name in ("share", "ratio")]
    figure = new_figure(11.0, 1.4 + 0.24 * max(len(panel) for panel in panels))
    left, right = figure.subplots(1, 2)
    _draw_panel(left, panels[0], "share of the device's copy rate")
    _draw_panel(right, panels[1], "ratio of times")
    right.axvline(1.0, color="#808080", linewidth=0.8, zorder=0)
    figure.suptitle(f"Operations against their bars{where}", x=0.01, ha="left")
    seen = any(row.most is not None for row in rows)
    note = "mean and range of the seeds; | the least accepted" + (", ¦ the most" if seen else "")
    note += f"; {origin}" if origin else ""
    foot(figure, note, tone="#505050")
    return figure


def _draw_panel(axes: Axes, rows: Sequence[OperationRow], title: str) -> None:
    tidy(axes)
    for place, row in enumerate(rows):
        met = not (
            (row.least is not None and row.mean < row.least)
            or (row.most is not None and row.mean > row.most)
        )
        colour = "#2b6ca3" if met else "#c0392b"
        axes.plot([row.low, row.high], [place, place], color=colour, linewidth=2)
        axes.plot([row.mean], [place], color=colour, marker="o", markersize=4)
        for bound, style in ((row.least, "-"), (row.most, ":")):
            if bound is not None:
                ends = [place - 0.35, place + 0.35]
                axes.plot([bound, bound], ends, color="#000000", linestyle=style, linewidth=1.5)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0.0)
    axes.set_xlabel(title)
