"""What measured steps need on a CPU: a clock, a small policy, graders."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from repro.measure.step_measure import Bench, _measure, engine_config, step_shape
from repro.measure.step_metrics import PointResult
from repro.measure.step_training import training_of
from repro.models.policy import Policy
from repro.models.random_policy import random_policy
from repro.reward.grader import GraderPool
from repro.rl import learner as learner_module
from repro.rl.trainer import Training
from repro.rl.training_state import TrainState, fresh_state
from repro.rollout.engine import Engine
from repro.spec.step_scale import StepArm, StepPoint, StepScale
from repro.targets.steps import NVFP4
from tests.repro.architectures import qwen2_shape

SHAPE = qwen2_shape(64, layers=2, vocabulary=2048) | {"max_position_embeddings": 512}
POINT = StepPoint(
    name="small", model="0.5b", prompts=2, group=2, prompt_tokens=20, completion_tokens=24,
)  # fmt: skip


def prepared(
    policy: Policy, pool: GraderPool, point: StepPoint, arm: StepArm = NVFP4
) -> tuple[Training, TrainState, Engine]:
    """Return a training at a point before its first step, and its engine."""
    scale = StepScale(points=(point,), warm_up=1, steps=3)
    planned = step_shape(point, NVFP4, scale, 10**10)
    engine = Engine(policy, engine_config(point, planned))
    t = training_of(
        policy, engine, pool, arm, point, scale, seed=0, micro_tokens=planned.micro_tokens
    )
    return t, fresh_state(t.learner.run), engine


def bench_of(scale: StepScale, **changes: Any) -> Bench:
    """Return a bench without results."""
    settings: dict[str, Any] = {"seed": 0, "should_stop": lambda: False} | changes
    return Bench(scale=scale, **settings)


def measured_at(bench: Bench, arm: StepArm, point: StepPoint, policy: Policy) -> PointResult:
    """Measure a point where there is no device that memory could be planned for."""
    entry = PointResult()
    _measure(bench, arm, point, policy, 10**10, entry)
    return entry


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows by what each update was asked and planned."""
    seen, plain = list[Any](), learner_module.accumulate_step

    def watched(policy: Policy, part: Any, *given: Any, **named: Any) -> Any:
        output, tokens = plain(policy, part, *given, **named)
        lengths = part.rollout.rows.lengths()[part.index].tolist()
        seen.append(SimpleNamespace(lengths=lengths, plan=output.plan, old=part.old))
        return output, tokens

    monkeypatch.setattr(learner_module, "accumulate_step", watched)
    return seen


class HostEvent:
    """A device event's stand-in that reads the host's clock."""

    def __init__(self, **settings: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        """Take the time."""
        self.at = time.perf_counter()

    def elapsed_time(self, later: HostEvent) -> float:
        """Return milliseconds."""
        return (later.at - self.at) * 1e3


@pytest.fixture
def host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)


def small_policy(weight_format: str = "nvfp4", lora_rank: int = 16, **sizes: int) -> Policy:
    """Return a float32 policy of `SHAPE`, perhaps with other sizes, on the CPU."""
    how: dict[str, Any] = {"compute_dtype": "float32", "seed": 0, "device": "cpu"}
    return random_policy(SHAPE | sizes, weight_format=weight_format, lora_rank=lora_rank, **how)


@pytest.fixture
def policy() -> Policy:
    return small_policy()
