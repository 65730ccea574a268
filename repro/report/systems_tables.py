"""Tables of `docs/systems.md`: rollouts and steps, with the paper's numbers and ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from repro.evidence.estimate import Interval
from repro.evidence.paper import read_paper
from repro.judge.check import Checked
from repro.report.numbers import bar_text, quantity
from repro.report.systems_rates import (
    Rate,
    RatePair,
    against,
    comparisons,
    lora_rank_of,
    printed_speedups,
)
from repro.report.tables import bars_table, table
from repro.report.verdict_words import Bar, labelled, stated_bars

# Tokens per second from which digits behind the point say nothing.
_WHOLE_FROM = 1000


def rate_table(checked: Checked, expected: Path) -> list[str]:
    """Return a row for each pair of arms, model and place whose rollouts are compared."""
    pairs = comparisons(checked, expected)
    by_rank = any(lora_rank_of(item.fast.arm) for item in pairs)
    several = len(against(pairs)) > 1
    first, second = _arm_names(pairs, several=several)
    heads = ["model", "rank" if by_rank else "batch", "against", "ratio, paper", "required",
             "ratio, 95 % interval", "verdict", f"{second}, paper", f"{first}, paper",
             f"{second}, tokens/s", f"{first}, tokens/s"]  # fmt: skip
    rows = [_rate_row(checked, same, by_rank, several) for same in _alike(pairs)]
    missed = bars_table([checked], expected, "contradicted")
    return [*table(heads, rows), *missed, *_disagreements(checked, expected)]


def _arm_names(pairs: Sequence[RatePair], *, several: bool) -> tuple[str, str]:
    """Return the names in the heads of the faster arm and of the one compared with it."""
    if several:
        return "QeRL", "the other"
    if any(lora_rank_of(item.fast.arm) != lora_rank_of(item.slow.arm) for item in pairs):
        return "the first", "the second"
    names = {"_vllm": "vLLM's own engine", "_folded": "16-bit LoRA folded in"}
    found = (names[end] for item in pairs for end in names if item.slow.arm.endswith(end))
    return "QeRL", next(found, "16-bit LoRA")


def _alike(items: Sequence[RatePair]) -> list[list[RatePair]]:
    """Return comparisons of the same two rates together, whatever each asks for."""
    same: dict[tuple[str, int, str, str], list[RatePair]] = {}
    for item in items:
        same.setdefault((item.model, item.place, item.fast.arm, item.slow.arm), []).append(item)
    return list(same.values())


def _rate_row(
    checked: Checked, same: Sequence[RatePair], by_rank: bool, several: bool
) -> list[str]:
    item = same[0]
    first, second = lora_rank_of(item.fast.arm), lora_rank_of(item.slow.arm)
    ranks = f"{first} over {second}" if first != second else f"{first}"
    other = checked.selection.target.arm(item.slow.arm).label if several else ""
    return [
        item.model.upper(),
        ranks if by_rank else f"{item.place}",
        other.replace(f", rank {second}", ""),
        "" if item.paper is None else f"{item.paper:.2f} x",
        ", ".join(f"> {one.required:g} x" for one in same if one.required is not None),
        _interval(item.ratio),
        ", ".join(labelled(one.verdict) for one in same if one.verdict is not None),
        "" if item.slow.paper is None else f"{item.slow.paper:,g}",
        "" if item.fast.paper is None else f"{item.fast.paper:,g}",
        _tokens(item.slow),
        _tokens(item.fast),
    ]


def _tokens(rate: Rate) -> str:
    """Return tokens per second with their interval, or why there are none."""
    if rate.measured is None:
        return f"not run: {rate.absent}"
    mean, low, high = rate.measured.value, rate.measured.low, rate.measured.high
    half = "" if low is None or high is None else f" ± {(high - low) / 2:.2g}"
    return (f"{mean:,.1f}" if mean < _WHOLE_FROM else f"{mean:,.0f}") + half


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return ""
    if interval.low is None or interval.high is None:
        return f"{interval.value:.2f} x"
    return f"{interval.value:.2f} x ({interval.low:.2f} to {interval.high:.2f})"


def step_table(checked: Checked, expected: Path) -> list[str]:
    """Return a row for each point and arm whose step was timed against 16-bit LoRA's."""
    target, rows = checked.selection.target, []
    alone = checked.evidence.records.keys() == {"bf16_lora", "nvfp4_lora"}
    step = "QeRL's step" if alone else "step"
    heads = ["point", "arm", "speed-up, paper", "bar", "bar of the update", "speed-up", "verdict",
             "update's", "verdict", step, "16-bit LoRA's"]  # fmt: skip
    bars = {bar.key: bar for bar in stated_bars(checked, expected)}
    printed = printed_speedups(target.paper_file, expected)
    for metric in target.metrics:
        if not (match := re.fullmatch(r"speedup_(((?:0_)?\d+[bm])_(?:b(\d+)|\w+))", metric.name)):
            continue
        point, model, batch = match.groups()
        update = f"update_ratio_{point}"
        for arm, ratios in checked.evidence.values(metric.name).items():
            paper = printed.get((arm, model, batch))
            whole_bar, update_bar = bars.get((arm, metric.name)), bars.get((arm, update))
            rows.append([
                _point_text(point),
                "" if alone else target.arm(arm).label,
                "" if paper is None else f"{paper:g} x",
                _bar_text(whole_bar),
                _bar_text(update_bar),
                f"{median(ratios.values()):.2f} x",
                _bar_word(whole_bar),
                _middle(checked.evidence.values(update).get(arm, {}).values()),
                _bar_word(update_bar),
                _seconds(checked, f"step_seconds_{point}", arm),
                _seconds(checked, f"step_seconds_{point}", "bf16_lora"),
            ])  # fmt: skip
    # What rows of new lengths cost is no speed-up: it stands among the bars, so all are shown.
    every = any("_over_equal_" in metric.name for metric in target.metrics)
    shown = () if every else ("contradicted",)
    return [*table(heads, rows), *bars_table([checked], expected, *shown)]


def scaling_table(checked: Checked, expected: Path) -> list[str]:
    """Return a row for each point of one GPU or several, and what the bars say."""
    heads = ["point", "GPUs", "rows", "step", "rollout", "update", "tokens/s and GPU, over one's",
             "in exchanges"]  # fmt: skip
    target, rows = checked.selection.target, []
    (arm,) = target.arms
    for point in target.scales[checked.selection.tier].points:
        efficiency = checked.evidence.values(f"efficiency_{point.name}").get(arm.name, {})
        exchange = checked.evidence.values(f"exchange_share_{point.name}").get(arm.name, {})
        rows.append([
            _point_text(point.name),
            f"{point.ranks}",
            f"{point.rows}",
            *(_seconds(checked, f"{phase}_seconds_{point.name}", arm.name)
              for phase in ("step", "rollout", "update")),
            _middle(efficiency.values()),
            f"{100 * fmean(exchange.values()):.2g} %" if exchange else "",
        ])  # fmt: skip
    return [*table(heads, rows), *bars_table([checked], expected)]


def _middle(values: Iterable[float]) -> str:
    known = sorted(values)
    return f"{median(known):.3f} x" if known else ""


def _point_text(point: str) -> str:
    """Return `7B, batch 8` for `7b_b8`, `3B, batch 8, full` too, `0.5B, equal` for `0_5b_equal`."""
    model, rest = point.replace("0_5b", "0.5b").split("_", 1)
    return f"{model.upper()}, {re.sub('^b(?=[0-9])', 'batch ', rest).replace('_', ', ')}"


def _seconds(checked: Checked, metric: str, arm: str) -> str:
    values = checked.evidence.values(metric).get(arm)
    return quantity(median(values.values()), "seconds") if values else ""


def _bar_text(bar: Bar | None) -> str:
    return "" if bar is None else bar_text(bar.expectation, bar.unit)


def _bar_word(bar: Bar | None) -> str:
    return "" if bar is None else labelled(bar.verdict)


def _disagreements(checked: Checked, expected: Path) -> list[str]:
    """Return where the paper's own numbers of this target disagree."""
    name = checked.selection.target.paper_file
    path = expected / "paper" / f"{name}.json"
    if not name or not path.is_file():
        return []
    raw: Mapping[str, Sequence[Mapping[str, object]]] = read_paper(path)[0]
    pairs = [
        f"printed {item['printed']}, against {item['computed']} ({item['note']})"
        for item in raw.get("contradictions", [])
    ]
    return [f"The paper against itself: {'; '.join(pairs)}.", ""] if pairs else []
