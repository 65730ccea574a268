"""Time steps whose rows have the lengths that a rollout's have: update, rollout, whole step.

On a GPU: Qwen2.5-0.5B's shape with random NVFP4 weights, 16 prompts with 8 completions each, whose
lengths are drawn anew for every round (`repro.spec.step_scale`). The rows are phases of the same
steps, the trainer's own. `ratio_to_bf16` is the time with bfloat16 weights over the row's,
`ratio_to_equal` that with as many tokens in completions of one length. On a CPU a tiny shape.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import pytest

from benchmarks.device_time import device_type, record_rounds
from benchmarks.test_engine import TIMED, TINY
from repro.measure.step_measure import engine_config, step_shape
from repro.measure.step_training import begin, timed_step, training_of, warm_up
from repro.models.random_policy import random_policy, shape_config
from repro.reward.grader import GraderPool
from repro.rl.clock import PHASES, Phase
from repro.rl.trainer import iterate
from repro.rollout.engine import Engine
from repro.spec.step_scale import StepArm, StepPoint, StepScale
from repro.targets.steps import BF16, LENGTH_POINTS, NVFP4

_ROUNDS = 7
_BUDGET = 40 * 10**9
_SPREAD = next(point for point in LENGTH_POINTS if point.name == "0_5b_spread")
_TINY = dataclasses.replace(
    _SPREAD, prompts=2, group=2, prompt_tokens=16, completion_tokens=32, mean_tokens=8
)
ROW = pytest.mark.parametrize("name", [pytest.param("0.5b-spread", id="0.5b-spread")])
Seconds = Mapping[str, list[float]]


class HostClock:
    """Seconds by phase as the host has them."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*PHASES, "total"), 0.0)
        self._last = time.perf_counter()

    def mark(self, phase: Phase) -> None:
        """End the phase that began at the last mark."""
        now = time.perf_counter()
        for name in (phase, "total"):
            self.seconds[name] += now - self._last
        self._last = now


def seconds_of(arm: StepArm, point: StepPoint, pool: GraderPool, device: str) -> Seconds:
    """Return what each phase takes in as many steps as a row has rounds, and one before."""
    scale = StepScale(points=(point,), steps=_ROUNDS + 1)
    cuda = device == "cuda"
    policy = random_policy(
        shape_config("qwen2.5-0.5b") if cuda else TINY.shape,
        weight_format=arm.weight_format,
        lora_rank=arm.lora_rank,
        compute_dtype="bfloat16" if cuda else "float32",
        seed=0,
        device=device,
    )
    planned = step_shape(point, arm.weight_format, arm.lora_rank, scale, _BUDGET)
    engine = Engine(policy, engine_config(point, planned))
    t = training_of(
        policy, engine, pool, arm, point, scale, seed=0,
        micro_tokens=planned.micro_tokens, kept_blocks=planned.kept_blocks,
    )  # fmt: skip
    state = begin(t)
    warm_up(t, state, scale.warm_up_tokens)
    steps = []
    for _ in range(scale.steps):
        clock = HostClock()
        if not cuda:
            iterate(dataclasses.replace(t, clock=clock), state)
        steps.append(timed_step(t, state) if cuda else clock.seconds)
    engine.close()
    return {name: [step[name] for step in steps] for name in (*PHASES, "total")}


@pytest.fixture(scope="module")
def steps(device: str) -> dict[str, Seconds]:
    """Return the timed steps: those of the rows, and those that they are compared with."""
    spread = _SPREAD if device_type() == "cuda" else _TINY
    equal = dataclasses.replace(spread, lengths="equal")
    ways = {"own": (NVFP4, spread), "bf16": (BF16, spread), "equal": (NVFP4, equal)}
    with GraderPool(workers=2) as pool:
        return {name: seconds_of(*way, pool, device) for name, way in ways.items()}


def _record(benchmark: Any, device: str, steps: dict[str, Seconds], phase: str) -> None:
    rounds = iter(steps["own"][phase])
    own = record_rounds(benchmark, lambda: next(rounds), rounds=_ROUNDS, device=device)
    for name in ("bf16", "equal") if device == "cuda" else ():
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
