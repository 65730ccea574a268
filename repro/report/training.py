"""What training did to a real checkpoint, arm by arm, beside 16-bit LoRA of the same seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from repro.evidence.verdicts.statistics import mean_interval
from repro.judge.check import Checked
from repro.report.numbers import signed
from repro.report.tables import NOTHING, table
from repro.spec.arm import Arm

_BASE = "bf16_lora"
_HEADS = (
    "trained arm",
    "seeds",
    "entropy at the start, nats",
    "right at the start",
    "steps to the threshold",
    "training reward, mean",
    "GSM8K at the end",
    "beside BF16, points",
    "entropy at the end",
    "cut at the limit",
    "broke down",
)


def training_rows(checks: Sequence[Checked], name: str) -> list[str]:
    """Return the table of the arms that a target has trained, 16-bit LoRA's own values first."""
    of_target = [one for one in checks if one.selection.target.name == name and one.evidence.count]
    if not of_target:
        return NOTHING
    (checked, *_) = of_target
    target = checked.selection.target
    scale = target.scales[checked.selection.tier]
    values = checked.evidence.values("accuracy_lenient")
    rows = [_row(checked, arm) for arm in target.arms if values.get(arm.name)]
    note = (
        f"{scale.steps} steps; the threshold is a training accuracy of "
        f"{scale.evaluation.threshold:g} %, a run that does not reach it counts with all its steps "
        "(in brackets how many reached it). In other brackets 95 % intervals over seeds of the "
        "difference from BF16 of the same seed."
    )
    if min(map(len, values.values()), default=0) < len(scale.seeds):
        note += f" {len(scale.seeds)} seeds are planned; until all are run no claim is judged."
    return [*table(_HEADS, rows), note]


def _row(checked: Checked, arm: Arm) -> list[str]:
    def of(metric: str) -> list[float]:
        return list(checked.evidence.values(metric).get(arm.name, {}).values())

    def beside(metric: str, digits: int) -> str:
        values = checked.evidence.values(metric)
        own, base = values[arm.name], values.get(_BASE, {})
        pairs = [own[seed] - base[seed] for seed in own if seed in base]
        if arm.name == _BASE or not pairs:
            return ""
        interval = mean_interval(pairs)
        return signed(interval.value, interval.low, interval.high, f".{digits}f")

    entropy = beside("entropy_start", 3) or f"{fmean(of('entropy_start')):.3f}"
    reached, runs = sum(of("took_off")), len(of("took_off"))
    return [
        arm.label,
        f"{runs}",
        entropy,
        f"{100 * fmean(of('accuracy_start')):.1f} %",
        f"{fmean(of('take_off_steps')):.0f} ({reached:.0f} of {runs})",
        f"{fmean(of('train_reward_mean')):.3f}",
        f"{fmean(of('accuracy_lenient')):.1f} %",
        beside("accuracy_lenient", 1),
        f"{fmean(of('entropy_last')):.3f}",
        f"{fmean(of('truncation_rate')):.1f} %",
        f"{sum(of('collapsed')):.0f}",
    ]
