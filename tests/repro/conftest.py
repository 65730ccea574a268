"""Made-up records of Table 1's smoke runs: what honest runs would leave, with known numbers.

Nothing here was measured. Tests spoil one thing at a time and expect `check` to say which.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from repro.evidence.record import Estimate, Record, record_of
from repro.run.analysis_plan import plan_inputs
from repro.spec.config import RunConfig, derive_seed
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find

ENDS = {
    "bf16": 45.0,
    "nf4": 45.2,
    "mxfp4": 44.8,
    "nvfp4": 43.4,
    "bf16_full": 87.0,
    "bf16_lora": 91.0,
    "nf4_lora": 91.3,
    "mxfp4_lora": 89.2,
    "nvfp4_lora": 91.1,
    "nvfp4_lora_aqn": 91.5,
    "bf16_lora_random_reward": 46.0,
    "bf16_lora_format_reward": 8.0,
}
PERCENT = ("accuracy", "accuracy_greedy", "accuracy_greedy_start", "accuracy_forced_working")


def honest_record(run: RunConfig) -> Record:
    """Return the record that an honest run of this configuration might leave."""
    draw = random.Random(derive_seed(run.seed, run.arm.name, "made up"))
    end = min(99.0, ENDS.get(run.arm.name, 90.0) + draw.gauss(0, 1.0))
    start = 45.0 if run.arm.weight_format != "nvfp4" else 43.3
    metrics = {
        "accuracy": Estimate(value=end - 1.5, unit="percent", n=300),
        "accuracy_greedy": Estimate(value=end, unit="percent", n=300),
        "accuracy_forced_working": Estimate(value=91.5, unit="percent", n=300),
        "format_rate": Estimate(value=90.0 + draw.gauss(0, 1), unit="percent", n=300),
        "working_rate": Estimate(value=min(100.0, end + 5), unit="percent", n=300),
    }
    effects: dict[str, Any] = {
        "linears": {run.arm.weight_format: 21},
        "relative_weight_error_mean": 0.0 if run.arm.weight_format == "bf16" else 0.095,
    }
    inputs = {"checkpoint": "c" * 64, "test_problems": "d" * 64, "prompt_template": "e" * 64}
    series: dict[str, list[float]] = {}
    if run.procedure == "train":
        metrics |= _training_metrics(start, end, draw)
        effects |= _training_effects(run)
        series = _series(run, start, end, draw)
        inputs["train_problems"] = "f" * 64
    return dataclasses.replace(
        record_of(
            run,
            metrics=metrics,
            series=series,
            effects=effects,
            inputs=inputs,
            environment={"python": "3.11", "gpu": []},
            started=datetime.now(UTC),
        ),
        commit="0" * 40,
        dirty=False,
    )


def _training_metrics(start: float, end: float, draw: random.Random) -> dict[str, Estimate]:
    return {
        "accuracy_greedy_start": Estimate(value=start, unit="percent", n=300),
        "gain_greedy": Estimate(value=end - start, unit="points", n=300),
        "train_reward_mean": Estimate(value=0.30 + draw.gauss(0, 0.01), unit="reward", n=30),
        "entropy_first": Estimate(value=0.32 + draw.gauss(0, 0.005), unit="nats", n=5),
        "entropy_last": Estimate(value=0.16 + draw.gauss(0, 0.005), unit="nats", n=5),
    }


def _training_effects(run: RunConfig) -> dict[str, Any]:
    noisy = _is_noisy(run)
    return {
        "adapter_modules": 21 if run.arm.training == "lora" else 0,
        "parameters_trainable": 100_000,
        "trained_change_l2": 3.2,
        "optimizer_steps": run.scale.steps,
        "advantage_group_mean_max": 2e-7,
        "noise": {
            "modules": 6 if noisy else 0,
            "channels_changed": 20_000 if noisy else 0,
            "rollouts_asked": 27 if noisy else 0,
            "rollouts_perturbed": 27 if noisy else 0,
        },
    }


def _is_noisy(run: RunConfig) -> bool:
    return run.arm.noise is not None and run.arm.noise.form != "as_published"


def _series(
    run: RunConfig, start: float, end: float, draw: random.Random
) -> dict[str, list[float]]:
    steps = run.scale.steps
    sigma = [0.0 if step < 3 or not _is_noisy(run) else 0.005 for step in range(steps)]
    rise = [start + (end - start) * min(1.0, 1.4 * step / steps) for step in range(steps)]
    return {
        "accuracy": [max(0.0, 0.005 * value + draw.gauss(0, 0.04)) for value in rise],
        "reward": [max(0.0, 0.005 * value + draw.gauss(0, 0.04)) for value in rise],
        "entropy": [0.32 - 0.16 * step / steps + draw.gauss(0, 0.01) for step in range(steps)],
        "zero_variance_groups": [0.4] * steps,
        "sigma": sigma,
        "sigma_realised": [1.02 * value for value in sigma],
    }


def honest_proxy_record(run: RunConfig, shift: float = 0.0) -> Record:
    """Return the record that an honest run at the proxy tier might leave; `shift` moves its end."""
    record = honest_record(run)
    draw = random.Random(derive_seed(run.seed, run.arm.name, "made up too"))
    end = (record.value("accuracy") or 0.0) / 2 + shift + draw.gauss(0, 0.5)
    metrics = dict(record.metrics)
    for name in ("accuracy", "accuracy_hard", "accuracy_human", "heldout_area", "heldout_last"):
        metrics[name] = Estimate(value=end, unit="percent", n=500)
    effects = dict(record.effects)
    if run.arm.weight_noise is not None:
        effects["weight_noise"] = {
            "matched_to": run.arm.weight_noise.matched_to,
            "sigma": 0.1,
            "kl_format": 0.05,
            "kl_noise": 0.0503,
            "projections": 63,
        }
    return dataclasses.replace(
        record,
        metrics=metrics,
        effects=effects,
        inputs=record.inputs | plan_inputs(run),
        environment={"python": "3.11", "gpu": [{"name": "NVIDIA H200"}]},
    )


@pytest.fixture
def proxy_record() -> Callable[..., Record]:
    """Return the maker of one honest record at the proxy tier."""
    return honest_proxy_record


def write_table1(
    runs: Path, spoil: Callable[[Record], Record] = lambda record: record, seeds: int = 5
) -> None:
    """Write Table 1's smoke records to `runs`, each passed through `spoil`."""
    # Sixty waits for the disk a test would be most of the time of these tests.
    with mock.patch("os.fsync"):
        for run in plan(find("table1"), Tier.SMOKE, seeds):
            spoil(honest_record(run)).write(runs)


@pytest.fixture
def table1_records() -> Callable[..., None]:
    """Return a writer of made-up records of Table 1."""
    return write_table1


@pytest.fixture
def made_up_record() -> Callable[[RunConfig], Record]:
    """Return the maker of one honest record."""
    return honest_record
