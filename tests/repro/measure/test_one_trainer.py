"""There is one trainer: each tier's step enters the same functions, and the timed step trains."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from repro.measure import step_measure
from repro.measure.step_ledger import StepLedger
from repro.measure.step_measure import Bench
from repro.models.policy import Policy
from repro.reward.grader import GraderPool
from repro.rl import collect, loss, micro_batches, optimizer, passes, receipts, step, trainer
from repro.run.carry_out import procedure_named
from repro.spec.config import RunConfig
from repro.spec.step import StepPoint, StepScale
from repro.spec.tier import Tier
from repro.targets.steps import NVFP4
from repro.targets.table1 import BF16_LORA, SMOKE, TABLE1

# Once per rollout, once per optimiser step, and at least once per step.
ONCE = (trainer.iterate, collect.collect, receipts.note_rollout, step.accumulate_step,
        optimizer.scheduled_step, step.step_metrics)  # fmt: skip
OFTEN = (micro_batches.plan_step, micro_batches.split_by_tokens, step.within_memory,
         step.carry_out, passes.row_logprobs, loss.policy_loss)  # fmt: skip


def calls_in(work: Callable[[], Any]) -> Counter[CodeType]:
    """Return how often each of the trainer's functions was entered, whoever called it."""
    watched = {function.__code__ for function in (*ONCE, *OFTEN)}
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


def require_the_trainers_steps(counted: Counter[CodeType], steps: int) -> None:
    assert {f.__name__: counted[f.__code__] for f in ONCE} == {f.__name__: steps for f in ONCE}
    assert {f.__name__ for f in OFTEN if counted[f.__code__] < steps} == set()


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


def test_the_paper_tier_takes_the_smoke_tiers_procedure() -> None:
    assert {Tier.SMOKE, Tier.PAPER} <= set(TABLE1.scales)
    assert TABLE1.procedure == smoke_run(1).procedure


@pytest.mark.usefixtures("host_clock")
def test_a_measured_step_is_the_trainers_step(
    policy: Policy, pool: GraderPool, tmp_path: Path
) -> None:
    point = StepPoint(
        name="small", model="0.5b", prompts=2, group=2, prompt_tokens=20, completion_tokens=24,
        micro_tokens=100,
    )  # fmt: skip
    scale = StepScale(points=(point,), warm_up=1, warm_up_tokens=4, steps=2)
    ledger = StepLedger(tmp_path / "steps.json", scale)
    bench = Bench(scale=scale, seed=0, pool=pool, ledger=ledger, should_stop=lambda: False)
    counted = calls_in(lambda: step_measure._measure(bench, NVFP4, point, policy, 10**10))
    require_the_trainers_steps(counted, scale.warm_up + scale.steps)
    # Two micro-batches of two rows in a timed step, one in a warm-up; no pass beside them.
    assert counted[passes.row_logprobs.__code__] == 2 * scale.steps + scale.warm_up
