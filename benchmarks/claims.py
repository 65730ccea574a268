"""What the paper's claims come to on this device: measured as targets are, judged by their rule.

The measurements are this suite's own (`repro.measure`) at points of its targets, with three repeats
each. `compare` judges them against what is blessed on the device (`repro.judge.as_before`): a row
is worse if the change is beyond the metric's threshold, and shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.device_time import device_slug
from repro.evidence.environment import SEGMENTED
from repro.evidence.procedure import Measured, RunContext
from repro.judge.as_before import MetricRow, judged
from repro.judge.check import stored_evidence
from repro.judge.gathering import values_of
from repro.measure.device_state import driver_bytes, release
from repro.measure.step_time import measure_steps
from repro.measure.throughput import measure_seeds
from repro.models.other_products import missing_library
from repro.run.places import expected_folder
from repro.run.select import select
from repro.spec.arm import Arm
from repro.spec.claim import Metric
from repro.spec.config import RunConfig
from repro.spec.step_scale import StepArm, StepScale
from repro.spec.throughput_scale import ThroughputPoint, ThroughputScale
from repro.spec.tier import Tier
from repro.targets import find, table1
from repro.targets.memory import CLAIM
from repro.targets.rollout_speed import POINTS
from repro.targets.speed import BITSANDBYTES, rate
from repro.targets.steps import BF16, LENGTH_POINTS, NVFP4

Values = Mapping[Any, float]
_SEEDS = (0, 1, 2)
_run = partial(RunConfig, target="claims", target_version=1, tier=Tier.SYSTEMS.value)
_CONTEXT = RunContext(folder=Path(), threads=2)
BATCHES = POINTS[0].batches
# The 7B at every batch, in the engine of its target; of the 32B one batch.
CELLS: tuple[ThroughputPoint, ...] = (POINTS[0], dataclasses.replace(POINTS[2], batches=(8,)))
SPREAD_7B = next(point for point in LENGTH_POINTS if point.name == "7b_spread")
ROLLOUT_ARMS: dict[str, Arm] = {
    "BF16": table1.BF16_LORA,
    "NVFP4": table1.NVFP4_LORA,
    "BF16 folded": table1.BF16_LORA_FOLDED,
    "NF4 bitsandbytes": BITSANDBYTES,
}


@cache
def rollouts(name: str) -> dict[str, Values]:
    """Return tokens per second of an arm of `ROLLOUT_ARMS`, by metric and seed.

    Raises `ValueError`, with a sentence, where the arm cannot be measured here.
    """
    arm, points = ROLLOUT_ARMS[name], CELLS
    foreign = arm is BITSANDBYTES
    if foreign and (lacking := missing_library("bitsandbytes")):
        raise ValueError(f"{arm.name} {lacking}")
    if foreign:  # nothing of it is blessed, and it is the slowest: a quarter of its steps
        points = tuple(dataclasses.replace(point, windows=3) for point in points)
    scale = ThroughputScale(points=points, bitsandbytes=(arm.name,) if foreign else ())
    runs = [_run(procedure="throughput", arm=arm, scale=scale, seed=seed) for seed in _SEEDS]
    measured = measure_seeds(runs, _CONTEXT)
    release()
    rates: dict[str, Values] = {}
    for metric in (rate(point.name, batch).name for point in points for batch in point.batches):
        found = {s: own.metrics.get(metric) for s, own in zip(_SEEDS, measured, strict=True)}
        rates[metric] = {s: one.value for s, one in found.items() if one and one.value is not None}
    return rates


@cache
def steps(name: str) -> dict[str, Values]:
    """Return seconds by phase of steps of 7B, 16 x 8 rows of spread lengths, `BF16` or `NVFP4`."""
    arm = BF16 if name == "BF16" else NVFP4
    return _stepped(arm, StepScale(points=(SPREAD_7B,), steps=len(_SEEDS)))


@cache
def claimed_step() -> dict[str, Values]:
    """Return the peak and the seconds of NVFP4's whole step of 32B, by metric.

    A process of its own measures it, with its target's allocator: blocks that other models left
    behind are not counted, nor is what this process holds of the device.
    """
    release()
    held = driver_bytes()
    with (
        pytest.MonkeyPatch.context() as variables,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as own,
    ):
        variables.setenv(*SEGMENTED)
        measured = own.submit(_stepped, NVFP4, StepScale(points=(CLAIM,))).result()
    peak = f"peak_bytes_{CLAIM.name}"
    return measured | {peak: {seed: value - held for seed, value in measured[peak].items()}}


def _stepped(arm: StepArm, scale: StepScale) -> dict[str, Values]:
    run = _run(procedure="step_time", arm=arm, scale=scale, seed=0)
    measured: Measured = measure_steps(run, _CONTEXT)
    release()
    series = measured.series
    return {
        name: {(0, n): v for n, v in enumerate(series.get(name, [own.value])) if v is not None}
        for name, own in measured.metrics.items()
    }


def ratio(above: Values, below: Values) -> float:
    """Return how many times the median of `below` that of `above` is."""
    return median(above.values()) / median(below.values())


def compared(target: str, arm: str, values: Mapping[str, Values]) -> dict[str, MetricRow]:
    """Return the rows of metrics that are blessed of an arm on this device, by metric."""
    (selection,) = select([target], tier=Tier.SYSTEMS.value)
    stored = stored_evidence(selection, device_slug(), expected_folder(None))
    records = stored.records.get(arm, {}) if stored else {}
    own = find(target)
    timed = own.timed_repeats > 0
    metrics: Sequence[Metric] = [m for m in own.metrics_at(Tier.SYSTEMS) if m.name in values]
    rows = judged(
        own,
        Tier.SYSTEMS,
        ((arm, m, values_of(records, m.name, timed=timed), values[m.name]) for m in metrics),
    )
    return {row.metric: row for row in rows}
