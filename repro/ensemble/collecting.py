"""Rollouts of S runs: one sampling and one grading for all, until each run has what it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from repro.ensemble.checkpoint import EnsembleState
from repro.ensemble.sampler import SampleRequest, StackSampler
from repro.reward.score import Rewards
from repro.rl.collect import BatchRequest, GrowingRollout, Rollout
from repro.spec.config import TrainScale

# Texts, golds and seeds of one run's completions.
Asked = tuple[Sequence[str], Sequence[str], Sequence[int]]
# One entry a run, None for those that idle.
ScoreTogether = Callable[[Sequence[Asked | None]], Sequence[Rewards | None]]

# What a run may raise by itself; anything else is a fault of the program and ends all.
RUN_FAILURES = (ValueError, ArithmeticError)

Found = TypeVar("Found")


class Guard:
    """Does things for every live run, and freezes those for which they raise."""

    def __init__(self, state: EnsembleState) -> None:
        self._state = state

    @property
    def alive(self) -> list[bool]:
        """Which runs have not failed."""
        return [failure is None for failure in self._state.failures]

    def fail(self, run: int, error: Exception) -> None:
        """Freeze a run."""
        self._state.failures[run] = f"{type(error).__name__}: {error}"

    def each(self, work: Callable[[int], Found]) -> list[Found | None]:
        """Return `work(s)` of every live run, None for the others."""
        found: list[Found | None] = []
        for s, lives in enumerate(self.alive):
            value = None
            if lives:
                try:
                    value = work(s)
                except RUN_FAILURES as error:
                    self.fail(s, error)
            found.append(value)
        return found


def collect_together(
    growing: Sequence[GrowingRollout],
    guard: Guard,
    sampler: StackSampler,
    score: ScoreTogether,
    scale: TrainScale,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Rollout | None]:
    """Return every live run's rollout; a run that cannot have one is frozen.

    Parameters
    ----------
    growing
        One a run, empty so far.
    """
    while True:
        asked = guard.each(lambda s: None if growing[s].complete else growing[s].request())
        if not any(request is not None for request in asked):
            return guard.each(lambda s: growing[s].rollout())
        _round(growing, asked, guard, sampler, score, scale, tokenizer)


def _round(
    growing: Sequence[GrowingRollout],
    asked: Sequence[BatchRequest | None],
    guard: Guard,
    sampler: StackSampler,
    score: ScoreTogether,
    scale: TrainScale,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Sample and score one batch of the runs that ask for one; the others idle."""
    requests = [
        None if request is None else SampleRequest(prompts=request.prompts, seeds=request.seeds)
        for request in asked
    ]
    sampled = sampler.sample(requests, scale.rollout, group_size=scale.group_size)
    ids = [
        list(completion.token_ids)
        for batch in sampled
        if batch is not None
        for completion in batch.completions
    ]
    texts = iter(tokenizer.batch_decode(ids, skip_special_tokens=True))
    questions: list[Asked | None] = [
        None
        if request is None or batch is None
        else ([next(texts) for _ in batch.completions], request.golds, request.seeds)
        for request, batch in zip(asked, sampled, strict=True)
    ]
    rewards = score(questions)

    def add(s: int) -> None:
        request, batch, reward = asked[s], sampled[s], rewards[s]
        if request is not None and batch is not None and reward is not None:
            growing[s].add(request, batch.completions, reward)

    guard.each(add)
