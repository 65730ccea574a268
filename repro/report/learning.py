"""The tables of docs/learning.md: arms of a real checkpoint, before and after training.

What a column shows and says stands in the templates; here is what they ask of an arm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from repro.evidence.estimate import Interval, mean_interval
from repro.evidence.paper import paper_cells
from repro.evidence.verdicts.comparison import blocks_of, contrasts
from repro.evidence.verdicts.secondary import secondary
from repro.evidence.verdicts.verdict import Verdict
from repro.judge.check import Checked
from repro.report.doses import BASE, doses, paper_rises, treatment, treatment_given
from repro.report.tables import NOTHING, of_targets
from repro.report.tidy import rendered
from repro.report.verdict_words import Kind, of_kind
from repro.spec.arm import Arm
from repro.spec.claim import Claim, Dose

_ACCURACY, _STEPS = "accuracy_lenient", "take_off_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmValues:
    """What a check has of one arm, and of the arm that it is held against."""

    checked: Checked
    arm: Arm
    base: str = BASE

    def values(self, metric: str, arm: str = "") -> list[float]:
        """Return a metric's values over seeds."""
        return [*self.checked.evidence.values(metric).get(arm or self.arm.name, {}).values()]

    def mean(self, metric: str) -> float:
        """Return the mean over seeds, NaN without any."""
        values = self.values(metric)
        return math.fsum(values) / len(values) if values else math.nan

    def beside(self, metric: str, *, less: bool = False) -> Interval | None:
        """Return the difference from the base in the same seeds, or with `less` its negative.

        None of the base itself, and without a seed in common.
        """
        values = self.checked.evidence.values(metric)
        own, base = (values.get(name, {}) for name in (self.arm.name, self.base))
        sign = -1 if less else 1
        pairs = [sign * (own[seed] - base[seed]) for seed in own if seed in base]
        return mean_interval(pairs) if pairs and self.arm.name != self.base else None

    def from_equal_start(self, metric: str, start: str, over: Sequence[str]) -> Interval | None:
        """Return the difference from the base that is left where both start alike.

        What a unit of the metric `start` is worth is one slope within seeds, over the arms `over`.
        Steps are compared as speeds: the base's over the arm's. None of the base itself, and where
        one arm alone, equal starts or no common seed give no slope.
        """
        if self.arm.name == self.base or len(over) < 2:
            return None
        values, starts = (self.checked.evidence.values(of) for of in (metric, start))
        compared = [self.arm.name, self.base, *over]
        if not {*compared} <= values.keys() & starts.keys():
            return None
        seeds = sorted(
            set.intersection(*(set(of[arm]) for of in (values, starts) for arm in compared))
        )
        heights, begun = (
            np.array([[of[arm][seed] for seed in seeds] for arm in compared])
            for of in (values, starts)
        )  # (arms, seeds)
        if not np.ptp(begun[2:], axis=0).any():
            return None
        speeds = metric == _STEPS
        if speeds:
            heights = -np.log(heights)
        apart = begun[2:] - begun[2:].mean(axis=0)
        slope = (apart * heights[2:]).sum() / (apart**2).sum()
        (own, base, *_), (start_own, start_base, *_) = heights, begun
        left = mean_interval((own - base - slope * (start_own - start_base)).tolist())
        if not speeds:
            return left
        low, value, high = (math.exp(end or 0.0) for end in (left.low, left.value, left.high))
        return Interval(value=value, low=low, high=high, n=left.n)

    def secondary(self, metric: str) -> Mapping[str, Interval]:
        """Return the IQM's difference from the base and the probability of improvement."""
        if self.arm.name == self.base:
            return {}
        claims = self.checked.selection.target.claims
        claim = next((one for one in claims if one.metric == metric), None)
        if claim is None:
            return {}
        contrast = {self.arm.name: 1.0, self.base: -1.0}
        claim = dataclasses.replace(claim, contrast=contrast, secondary=("iqm", "improvement"))
        blocks = blocks_of(claim, {metric: self.checked.evidence.values(metric)})
        return secondary(claim, blocks, paired=True) if len(blocks) > 1 else {}

    @property
    def half_width(self) -> str:
        """`± 2.0`: the mean half width of the accuracy's interval over problems."""
        records = self.checked.evidence.records[self.arm.name].values()
        ends = [(one.metrics[_ACCURACY].low, one.metrics[_ACCURACY].high) for one in records]
        halves = [(high - low) / 2 for low, high in ends if low is not None and high is not None]
        return f"± {math.fsum(halves) / len(halves):.1f}" if halves else ""


def interval_text(interval: Interval | None, digits: int) -> str:
    """Return `+2.6 (+0.9 to +4.3)`, without an interval of two values, empty of none."""
    if interval is None:
        return ""
    ends = [f"{end:+.{digits}f}" for end in (interval.low, interval.high) if end is not None]
    shown = f" ({' to '.join(ends)})" if ends and interval.n > 2 else ""
    return f"{interval.value:+.{digits}f}{shown}"


def dose_rows(checks: Sequence[Checked], expected: Path, *names: str) -> list[str]:
    """Return the table of dose targets' arms, whose titles end in the model's size."""
    tables = []
    for checked in of_targets(checks, *names):
        by_arm = doses(checked)
        arms = [a for a in checked.selection.target.arms if a.name in (BASE, *by_arm)]
        tables.append(
            {
                "model": checked.selection.target.title.rpartition("-")[2],
                "arms": [ArmValues(checked=checked, arm=arm) for arm in arms],
                "doses": by_arm,
                "given": {a: treatment(d.rise, expected) for a, d in by_arm.items() if d.is_plain},
            }
        )
    found = {"tables": tables, "base": BASE, "paper": paper_rises(expected)}
    return rendered("doses.md", interval=interval_text, **found) if tables else NOTHING


def untrained_rows(checks: Sequence[Checked], expected: Path, *names: str) -> list[str]:
    """Return the untrained rows of Table 1 on a checkpoint, for targets that differ by prompt."""
    paper = {
        cell.arm: cell.value
        for cell in paper_cells(expected, "table1")
        if (cell.column, cell.quantity) == ("7B", "accuracy") and cell.arm
    }
    arms = _measured(of_targets(checks, *names), _ACCURACY, base="bf16")
    found = {"arms": arms, "paper": paper, "interval": interval_text}
    return rendered("untrained.md", **found) if arms else NOTHING


def second_round_rows(checks: Sequence[Checked]) -> list[str]:
    """Return the arms trained beside a baseline that learns, by what their late tests say."""
    names = (f"{of}_coder_{size}" for of in ("rates", "learning") for size in ("1_5b", "0_5b"))
    arms = _measured(of_targets(checks, *names), "test_late")
    return rendered("second_round.md", arms=arms, interval=interval_text) if arms else NOTHING


def _measured(checks: Iterable[Checked], metric: str, base: str = BASE) -> list[ArmValues]:
    """Return the arms with a value of a metric."""
    return [
        ArmValues(checked=checked, arm=arm, base=base)
        for checked in checks
        for arm in checked.selection.target.arms
        if checked.evidence.values(metric).get(arm.name)
    ]


def training_rows(checks: Sequence[Checked], expected: Path, name: str) -> list[str]:
    """Return the tables of a target's claims of the paper and of the arms that it has trained."""
    for checked in of_targets(checks, name):
        trained = _measured([checked], _ACCURACY)
        return rendered(
            "training.md",
            arms=trained,
            every=[of.arm.name for of in trained],
            warm=[arm.name for arm in _by_temperature([of.arm for of in trained])],
            scale=checked.selection.target.scales[checked.selection.tier],
            claims=of_kind(checked, Kind.PAPER),
            interval=interval_text,
            treatment=treatment_given(checks, expected),
        )
    return NOTHING


def _by_temperature(arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms that differ from the base by temperature alone, and the base."""
    return [arm for arm in arms if arm.name == BASE or arm.temperature_factor != 1]


def slope_rows(checks: Sequence[Checked], name: str) -> list[str]:
    """Return what a dose is worth, of a target of slopes: over all arms, as its claims judge it.

    Beside that, not planned: at equal greedy accuracy before training, and over some arms.
    """
    for checked in of_targets(checks, name):
        arms = checked.selection.target.arms
        cool = [arm for arm in arms if arm.temperature_factor <= 1]
        rounded = [arm for arm in arms if arm.temperature_factor == 1]
        start = ("accuracy_start",)
        looks: dict[str, tuple[Sequence[Arm], tuple[str, ...]]] = {
            "equal accuracy at the start, at the arm's temperature": (arms, start),
            "the same, without temperature 1.1": (cool, start),
            "without the doubled rounding": ([arm for arm in arms if arm.name != "nvfp4_x2"], ()),
            "only the arms that differ by rounding": (rounded, ()),
            "only the arms that differ by temperature": (_by_temperature(arms), ()),
        }
        stated = [(claim, v) for claim, v in checked.statements() if v.effect is not None]
        claims = [(claim, claim.dose, v) for claim, v in stated if claim.dose]
        planned = {
            given: [verdict for _, dose, verdict in claims if dose.given == given]
            for given in dict.fromkeys(dose.given for _, dose, _ in claims)
        }
        others = {
            words: [
                _slope_over(checked, claim, dataclasses.replace(dose, given=given), v, some)
                for claim, dose, v in claims
                if not dose.given
            ]
            for words, (some, given) in looks.items()
        }
        if claims:  # else no seed has all arms
            return rendered("slopes.md", planned=planned, others=others, claims=claims, arms=arms)
    return NOTHING


def _slope_over(
    checked: Checked, claim: Claim, dose: Dose, verdict: Verdict, arms: Sequence[Arm]
) -> Verdict:
    """Return a verdict with its claim's slope over a dose and some arms and a 95 % interval."""
    chosen = dataclasses.replace(claim, contrast={arm.name: 0 for arm in arms}, dose=dose)
    values = {of: checked.evidence.values(of) for of in (claim.metric, *dose.metrics)}
    slope = mean_interval(contrasts(chosen, blocks_of(chosen, values)))
    low, effect, high = (
        math.exp(end) if claim.log and end is not None else end
        for end in (slope.low, slope.value, slope.high)
    )
    return dataclasses.replace(verdict, effect=effect, low=low, high=high)
