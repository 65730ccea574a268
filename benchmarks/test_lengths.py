"""Time steps whose rows have the lengths that a rollout's have: update, rollout, whole step.

On a GPU alone: Qwen2.5-0.5B's shape with random NVFP4 weights, 16 prompts with 8 completions each,
whose lengths are drawn anew for every round (`repro.spec.step_scale`). The rows are phases of the
same steps, the trainer's own. `ratio_to_bf16` is the time with bfloat16 weights over the row's,
`ratio_to_equal` that with as many tokens in completions of one length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from statistics import median
from typing import Any

import pytest

from benchmarks.device_time import CLOCK, record_rounds
from repro.measure.step_measure import engine_config, step_shape
from repro.measure.step_training import begin, timed_step, training_of, warm_up
from repro.models.random_policy import random_policy
from repro.reward.grader import GraderPool
from repro.rl.clock import PHASES
from repro.rollout.engine import Engine
from repro.spec.step_scale import StepArm, StepPoint, StepScale
from repro.targets.steps import BF16, LENGTH_POINTS, NVFP4

_ROUNDS = 7
_BUDGET = 40 * 10**9
_SPREAD = next(point for point in LENGTH_POINTS if point.name == "0_5b_spread")
TIMED = pytest.mark.benchmark(timer=CLOCK)
ROW = pytest.mark.parametrize("name", [pytest.param("0.5b-spread", id="0.5b-spread")])
Seconds = Mapping[str, list[float]]


def seconds_of(arm: StepArm, point: StepPoint, pool: GraderPool) -> Seconds:
    """Return what each phase takes in as many steps as a row has rounds, and one before."""
    scale = StepScale(points=(point,), steps=_ROUNDS + 1)
    policy = random_policy(
        "qwen2.5-0.5b",
        weight_format=arm.weight_format,
        lora_rank=arm.lora_rank,
        seed=0,
        device="cuda",
    )
    planned = step_shape(point, arm.weight_format, arm.lora_rank, scale, _BUDGET)
    engine = Engine(policy, engine_config(point, planned))
    t = training_of(
        policy, engine, pool, arm, point, scale, seed=0,
        micro_tokens=planned.micro_tokens, kept_blocks=planned.kept_blocks,
    )  # fmt: skip
    state = begin(t)
    warm_up(t, state, scale.warm_up_tokens)
    steps = [timed_step(t, state) for _ in range(scale.steps)]
    engine.close()
    return {name: [step[name] for step in steps] for name in (*PHASES, "total")}


@pytest.fixture(scope="module")
def steps(device: str) -> dict[str, Seconds]:
    """Return the timed steps: those of the rows, and those that they are compared with."""
    if device != "cuda":
        pytest.skip("steps of a real shape are timed on a GPU")
    equal = dataclasses.replace(_SPREAD, lengths="equal")
    ways = {"own": (NVFP4, _SPREAD), "bf16": (BF16, _SPREAD), "equal": (NVFP4, equal)}
    with GraderPool(workers=2) as pool:
        return {name: seconds_of(*way, pool) for name, way in ways.items()}


def _record(benchmark: Any, device: str, steps: dict[str, Seconds], phase: str) -> None:
    rounds = iter(steps["own"][phase])
    own = record_rounds(benchmark, lambda: next(rounds), rounds=_ROUNDS, device=device)
    for name in ("bf16", "equal"):
        benchmark.extra_info[f"ratio_to_{name}"] = median(steps[name][phase][1:]) / own


@TIMED
@ROW
def test_update(name: str, device: str, steps: dict[str, Seconds], benchmark: Any) -> None:
    _record(benchmark, device, steps, "update")


@TIMED
@ROW
def test_rollout(name: str, device: str, steps: dict[str, Seconds], benchmark: Any) -> None:
    _record(benchmark, device, steps, "rollout")


@TIMED
@ROW
def test_step(name: str, device: str, steps: dict[str, Seconds], benchmark: Any) -> None:
    """Bound by many things in turn, so no share of one limit is given."""
    _record(benchmark, device, steps, "total")
