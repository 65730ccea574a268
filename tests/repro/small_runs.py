"""For tests that train: runs of a small arm on the caller's scale, rewards by the text, one run."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.data.problem import Problem
from repro.evidence.procedure import RunContext
from repro.models.policy import Policy, load_policy, trainable_parameters
from repro.reward.score import Graded, GradingRequest
from repro.rl.collect import PromptSource, Score
from repro.rl.learner import learner_of
from repro.rl.trainer import Hooks, train
from repro.rl.training_state import TrainState
from repro.rollout.sampler import Sampler
from repro.spec.arm import Arm
from repro.spec.config import RunConfig, TrainScale, derive_seed


def context_of(folder: Path, **changes: Any) -> RunContext:
    """Return where a run is carried out that nobody watches or stops."""
    return RunContext(folder=folder, **({"threads": 1} | changes))


def small_run(
    scale: TrainScale, *, seed: int = 0, procedure: str = "train", **arm: Any
) -> RunConfig:
    """Return a smoke run, of no target, of an arm with LoRA of rank 4 and the named fields."""
    fields = {"name": "test", "label": "test", "lora_rank": 4, "lora_alpha": 8.0} | arm
    return RunConfig(
        target="test",
        target_version=1,
        tier="smoke",
        procedure=procedure,
        arm=Arm(**fields),
        scale=scale,
        seed=seed,
    )


def fresh_policy(checkpoint: str | Path, **settings: Any) -> Policy:
    """Return what `load_policy` does, a copy of the first such: a quarter of the time."""
    return copy.deepcopy(_loaded(checkpoint, **settings))


_loaded = functools.lru_cache(maxsize=64)(load_policy)


def weights(policy: Policy) -> dict[str, Tensor]:
    """Return copies of a policy's trainable tensors by name."""
    return {n: p.detach().clone() for n, p in trainable_parameters(policy).items()}


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two sets of tensors are the same to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def request_of(text: str, gold: str, seed: int = 0, *, cut: bool = False) -> GradingRequest:
    """Return a request for a completion of a problem with this gold."""
    problem = Problem(id="p", question="?", answer=gold)
    return GradingRequest(text=text, problem=problem, seed=seed, cut=cut)


def rewards_of(requests: Sequence[GradingRequest], accuracy: list[float | None]) -> list[Graded]:
    """Return rewards of these accuracies; the format of about half the texts is right."""
    graded = []
    for request, right in zip(requests, accuracy, strict=True):
        form = float(derive_seed(request.text, "format") % 2)
        paid = (right or 0.0) + 0.2 * form
        row = Graded(accuracy=right, reward=paid, unshaped=paid, lenient=right, format=form)
        graded.append(row)
    return graded


def train_alone(
    run: RunConfig,
    policy: Policy,
    sampler: Sampler,
    problems: Sequence[Problem],
    score: Score,
    *,
    folder: Path,
    **hooks: Any,
) -> TrainState:
    """Train a policy; `hooks` are fields of `Hooks`."""
    source = PromptSource(problems, policy.tokenizer, run)
    learner = learner_of(run, policy, sampler)
    return train(learner, source, score, Hooks(**hooks), folder=folder)
