"""There is one trainer: each tier's step enters the same functions, and the timed step trains.

Of the trainer's functions some are the loop's own, entered alike whatever trains; the others are
the passes of one policy, or those of an ensemble.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from repro.evidence.procedure import Measured
from repro.models.policy import Policy
from repro.procedures.together import train_together
from repro.reward.grader import GraderPool
from repro.rl import (
    collect,
    loop,
    loss,
    micro_batches,
    receipts,
    step,
    trainer,
)
from repro.rl.single_run import optimizers, packed
from repro.rl.stacked import policies as stacked
from repro.rl.stacked import update
from repro.run.carry_out import is_ensemble, procedure_named
from repro.spec.config import RunConfig
from repro.spec.step_scale import StepPoint, StepScale
from repro.spec.tier import Tier
from repro.targets.steps import NVFP4
from repro.targets.table1 import BF16_LORA, SMOKE, TABLE1
from tests.repro.measure.conftest import bench_of, measured_at

# Once per rollout, of however many runs.
PER_TRAINING = (loop.run_steps,)
PER_ROLLOUT = (trainer.iterate, collect.collect)
# Once per rollout and run, and once per optimiser step and run.
PER_RUN = (receipts.note_rollout, receipts.note_step, step.step_metrics)
# At least once per optimiser step and run.
OFTEN = (micro_batches.plan_step, micro_batches.split_by_tokens, loss.policy_loss)
# At least once per optimiser step, of however many runs.
PER_STEP = (step.within_memory,)
# Once per optimiser step, or at least once, of one policy by itself ...
SINGLE = (step.accumulate_step, optimizers.scheduled_step)
SINGLE_OFTEN = (step.carry_out, packed.packed_logprobs)
# ... and of an ensemble.
STACKED = (stacked.StackedPolicies.backward, stacked.StackedPolicies.step,
           update.accumulate_gradients)  # fmt: skip
STACKED_OFTEN = (update.Passes.logprobs,)
WATCHED = (*PER_ROLLOUT, *PER_RUN, *OFTEN, *PER_STEP, *SINGLE, *SINGLE_OFTEN, *STACKED,
           *STACKED_OFTEN, *PER_TRAINING)  # fmt: skip


def calls_in(work: Callable[[], Any]) -> Counter[CodeType]:
    """Return how often each of the trainer's functions was entered, whoever called it."""
    watched = {function.__code__ for function in WATCHED}
    counted: Counter[CodeType] = Counter()

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in watched:
            counted[frame.f_code] += 1

    sys.setprofile(enter)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counted


def names(counted: Counter[CodeType], functions: Sequence[Any]) -> dict[str, int]:
    return {function.__qualname__: counted[function.__code__] for function in functions}


def require_the_trainers_steps(counted: Counter[CodeType], steps: int, runs: int = 1) -> None:
    assert set(names(counted, PER_ROLLOUT).values()) == {steps}
    assert set(names(counted, PER_RUN).values()) == {steps * runs}
    assert {n: c for n, c in names(counted, OFTEN).items() if c < steps * runs} == {}
    assert {n: c for n, c in names(counted, PER_STEP).items() if c < steps} == {}


def require_passes_of_one_policy(counted: Counter[CodeType], steps: int) -> None:
    assert set(names(counted, SINGLE).values()) == {steps}
    assert {n: c for n, c in names(counted, SINGLE_OFTEN).items() if c < steps} == {}
    assert set(names(counted, (*STACKED, *STACKED_OFTEN)).values()) == {0}


def require_passes_of_an_ensemble(counted: Counter[CodeType], steps: int) -> None:
    assert set(names(counted, STACKED).values()) == {steps}
    assert {n: c for n, c in names(counted, STACKED_OFTEN).items() if c < steps} == {}
    assert set(names(counted, (*SINGLE, *SINGLE_OFTEN)).values()) == {0}


def smoke_run(steps: int) -> RunConfig:
    data = dataclasses.replace(SMOKE.data, train_problems=16, test_problems=2)
    scale = dataclasses.replace(SMOKE, data=data, steps=steps, prompts_per_rollout=2)
    return RunConfig(
        target="table1", target_version=1, tier="smoke", procedure="train", arm=BF16_LORA,
        scale=scale, seed=0,
    )  # fmt: skip


def test_a_smoke_run_takes_the_trainers_step(tmp_path: Path) -> None:
    counted = calls_in(
        lambda: procedure_named("train")(
            smoke_run(2), folder=tmp_path, progress=lambda *a: None, should_stop=lambda: False,
            threads=1,
        )
    )  # fmt: skip
    require_the_trainers_steps(counted, 2)
    require_passes_of_one_policy(counted, 2)


def test_an_ensemble_takes_the_trainers_step(tmp_path: Path) -> None:
    scale = dataclasses.replace(smoke_run(2).scale, together=True)
    runs = [dataclasses.replace(smoke_run(2), seed=seed, scale=scale) for seed in range(2)]
    assert all(is_ensemble(run) for run in runs)
    counted = calls_in(lambda: together(runs, tmp_path))
    require_the_trainers_steps(counted, steps=2, runs=2)
    require_passes_of_an_ensemble(counted, 2)


def together(runs: Sequence[RunConfig], folder: Path) -> None:
    results = train_together(
        runs, device="cpu", folder=folder, progress=lambda *a: None, should_stop=lambda: False,
        threads=1,
    )  # fmt: skip
    assert [type(outcome) for outcome in results] == [Measured] * len(runs)


def test_the_paper_tier_takes_the_smoke_tiers_procedure() -> None:
    assert {Tier.SMOKE, Tier.PAPER} <= set(TABLE1.scales)
    assert TABLE1.procedure == smoke_run(1).procedure


@pytest.mark.usefixtures("host_clock")
def test_a_measured_step_is_the_trainers_step(policy: Policy, pool: GraderPool) -> None:
    point = StepPoint(
        name="small", model="0.5b", prompts=2, group=2, prompt_tokens=20, completion_tokens=24,
        micro_tokens=100,
    )  # fmt: skip
    scale = StepScale(points=(point,), warm_up=1, warm_up_tokens=4, steps=2)
    bench = bench_of(scale, pool)
    counted = calls_in(lambda: measured_at(bench, NVFP4, point, policy))
    require_the_trainers_steps(counted, scale.warm_up + scale.steps)
    require_passes_of_one_policy(counted, scale.warm_up + scale.steps)
    # Two micro-batches of two rows in a timed step, one in a warm-up; no pass beside them.
    assert counted[packed.packed_logprobs.__code__] == 2 * scale.steps + scale.warm_up
