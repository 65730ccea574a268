"""Measured expectations: expected results derived from blessed records.

They are computed from the store whenever they are asked for, so that they cannot disagree with the
records behind them.

The rule of the interval: with n seeds of mean m and deviation s (n - 1), a new run's mean of n
seeds should lie in m +- t(0.9995, n - 1) * s * sqrt(2 / n), and never closer than a floor of 3
points (percents) or 2 % of the value: sums in another order, on another processor, flip near-ties
even where nothing is drawn at random. Many cells are judged at once, so the quantile is far out; a
verdict needs the whole new interval outside. Fewer than five seeds expect nothing.

Targets that time a deterministic workload (`Target.timed_repeats`) have repeats in place of seeds:
nothing in them is drawn that a seed could change, so five seeds would pay five times for what five
repeats show. From three on the rule above holds; one or two show no spread worth the name
(t(0.9995, 1) is 637), so the interval is then 5 % to either side, which is several times what
timings of one kind of device differ by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from repro.evidence.estimate import t_quantile
from repro.evidence.record import Record
from repro.evidence.store import Blessed
from repro.evidence.verdicts.expectation import Expectation, load_bars
from repro.evidence.verdicts.verdict import MINIMUM_REPEATS
from repro.spec.target import Metric, Target
from repro.spec.tier import Tier

MINIMUM_SEEDS = 5
_QUANTILE = 0.9995
_FEW_REPEATS = 0.05
RULE = "mean +- t(0.9995, n - 1) * s * sqrt(2 / n), at least the floor of the metric's unit"
RULE_OF_FEW = "one or two timed repeats: 5 % of their mean to either side"
# Units whose values belong to the machine, not to the method: expected on the same device alone.
_OF_THE_MACHINE = ("seconds", "bytes", "tokens per second")


def load_expectations(
    expected: Path, tier: Tier, target: Target, device: str | None = None
) -> list[Expectation]:
    """Return the bars of a target at a tier, then what its blessed records lead to expect.

    Raises `ExpectationError` or `RecordError` if a file cannot be read.

    Parameters
    ----------
    device
        Kind of device that is judged. Records blessed without a device count on every one.
    """
    expectations = load_bars(expected, tier.value, target.name, device)
    for kind in dict.fromkeys((None, device)):
        records: dict[str, dict[int, Record]] = {}
        for entry in Blessed(expected, tier.value, kind).entries(tier.value, target.name):
            if entry.finished:
                record = entry.read()
                records.setdefault(record.arm, {})[record.seed] = record
        expectations += measured_expectations(target, records, device=kind)
    return expectations


def measured_expectations(
    target: Target, records: Mapping[str, Mapping[int, Record]], *, device: str | None
) -> list[Expectation]:
    """Return an expectation for each arm and metric of which there are enough records."""
    metrics = [item for item in target.metrics if device or item.unit not in _OF_THE_MACHINE]
    return [
        _expectation(arm, metric, by_seed, timed=target.timed_repeats > 0)
        for arm, by_seed in sorted(records.items())
        for metric in metrics
        if metric.applies(Tier(next(iter(by_seed.values())).tier))
        if (target.timed_repeats or len(by_seed) >= MINIMUM_SEEDS)
        and all(record.value(metric.name) is not None for record in by_seed.values())
    ]


def _expectation(
    arm: str, metric: Metric, by_seed: Mapping[int, Record], *, timed: bool
) -> Expectation:
    records = [by_seed[seed] for seed in sorted(by_seed)]
    values = [record.value(metric.name) or 0.0 for record in records]
    what, rule = "seeds", RULE
    if timed:
        values = [value for record in records for value in record.repeats(metric.name)]
        what, rule = "timed repeats", RULE if len(values) >= MINIMUM_REPEATS else RULE_OF_FEW
    return Expectation(
        arm=arm,
        metric=metric.name,
        accept=accepted(values, metric.unit),
        source="measured",
        because=f"{len(values)} {what} of this suite; {rule}",
    )


def accepted(values: Sequence[float], unit: str) -> tuple[float, float]:
    """Return the interval in which the mean of as many new seeds, or repeats, should lie."""
    n, mean = len(values), fmean(values)
    if n < MINIMUM_REPEATS:
        half = _FEW_REPEATS * abs(mean)
        return round(mean - half, 6), round(mean + half, 6)
    half = t_quantile(_QUANTILE, n - 1) * stdev(values) * math.sqrt(2 / n)
    floor = 3.0 if unit in ("percent", "points") else 0.02 * abs(mean)
    half = max(half, floor)
    return round(mean - half, 6), round(mean + half, 6)
