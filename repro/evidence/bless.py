"""Bless: turn this suite's own records into measured expectations, once a person asked for it.

Refused for a dirty tree (the commit would not say what ran), for records of several commits but for
whole seeds of learning runs (`repro.evidence.origins` has the rule), for fewer than five seeds an
arm (or the timed repeats that a target declares), for the paper tier (its expectations are the
paper's), and while any record is refused or any run has failed.

The rule of the interval: with n seeds of mean m and deviation s (n - 1), a new run's mean of n
seeds should lie in m +- t(0.9995, n - 1) * s * sqrt(2 / n), and never closer than a floor of 3
points (percents) or 2 % of the value: sums in another order, on another processor, flip near-ties
even where nothing is drawn at random. Many cells are judged at once, so the quantile is far out; a
verdict needs the whole new interval outside.

Targets that time a deterministic workload (`Target.timed_repeats`) declare how many repeats they
need instead of seeds: nothing in them is drawn that a seed could change, so five seeds would pay
five times for what five repeats show. Their values are the repeats. From three on the rule above
holds; one or two show no spread worth the name (t(0.9995, 1) is 637), so the interval is then 5 %
to either side, which is several times what timings of one kind of device differ by.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from repro.evidence.environment import device_of
from repro.evidence.expectation import SCHEMA
from repro.evidence.origins import commits_of, devices_of, is_clean, refusal
from repro.evidence.record import Record, replace_text
from repro.evidence.statistics import t_quantile
from repro.evidence.verdict import MINIMUM_REPEATS
from repro.spec.target import Metric, Target
from repro.spec.tier import Tier

MINIMUM_SEEDS = 5
_QUANTILE = 0.9995
_FEW_REPEATS = 0.05
RULE = "mean +- t(0.9995, n - 1) * s * sqrt(2 / n), at least the floor of the metric's unit"
RULE_OF_FEW = "one or two timed repeats: 5 % of their mean to either side"
# Units whose values belong to the machine, not to the method: never blessed without a device.
_OF_THE_MACHINE = ("seconds", "bytes", "tokens per second")


class BlessError(ValueError):
    """Records that must not become expectations; the message says why."""


def bless(
    target: Target,
    tier: Tier,
    records: Mapping[str, Mapping[int, Record]],
    *,
    problems: Sequence[str],
    expected: Path,
    failed: Sequence[Record] = (),
) -> list[Path]:
    """Write the expectations and the compacted records behind them; return their paths.

    Parameters
    ----------
    records
        By arm and seed, those of shared arms among them: they are compared, and kept by the target
        that ran them.

    Raises
    ------
    BlessError
        If the records do not qualify.
    """
    compared = [record for by_seed in records.values() for record in by_seed.values()]
    records = {arm: by_seed for arm, by_seed in records.items() if arm not in target.shared}
    _require_fit(target, tier, [*compared, *failed], problems)
    failed = [record for record in failed if record.target == target.name]
    every = [record for by_seed in records.values() for record in by_seed.values()]
    device = device_of(every[0].environment) if tier is not Tier.SMOKE else None
    folder = expected / tier.value / (device or "")
    folder.mkdir(parents=True, exist_ok=True)
    metrics = [item for item in target.metrics if device or item.unit not in _OF_THE_MACHINE]
    head = {
        "schema": SCHEMA,
        "target": target.name,
        "target_version": target.version,
        "tier": tier.value,
        "device": device,
        "commits": commits_of([*every, *failed]),
        "date": datetime.now(UTC).date().isoformat(),
    }
    expectations = [
        _expectation(arm, metric, by_seed, timed=target.timed_repeats > 0)
        for arm, by_seed in sorted(records.items())
        for metric in metrics
        if (target.timed_repeats or len(by_seed) >= MINIMUM_SEEDS)
        and all(record.value(metric.name) is not None for record in by_seed.values())
    ]
    paths = [folder / f"{target.name}.json", folder / f"{target.name}.records.json"]
    _write(paths[0], {**head, "rule": RULE, "expectations": expectations})
    _write(paths[1], {**head, "records": [compact(record) for record in (*every, *failed)]})
    return paths


def _require_fit(
    target: Target,
    tier: Tier,
    every: Sequence[Record],
    problems: Sequence[str],
) -> None:
    where = f"{target.name} at the {tier.value} tier is not blessed"
    if tier is Tier.PAPER:
        raise BlessError(f"{where}: the paper's own numbers are that tier's expectations")
    if problems:
        raise BlessError(f"{where}: {problems[0]} ({len(problems)} such records)")
    _require_enough(target, tier, where, [item for item in every if item.target == target.name])
    dirty = sorted({record.arm for record in every if not is_clean(record)})
    if dirty:
        raise BlessError(
            f"{where}: made from a source tree with changes, or whose state is not known "
            f"({', '.join(dirty)}); commit and run again"
        )
    together = refusal(every, target=target.name, several=tier is not Tier.SYSTEMS)
    if together:
        raise BlessError(f"{where}: {together}")
    devices = devices_of(every)
    if tier is not Tier.SMOKE and (len(devices) > 1 or None in devices):
        raise BlessError(f"{where}: the records name the devices {devices}; needs one")


def _require_enough(target: Target, tier: Tier, where: str, every: Sequence[Record]) -> None:
    """Raise `BlessError` for arms with too few seeds, or metrics with too few timed repeats."""
    planned = len(target.scales[tier].seeds) if tier is Tier.PROXY else MINIMUM_SEEDS
    least = 1 if target.timed_repeats else min(MINIMUM_SEEDS, planned)
    own = [arm.name for arm in target.arms if arm.name not in target.shared]
    seeds = {name: {record.seed for record in every if record.arm == name} for name in own}
    lacking = [name for name in own if len(seeds[name]) < least]
    if lacking:
        raise BlessError(f"{where}: fewer than {least} seeds recorded for {', '.join(lacking)}")
    short = sorted(
        f"{name} of {record.arm}"
        for record in every
        for name in record.series
        if 0 < len(record.repeats(name)) < target.timed_repeats
    )
    if short:
        raise BlessError(
            f"{where}: fewer than {target.timed_repeats} timed repeats of {short[0]} "
            f"({len(short)} such metrics)"
        )


def _expectation(
    arm: str, metric: Metric, by_seed: Mapping[int, Record], *, timed: bool
) -> dict[str, Any]:
    values = {str(seed): float(by_seed[seed].value(metric.name) or 0.0) for seed in sorted(by_seed)}
    what, rule = "seeds", RULE
    if timed:
        values = {
            f"{seed}.{number}": value
            for seed in sorted(by_seed)
            for number, value in enumerate(by_seed[seed].repeats(metric.name))
        }
        what, rule = "timed repeats", RULE if len(values) >= MINIMUM_REPEATS else RULE_OF_FEW
    low, high = accepted(list(values.values()), metric.unit)
    return {
        "arm": arm,
        "metric": metric.name,
        "accept": [low, high],
        "source": "measured",
        "because": f"{len(values)} {what} of this suite; {rule}",
        "values": values,
    }


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


def compact(record: Record) -> dict[str, Any]:
    """Return a record as JSON values, its series rounded to six digits."""
    raw = record.to_json()
    raw["series"] = {
        name: [None if value is None else float(f"{value:.6g}") for value in values]
        for name, values in raw["series"].items()
    }
    return raw


def _write(path: Path, value: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")
