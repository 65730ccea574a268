"""Steps whose rows have the lengths that a rollout's have: update, rollout, whole step, memory.

On a GPU alone: Qwen2.5-0.5B's shape with random NVFP4 weights, 16 prompts with 8 completions each,
whose lengths are drawn anew for every round (`repro.spec.step_scale`). The rows are phases of the
same steps, the trainer's own. `ratio_to_bf16` is the time with bfloat16 weights over the row's,
`ratio_to_equal` that with as many tokens in completions of one length. `test_memory` has the most
bytes of a rollout and of an update, allocated and reserved, beside those that the plan says.

Easy to get wrong: what the allocator reserves here may exceed what tensors take by a third, since
it keeps blocks of the sizes that earlier rows had. The plan is of tensors, so those are held to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from statistics import median
from typing import Any

import pytest

from benchmarks.device_time import CLOCK, record_rounds
from repro.evidence.verdicts.expectation import load_bars
from repro.measure.device_state import release
from repro.measure.memory_use import allocated_peak_bytes, peak_bytes, reset_peak
from repro.measure.step_measure import engine_config, step_shape
from repro.measure.step_training import begin, timed_step, training_of, warm_up
from repro.models.memory_plan import StepShape, plan_memory
from repro.models.random_policy import random_policy
from repro.reward.grader import GraderPool
from repro.rl.loop import Hooks
from repro.rl.trainer import Training
from repro.rl.training_state import TrainState
from repro.rollout.engine import Engine
from repro.run.places import expected_folder
from repro.spec.step_scale import StepArm, StepPoint, StepScale
from repro.targets.steps import BF16, LENGTH_POINTS, NVFP4

_ROUNDS = 7
_BUDGET = 40 * 10**9
_SPREAD = next(point for point in LENGTH_POINTS if point.name == "0_5b_spread")
TIMED = pytest.mark.benchmark(timer=CLOCK)
ROW = pytest.mark.parametrize("name", [pytest.param("0.5b-spread", id="0.5b-spread")])
# Seconds by phase, and bytes of the rollout and of what follows: one value of each step.
Taken = Mapping[str, list[float]]


def planned_step(arm: StepArm, point: StepPoint) -> StepShape:
    """Return the step that the memory plan chooses."""
    scale = StepScale(points=(point,))
    return step_shape(point, arm.weight_format, arm.lora_rank, scale, _BUDGET)


def peaks_of(part: str) -> dict[str, float]:
    """Return the most bytes since the part of a step began, and begin the next part."""
    allocated, reserved = allocated_peak_bytes() or 0, peak_bytes()
    reset_peak()
    return {f"{part}_allocated_bytes": allocated, f"{part}_reserved_bytes": reserved}


def observed_step(t: Training, state: TrainState) -> dict[str, float]:
    """Make a step under the clock; return its seconds by phase and its bytes by part."""
    peaks: dict[str, float] = {}
    hooks = Hooks(on_rollout=lambda *_: peaks.update(peaks_of("rollout")))
    noting = dataclasses.replace(t, hooks=hooks)
    reset_peak()
    seconds = timed_step(noting, state)
    return seconds | peaks | peaks_of("update")


def taken_by(arm: StepArm, point: StepPoint, pool: GraderPool) -> Taken:
    """Return what as many steps take as a row has rounds, and one before."""
    release()
    scale = StepScale(points=(point,), steps=_ROUNDS + 1)
    policy = random_policy(
        "qwen2.5-0.5b",
        weight_format=arm.weight_format,
        lora_rank=arm.lora_rank,
        seed=0,
        device="cuda",
    )
    planned = planned_step(arm, point)
    engine = Engine(policy, engine_config(point, planned))
    t = training_of(
        policy, engine, pool, arm, point, scale, seed=0,
        micro_tokens=planned.micro_tokens, kept_blocks=planned.kept_blocks,
    )  # fmt: skip
    state = begin(t)
    warm_up(t, state, scale.warm_up_tokens)
    steps = [observed_step(t, state) for _ in range(scale.steps)]
    engine.close()
    return {name: [step[name] for step in steps] for name in steps[0]}


@pytest.fixture(scope="module")
def steps(device: str) -> dict[str, Taken]:
    """Return the timed steps: those of the rows, and those that they are compared with."""
    if device != "cuda":
        pytest.skip("steps of a real shape are timed on a GPU")
    equal = dataclasses.replace(_SPREAD, lengths="equal")
    ways = {"own": (NVFP4, _SPREAD), "bf16": (BF16, _SPREAD), "equal": (NVFP4, equal)}
    with GraderPool(workers=2) as pool:
        return {name: taken_by(*way, pool) for name, way in ways.items()}


def _record(benchmark: Any, device: str, steps: dict[str, Taken], phase: str) -> None:
    rounds = iter(steps["own"][phase])
    own = record_rounds(benchmark, lambda: next(rounds), rounds=_ROUNDS, device=device)
    for name in ("bf16", "equal"):
        benchmark.extra_info[f"ratio_to_{name}"] = median(steps[name][phase][1:]) / own


@TIMED
@ROW
def test_update(name: str, device: str, steps: dict[str, Taken], benchmark: Any) -> None:
    _record(benchmark, device, steps, "update")


@TIMED
@ROW
def test_rollout(name: str, device: str, steps: dict[str, Taken], benchmark: Any) -> None:
    _record(benchmark, device, steps, "rollout")


@TIMED
@ROW
def test_step(name: str, device: str, steps: dict[str, Taken], benchmark: Any) -> None:
    """Bound by many things in turn, so no share of one limit is given."""
    _record(benchmark, device, steps, "total")


@TIMED
@ROW
def test_memory(name: str, device: str, steps: dict[str, Taken], benchmark: Any) -> None:
    """Timed as `test_step` is; what is planned may be exceeded by the plan's own bar, no more.

    The bar is a share of the step's peak. The driver's context is planned, too, but no tensor.
    """
    _record(benchmark, device, steps, "total")
    most = {key: max(values) for key, values in steps["own"].items() if key.endswith("_bytes")}
    benchmark.extra_info |= most
    peak = max(most["rollout_allocated_bytes"], most["update_allocated_bytes"])
    bars = load_bars(expected_folder(None), "systems", "memory")
    bar = next(bar for bar in bars if bar.metric.startswith("prediction_error_"))
    plan = plan_memory(planned_step(NVFP4, _SPREAD))
    for part, sizes in (("rollout", plan.rollout), ("update", plan.update)):
        taken, planned = most[f"{part}_allocated_bytes"], sum(sizes.values()) - sizes["context"]
        benchmark.extra_info[f"{part}_planned_bytes"] = planned
        assert bar.holds(100 * (taken - planned) / peak), (
            f"{part}: tensors take {taken:.0f} bytes; {planned} are planned, and beyond them "
            f"{bar.text()} % of the step's peak of {peak:.0f} is allowed"
        )
