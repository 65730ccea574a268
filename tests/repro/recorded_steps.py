"""For tests that compare records: made-up records of Table 3's steps, three timed repeats each."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

from repro.evidence.record import Estimate, Measured, Record, record_of
from repro.spec.claim import Metric
from repro.spec.config import RunConfig
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets.steps import TABLE3
from tests.repro.made_up import at_commit

# Noise of a few thousandths, as of timings on one device.
NOISE = (1.0, 1.002, 0.998)
_BASE = {"seconds": 10.0, "bytes": 2.0e10, "tokens per second": 900.0, "percent": 1.0, "ratio": 2.0}

# (arm, metric, values) -> values.
Change = Callable[[str, Metric, list[float]], list[float]]
Spoil = Callable[[Record], Record]


def unchanged(arm: str, metric: Metric, values: list[float]) -> list[float]:
    """Return the values as they are."""
    return values


def times(factor: float, *prefixes: str) -> Change:
    """Return a change that multiplies metrics whose names begin so, of the NVFP4 arm."""

    def change(arm: str, metric: Metric, values: list[float]) -> list[float]:
        hit = arm == "nvfp4_lora" and metric.name.startswith(prefixes)
        return [factor * value for value in values] if hit else values

    return change


def step_record(run: RunConfig, change: Change = unchanged) -> Record:
    """Return the record that a run of Table 3 might leave on an H200."""
    series: dict[str, list[float | None]] = {}
    metrics = {}
    for metric in TABLE3.metrics:
        base = _BASE[metric.unit]
        steady = metric.unit in ("bytes", "percent")
        values = [base] if steady else [base * noise for noise in NOISE]
        values = change(run.arm.name, metric, values)
        if len(values) > 1:
            series[metric.name] = list(values)
        middle = sorted(values)[len(values) // 2]
        metrics[metric.name] = Estimate(value=middle, unit=metric.unit, n=len(values))
    measured = Measured(metrics=metrics, series=series)
    environment = {"gpu": [{"name": "NVIDIA H200"}]}
    record = record_of(run, measured, environment=environment, started=datetime.now(UTC))
    return at_commit(record)


def step_records(change: Change = unchanged) -> dict[str, dict[int, Record]]:
    """Return {arm: {seed: record}} of Table 3."""
    runs = plan(TABLE3, Tier.SYSTEMS)
    return {run.arm.name: {run.seed: step_record(run, change)} for run in runs}


def write_steps(
    runs: Path, change: Change = unchanged, spoil: Spoil = lambda record: record
) -> Path:
    """Write made-up records of Table 3 to their places, each passed through `spoil`."""
    with mock.patch("os.fsync"):
        for by_seed in step_records(change).values():
            for record in by_seed.values():
                spoil(record).write(runs)
    return runs
