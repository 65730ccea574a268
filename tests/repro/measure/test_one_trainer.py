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

from repro.models.policy import Policy
from repro.procedures.together import train_together
from repro.reward.grader import GraderPool
from repro.rl import collect, loss, micro_batches, rollout_receipts, step, trainer
from repro.rl.single_run import optimizers, packed
from repro.rl.stacked import stacked_policies as stacked
from repro.run.carry_out import procedure_named
from repro.spec.config import RunConfig
from repro.spec.step_scale import StepPoint, StepScale
from repro.targets.steps import NVFP4
from repro.targets.table1 import BF16_LORA, SMOKE
from tests.repro.measure.conftest import bench_of, measured_at

# Of the loop, entered alike whatever trains: once per rollout; once per run and step, or oftener.
PER_ROLLOUT = (trainer.iterate, collect.collect)
PER_RUN = (rollout_receipts.note_rollout, rollout_receipts.note_step, step.step_metrics)
OFTEN = (micro_batches.plan_step, micro_batches.split_by_tokens, loss.policy_loss)
# The passes of one policy by itself, and of an ensemble: once per step.
SINGLE = (step.accumulate_step, optimizers.scheduled_step)
STACKED = (stacked.StackedPolicies.backward, stacked.StackedPolicies.step)
WATCHED = (*PER_ROLLOUT, *PER_RUN, *OFTEN, *SINGLE, *STACKED, packed.packed_logprobs)


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


def require_the_trainers_steps(
    counted: Counter[CodeType], steps: int, *, runs: int = 1, together: bool = False
) -> None:
    def counts(functions: tuple[Any, ...]) -> list[int]:
        return [counted[function.__code__] for function in functions]

    assert counts(PER_ROLLOUT) == [steps] * 2
    assert counts(PER_RUN) == [steps * runs] * 3
    assert min(counts(OFTEN)) >= steps * runs
    assert counts(SINGLE) == [0 if together else steps] * 2
    assert counts(STACKED) == [steps if together else 0] * 2


def smoke_run(seed: int = 0, *, together: bool = False) -> RunConfig:
    data = dataclasses.replace(SMOKE.data, train_problems=16, test_problems=2)
    scale = dataclasses.replace(SMOKE, data=data, steps=2, prompts_per_rollout=2, together=together)
    return RunConfig(
        target="table1", target_version=1, tier="smoke", procedure="train", arm=BF16_LORA,
        scale=scale, seed=seed,
    )  # fmt: skip


def test_a_smoke_run_and_an_ensemble_take_the_trainers_step(tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "folder": tmp_path,
        "progress": lambda *a: None,
        "should_stop": lambda: False,
        "threads": 1,
    }
    counted = calls_in(lambda: procedure_named("train")(smoke_run(), **how))
    require_the_trainers_steps(counted, 2)
    runs = [smoke_run(seed, together=True) for seed in range(2)]
    counted = calls_in(lambda: train_together(runs, device="cpu", **how))
    require_the_trainers_steps(counted, 2, runs=2, together=True)


@pytest.mark.usefixtures("host_clock")
def test_a_measured_step_is_the_trainers_step(policy: Policy, pool: GraderPool) -> None:
    point = StepPoint(
        name="small", model="0.5b", prompts=2, group=2, prompt_tokens=20, completion_tokens=24,
        micro_tokens=100,
    )  # fmt: skip
    scale = StepScale(points=(point,), warm_up=1, warm_up_tokens=4, steps=2)
    counted = calls_in(lambda: measured_at(bench_of(scale, pool), NVFP4, point, policy))
    require_the_trainers_steps(counted, scale.warm_up + scale.steps)
    # Two micro-batches of two rows in a timed step, one in a warm-up; no pass beside them.
    assert counted[packed.packed_logprobs.__code__] == 2 * scale.steps + scale.warm_up
