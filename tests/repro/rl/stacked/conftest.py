"""Small runs on the packaged tiny policy, trained one by one and together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.data.load import load_problems
from repro.data.problem import Problem
from repro.models.policy import Policy, end_token_ids, trainable_parameters
from repro.reward.score import Rewards
from repro.rl.collect import PromptSource, Score
from repro.rl.loop import Hooks
from repro.rl.single_run.torch_sampler import TorchSampler
from repro.rl.stacked.masters import Masters, plain_name
from repro.rl.stacked.stack import Stack, stack_policies
from repro.rl.stacked.stacked_policies import StackedPolicies
from repro.rl.stacked.stacked_sampler import StackedSampler
from repro.rl.trainer import train
from repro.spec.config import (
    DataConfig,
    LearningRates,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TrainScale,
    derive_seed,
)
from tests.repro.small_runs import fresh_policy, rewards_of, run_by_run, small_run, train_alone

DATA = DataConfig(
    source="generated", levels=(1,), train_problems=24, development_problems=6, test_problems=8
)
SCALE = TrainScale(
    checkpoint="tiny",
    data=DATA,
    steps=3,
    prompts_per_rollout=3,
    group_size=4,
    max_prompt_tokens=200,
    rollout=SamplingConfig(max_new_tokens=12),
    optimizer=OptimizerConfig(
        learning_rates=LearningRates(lora_16bit=1e-3, lora_4bit=2e-3, full=1e-4), warmup_steps=2
    ),
    prompt_template="tiny",
    checkpoint_every=100,
)

# Padded tokens of one group at most, and of two: of prompts of 22 to 31 tokens and four completions
# of up to 12 a group takes 56 to 96.
ONE_GROUP, TWO_GROUPS = 111, 192


def make_run(*, seed: int = 0, scale: TrainScale = SCALE, **arm: Any) -> RunConfig:
    """Return a run of an arm given by its fields."""
    return small_run(scale, seed=seed, **arm)


def load(run: RunConfig) -> Policy:
    """Return the run's policy, fresh."""
    arm = run.arm
    return fresh_policy(
        run.scale.checkpoint,
        weight_format=arm.weight_format,
        training=arm.training,
        lora_rank=arm.lora_rank,
        lora_alpha=arm.lora_alpha,
        norms_trained=arm.norms_trained,
        seed=run.seed,
    )


def stack_of(runs: Sequence[RunConfig]) -> Stack:
    """Return the runs' fresh policies as a stack."""
    policies = [load(run) for run in runs]
    return stack_policies(policies, end_token_ids=end_token_ids(policies[0]), device="cpu")


def positions(run: RunConfig) -> int:
    """Return the longest prompt and completion together."""
    scale = run.scale
    return int(scale.max_prompt_tokens + scale.rollout.max_new_tokens)


def score(texts: Sequence[str], golds: Sequence[str], seeds: Sequence[int]) -> Rewards:
    """Reward by the text alone: about half right, whatever it says."""
    accuracy: list[float | None] = [float(derive_seed(text, "right") % 2) for text in texts]
    return rewards_of(texts, accuracy)


def parameters_of_run(
    masters: Masters, run: int, values: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Return one run's parameters by plain name, without padding, as views.

    Parameters
    ----------
    values
        (S, n) to look into in place of the parameters themselves.
    """
    source = masters.values if values is None else values
    parameters: dict[str, torch.Tensor] = {}
    begin = 0
    for name, leaf in masters.leaves.items():
        count = leaf[0].numel()
        # (count,) -> the padded shape
        whole = source[run, begin : begin + count].view(leaf.shape[1:])
        parameters[name] = whole[tuple(slice(size) for size in masters.shapes[run][name])]
        begin += count
    return parameters


score_together = run_by_run(score)


@dataclass
class Trained:
    """A run's result and the parameters that it ended with, by plain name."""

    result: Any
    parameters: dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def problems() -> list[Problem]:
    return load_problems(DATA, "train")


@pytest.fixture
def alone(problems: list[Problem], tmp_path: Path) -> Callable[..., Trained]:
    """Return a function that trains one run by itself."""

    def start(
        run: RunConfig, *, folder: str | None = None, score: Any = score, **hooks: Any
    ) -> Trained:
        policy, where = load(run), tmp_path / (folder or f"alone-{run.digest()}")
        result = train_alone(
            run, policy, TorchSampler(policy), problems, score, folder=where, **hooks
        )
        computed = trainable_parameters(policy)
        return Trained(result, {plain_name(n): p.detach() for n, p in computed.items()})

    return start


@pytest.fixture
def together(problems: list[Problem], tmp_path: Path) -> Callable[..., list[Trained]]:
    """Return a function that trains runs as one ensemble."""

    def start(
        runs: Sequence[RunConfig], *, folder: str = "together", tokens_at_once: int = TWO_GROUPS,
        prepare: Callable[[Stack], None] | None = None, score: Score = score_together,
        **hooks: Any,
    ) -> list[Trained]:  # fmt: skip
        stack = stack_of(runs)
        if prepare is not None:
            prepare(stack)
        sampler = StackedSampler(stack, positions(runs[0]))
        results = train(
            StackedPolicies(runs, stack, sampler, tokens_at_once),
            [PromptSource(problems, stack.tokenizer, run) for run in runs],
            score,
            Hooks(**hooks),
            folder=tmp_path / folder,
        )
        assert stack.masters is not None
        masters = stack.masters
        return [Trained(r, parameters_of_run(masters, s)) for s, r in enumerate(results)]

    return start


def with_steps(scale: TrainScale, **changes: Any) -> TrainScale:
    """Return the scale with fields changed."""
    return dataclasses.replace(scale, **changes)
