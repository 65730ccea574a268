"""The tables of `kernels/README.md`, from the blessed records of the target `kernels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from repro.check import Checked
from repro.evidence.expectation import Expectation
from repro.report.numbers import bar_text, cell_text, origin_text, quantity, stated_bars
from repro.spec.config import OperationScale
from repro.targets import kernels

Bars = Mapping[tuple[str, str], Expectation]
# A line of a table: its label, the arm, and the metric of each column ("" leaves a cell empty).
Line = tuple[str, str, Sequence[str]]

_GRIDS = ("ratio_", "adapter_factor_", "portable_ratio_")


def kernel_rows(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return what was measured of the kernels, a section a device, as lines of Markdown."""
    lines = []
    for checked in checks:
        if checked.selection.target.name == kernels.KERNELS.name and checked.evidence.count:
            lines += _device_section(checked, expected)
    return lines or ["No records are blessed yet."]


def _device_section(checked: Checked, expected: Path) -> list[str]:
    bars = {(bar.arm, bar.metric): bar for bar, _ in stated_bars(checked, expected)}
    scale = checked.selection.target.scales[checked.selection.tier]
    assert isinstance(scale, OperationScale)
    rank = scale.adapter_rank
    return [
        origin_text(checked),
        "",
        "Time of `F.linear` in bfloat16 over ours:",
        "",
        *_grid(checked, bars, scale.rows, _by_block(scale.blocks, scale.rows, kernels.ratio_name)),
        "The same for the gradient of x:",
        "",
        *_grid(
            checked,
            bars,
            scale.backward_rows,
            _by_block(scale.blocks, scale.backward_rows, kernels.backward_name),
        ),
        f"Time with a LoRA adapter of rank {rank} over time without it:",
        "",
        *_grid(
            checked,
            bars,
            scale.adapter_rows,
            _by_block(scale.blocks, scale.adapter_rows, kernels.adapter_name),
        ),
        "The portable linear layer, time of `F.linear` in bfloat16 over its own:",
        "",
        *_grid(checked, bars, kernels.PORTABLE_ROWS, _portable_lines(checked)),
        *_other_operations(checked, bars),
        *_missed_bars(checked, expected),
    ]


def _by_block(blocks: Sequence[str], rows: Sequence[int], name: kernels.Naming) -> list[Line]:
    return [
        (f"{block.upper()} {arm.upper()}", arm, [name(block, count) for count in rows])
        for block in blocks
        for arm in kernels.FORMATS
    ]


def _portable_lines(checked: Checked) -> list[Line]:
    known = {metric.name for metric in checked.selection.target.metrics}
    return [
        (
            f"7B {format.upper()}",
            "operations",
            [name if name in known else "" for name in _portable_names(format)],
        )
        for format in kernels.FORMATS
    ]


def _portable_names(format: str) -> list[str]:
    return [kernels.portable_name(format, count) for count in kernels.PORTABLE_ROWS]


def _grid(checked: Checked, bars: Bars, heads: Sequence[int], table: Sequence[Line]) -> list[str]:
    """Return a table over rows of x; below each line that has bars, `must (goal)`."""
    lines = [f"| M | {' | '.join(map(str, heads))} |", "|---" * (len(heads) + 1) + "|"]
    for label, arm, names in table:
        means = [_mean(checked, arm, name) for name in names]
        lines.append(f"| {label} | {' | '.join(means)} |")
        wanted = [bars.get((arm, name)) for name in names]
        # The bars of MXFP4 are those of NVFP4 less 5 %.
        if arm != "mxfp4" and sum(bar is not None for bar in wanted) > 1:
            lines.append(f"| must (goal) | {' | '.join(map(_must, wanted))} |")
    return [*lines, ""]


def _mean(checked: Checked, arm: str, name: str) -> str:
    values = checked.evidence.values(name).get(arm, {}) if name else {}
    return f"{sum(values.values()) / len(values):.2f}" if values else ""


def _must(bar: Expectation | None) -> str:
    if bar is None:
        return ""
    low, high = bar.accept
    goal = "" if bar.goal is None else f" ({bar.goal:.3g})"
    return f"{high if low is None else low:.3g}{goal}"


def _other_operations(checked: Checked, bars: Bars) -> list[str]:
    lines = ["| operation | mean ± 95 % interval | must (goal) |", "|---|---|---|"]
    for metric in checked.selection.target.metrics:
        values = checked.evidence.values(metric.name).get("operations", {})
        if not values or metric.name.startswith(_GRIDS):
            continue
        bar = bars.get(("operations", metric.name))
        must = _must(bar) if metric.unit == "ratio" or bar is None else bar_text(bar, metric.unit)
        mean = cell_text(list(values.values()), n=False, unit=metric.unit).removesuffix(" x")
        lines.append(f"| {metric.title} | {mean} | {must} |")
    return [*lines, ""]


def _missed_bars(checked: Checked, expected: Path) -> list[str]:
    """Return the bars that the records do not show to hold, each with how much is lacking."""
    bars = stated_bars(checked, expected)
    missed = [(bar, verdict) for bar, verdict in bars if verdict.status != "reproduced"]
    lines = [
        f"Of {len(bars)} bars {len(bars) - len(missed)} hold. The others (`contradicted`: the 95 % "
        "interval lies wholly beyond the bar; `inconclusive`: the bar lies inside it):",
        "",
        "| measured | bar | mean | off by | verdict |",
        "|---|---|---|---|---|",
    ]
    target = checked.selection.target
    for bar, verdict in missed:
        metric, value = target.metric(bar.metric), verdict.effect or 0.0
        bound = next(bound for bound in bar.accept if bound is not None)
        off = "" if bar.holds(value) else f"{100 * abs(value / bound - 1):.2g} %"
        lines.append(
            f"| {target.arm(bar.arm).label}: {metric.title} | {bar_text(bar, metric.unit)} | "
            f"{quantity(value, metric.unit)} | {off} | {verdict.status} |"
        )
    return lines
