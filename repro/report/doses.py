"""A real checkpoint before training: the dose of each treatment, and Table 1's untrained rows.

The paper: NVFP4 raises the entropy of a 7B model by .055 nats at step 0 (Fig. 5), and so it
explores. A format's treatment is *delivered* where the 95 % interval of its rise, over draws of the
rounding and on finished completions, lies above half of that; *not delivered* where it lies below;
else *unclear*. Noise and multiples of the error are told as they are.

Rounding also does harm, which is told apart: at the temperature at which BF16 has the arm's
entropy, BF16's accuracy less the arm's is the *damage*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from repro.evidence.paper import paper_cells
from repro.evidence.verdicts.statistics import Interval, mean_interval
from repro.judge.check import Checked
from repro.report.numbers import signed
from repro.report.tables import NOTHING, table
from repro.spec.arm import Arm
from repro.spec.target import Target

_SHARE = 0.5
_ENTROPY, _ACCURACY = "entropy_finished", "accuracy_lenient"
_HEADS = (
    "before training",
    "KL, nats a token",
    "entropy, own finished completions",
    "on the same tokens",
    "the paper, 7B",
    "treatment",
    "pass@1",
    "pass@16",
    "groups that teach",
    "BF16 has this entropy at T",
    "damage, points",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dose:
    """What one arm is before training, beside BF16 of the same draw.

    Attributes
    ----------
    rise
        Of the entropy on own finished completions, nats, over draws.
    temperature
        At which BF16 has the arm's entropy, mean over draws; None beyond the measured ones.
    damage
        BF16's accuracy at that temperature less the arm's, points; None where it is None.
    """

    arm: Arm
    rise: Interval
    temperature: float | None
    damage: Interval | None


def paper_rises(expected: Path) -> dict[str, float]:
    """Return by how much formats raise the entropy at step 0 of the paper's Fig. 5, in nats."""
    start = {
        cell.arm: cell.value
        for cell in paper_cells(expected, "figure5")
        if cell.column == "step 0" and cell.arm
    }
    base = start.pop("bf16_lora", None)
    return {} if base is None else {arm: value - base for arm, value in start.items()}


def treatment(rise: Interval, expected: Path) -> str:
    """Return whether a rise of the entropy is the paper's treatment."""
    least = _SHARE * paper_rises(expected)["nvfp4_lora"]
    if rise.low is None or rise.high is None:
        return "unclear"
    return "delivered" if rise.low >= least else "not delivered" if rise.high < least else "unclear"


def doses(checked: Checked) -> dict[str, Dose]:
    """Return the dose of each arm that a check of a `dose` target has records of, but BF16's."""
    target = checked.selection.target
    values = {name: checked.evidence.values(name) for name in (_ENTROPY, _ACCURACY)}
    base = values[_ENTROPY].get("bf16_lora", {})
    ladder = {
        arm.temperature_factor: arm.name
        for arm in target.arms
        if arm.temperature_factor != 1 and arm.name in values[_ENTROPY]
    } | {1.0: "bf16_lora"}
    found = {}
    for arm in target.arms:
        own = values[_ENTROPY].get(arm.name, {})
        draws = [draw for draw in own if draw in base and arm.name != "bf16_lora"]
        if not draws:
            continue
        alike = [_alike(values, ladder, arm.name, draw) for draw in draws]
        known = [pair for pair in alike if pair is not None]
        whole = len(known) == len(draws) and arm.temperature_factor == 1
        found[arm.name] = Dose(
            arm=arm,
            rise=mean_interval([own[draw] - base[draw] for draw in draws]),
            temperature=mean_interval([t for t, _ in known]).value if whole else None,
            damage=mean_interval([harm for _, harm in known]) if whole else None,
        )
    return found


def _alike(
    values: Mapping[str, Mapping[str, Mapping[Any, float]]],
    ladder: Mapping[float, str],
    arm: str,
    draw: object,
) -> tuple[float, float] | None:
    """Return the temperature at which BF16 has an arm's entropy, and the accuracy lost there.

    Straight between the measured temperatures; None outside them.
    """
    points = sorted(
        (values[_ENTROPY][name][draw], temperature, values[_ACCURACY][name][draw])
        for temperature, name in ladder.items()
        if draw in values[_ENTROPY][name]
    )
    entropy, accuracy = values[_ENTROPY][arm][draw], values[_ACCURACY][arm][draw]
    for (low, cold, before), (high, warm, after) in pairwise(points):
        if low <= entropy <= high:
            share = (entropy - low) / (high - low) if high > low else 0.0
            there = before + share * (after - before)
            return cold + share * (warm - cold), there - accuracy
    return None


def dose_rows(checks: Sequence[Checked], expected: Path, name: str) -> list[str]:
    """Return the table of a dose target's arms."""
    of_target = [one for one in checks if one.selection.target.name == name and one.evidence.count]
    if not of_target:
        return NOTHING
    (checked, *_) = of_target
    target, paper = checked.selection.target, paper_rises(expected)
    found = doses(checked)
    arms = [arm for arm in target.arms if arm.name in found or arm.name == "bf16_lora"]
    rows = [_row(checked, arm, found.get(arm.name), expected) for arm in arms]
    draws = len(checked.evidence.values(_ENTROPY)["bf16_lora"])
    note = (
        f"Means over {draws} orders of channels, each another draw of every rounding; in brackets "
        "95 % intervals over draws of the difference from BF16 of the same draw. "
        f"*Delivered*: the whole interval lies above half of the paper's "
        f"{paper['nvfp4_lora']:.3f} nats. The temperature of equal entropy, and BF16's accuracy "
        "there, are read straight between the measured ones."
    )
    return [*table(_HEADS, rows), note]


def _row(checked: Checked, arm: Arm, dose: Dose | None, expected: Path) -> list[str]:
    """Return an arm's row; BF16's own has no dose."""
    means = {
        name: _mean(checked, name, arm.name)
        for name in ("kl_completions", "entropy_forced", _ACCURACY, "pass_at_16", "mixed_groups")
    }
    percents = [f"{means[name]:.1f} %" for name in (_ACCURACY, "pass_at_16", "mixed_groups")]
    first = [arm.label, f"{means['kl_completions']:.4f}"]
    base = _mean(checked, _ENTROPY, "bf16_lora")
    if dose is None:
        return [*first, f"{base:.3f}", "", "", "", *percents, "1", ""]
    forced = means["entropy_forced"] - _mean(checked, "entropy_forced", "bf16_lora")
    paper = paper_rises(expected).get(arm.name)
    is_plain = arm.weight_format != "bf16" and arm.noise is None
    return [
        *first,
        f"{_interval(dose.rise, 3)}: {100 * dose.rise.value / base:+.0f} %",
        f"{forced:+.3f}",
        "" if paper is None else f"{paper:+.3f}",
        treatment(dose.rise, expected) if is_plain else "",
        *percents,
        _temperature(dose, checked.selection.target),
        _interval(dose.damage, 1),
    ]


def _mean(checked: Checked, metric: str, arm: str) -> float:
    values = checked.evidence.values(metric).get(arm, {})
    return math.fsum(values.values()) / len(values) if values else math.nan


def _interval(interval: Interval | None, digits: int) -> str:
    if interval is None:
        return ""
    return signed(interval.value, interval.low, interval.high, f".{digits}f")


def _temperature(dose: Dose, target: Target) -> str:
    if dose.arm.temperature_factor != 1:
        return f"{dose.arm.temperature_factor:g}"
    if dose.temperature is not None:
        return f"{dose.temperature:.2f}"
    warmest = max(arm.temperature_factor for arm in target.arms)
    return f"above {warmest:g}"


_UNTRAINED_HEADS = (
    "untrained",
    "prompt",
    "sampled, any form of answer",
    "less than BF16, points",
    "sampled, strict",
    "greedy, strict",
    "cut at the limit",
    "the paper, 7B",
)


def untrained_rows(checks: Sequence[Checked], expected: Path, *names: str) -> list[str]:
    """Return the untrained rows of Table 1 on a checkpoint, for targets that differ by prompt."""
    paper = {
        cell.arm: cell.value
        for cell in paper_cells(expected, "table1")
        if (cell.column, cell.quantity) == ("7B", "accuracy") and cell.arm
    }
    rows, draws = [], set()
    for checked in checks:
        target = checked.selection.target
        if target.name not in names or not checked.evidence.count:
            continue
        prompt = target.scales[checked.selection.tier].prompt_template
        lenient = checked.evidence.values(_ACCURACY)
        for arm in target.arms:
            own = lenient.get(arm.name, {})
            if not own:
                continue
            draws.add(len(own))
            base = lenient.get("bf16", {})
            losses = [base[draw] - own[draw] for draw in own if draw in base]
            less = mean_interval(losses) if losses and arm.name != "bf16" else None
            rows.append([
                arm.label,
                prompt,
                f"{_mean(checked, _ACCURACY, arm.name):.1f} % {_over_problems(checked, arm.name)}",
                _interval(less, 1),
                f"{_mean(checked, 'accuracy', arm.name):.1f} %",
                f"{_mean(checked, 'accuracy_greedy', arm.name):.1f} %",
                f"{_mean(checked, 'truncation_rate', arm.name):.1f} %",
                f"{paper[arm.name]:.1f} %" if arm.name in paper else "",
            ])  # fmt: skip
    if not rows:
        return NOTHING
    span = " or ".join(str(count) for count in sorted(draws))
    note = (
        f"GSM8K's 1,319 test problems, four samples at T = 0.6; means over {span} draws of the "
        "rounding. After a mean, the half width of its 95 % interval over problems; of a loss, its "
        "95 % interval over draws."
    )
    return [*table(_UNTRAINED_HEADS, rows), note]


def _over_problems(checked: Checked, arm: str) -> str:
    """Return the mean half width of an accuracy's interval over problems."""
    estimates = [one.metrics[_ACCURACY] for one in checked.evidence.records[arm].values()]
    halves = [(e.high - e.low) / 2 for e in estimates if e.low is not None and e.high is not None]
    return f"± {math.fsum(halves) / len(halves):.1f}" if halves else ""
