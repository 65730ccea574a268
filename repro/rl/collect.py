"""Rollouts: problems, seeds, completions, rewards and advantages.

The order of problems depends only on the run's seed, so all arms of a seed have the same problems
at the same step. The seed of each completion depends on (run seed, step, problem, k), so arms also
have common random numbers. Adding noise to an arm changes neither.

Dynamic sampling (DAPO) draws further batches of problems while too few groups are informative, at
most `dynamic_sampling` batches per step, and then continues with what there is. A group is
informative if its *accuracy* varies: under the task's reward, which pays for the format as well,
and wherever nothing is discarded. Under another reward, a user's own among them, dynamic sampling
keeps the groups in which that reward varies before any shaping. Discarded problems are counted too:
otherwise a comparison by steps would be unfair to an arm without dynamic sampling.

Runs that train together are sampled and graded together, batch by batch, until each is complete. A
run that needs no further batch idles and draws no random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from repro.data.problem import Problem
from repro.data.prompts import read_texts, render_within
from repro.reward.score import Rewards
from repro.rl.advantage import (
    Advantages,
    group_advantages,
    informative_groups,
    overlong_penalty,
)
from repro.rl.clock import Clock
from repro.rl.diagnostics import mean_of
from repro.rl.rows import Rows, make_rows
from repro.rl.runs import RunStates
from repro.spec.config import RunConfig, TrainScale, derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from repro.rollout.sampler import Completion

# Completions that a rollout shows of those sampled.
EXAMPLES = 3
# Texts, golds and seeds of one run's completions, which of them were cut, and their problems.
GradingRequest = tuple[
    Sequence[str], Sequence[str], Sequence[int], Sequence[bool], Sequence[Problem]
]
# Their rewards; one entry per run, None for those that idle.
Score = Callable[[Sequence[GradingRequest | None]], Sequence[Rewards | None]]
# Each run's completions of what it asks.
Sample = Callable[[Sequence["BatchRequest | None"]], Sequence["Sequence[Completion] | None"]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """B scored completions, ready for updates.

    Attributes
    ----------
    reward
        B values from which the advantages are computed, including shaping.
    batches, groups_drawn, tokens_sampled
        Batches of problems, groups and tokens sampled, including those that were discarded.
    informative
        Share of the sampled groups that are informative (see the module docstring).
    accuracy_sampled, lenient_sampled
        Share of correct completions among all sampled ones, including discarded groups, by strict
        and lenient grading; None if none could be graded.
    lenient, golds
        B values each: accuracy by lenient grading, and the gold answers.
    mixed
        Groups of the B rows with different rewards before any shaping; 0 where all is cut off.
    all_cut_off
        Whether overlong filtering leaves no row to train on.
    examples
        Token ids of the first completions sampled.
    """

    rows: Rows
    advantages: Advantages
    reward: list[float | None]
    accuracy: list[float | None]
    format: list[float]
    batches: int
    groups_drawn: int
    tokens_sampled: int
    informative: float
    accuracy_sampled: float | None = None
    lenient_sampled: float | None = None
    lenient: list[float | None] = field(default_factory=list)
    golds: list[str] = field(default_factory=list)
    mixed: int = 0
    all_cut_off: bool = False
    examples: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True, kw_only=True)
class _Drawn:
    """A rollout's prompts by group, and growing columns of it, one entry per row."""

    prompts: list[list[int]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    reward: list[float | None] = field(default_factory=list)
    paid: list[float | None] = field(default_factory=list)  # before any shaping
    accuracy: list[float | None] = field(default_factory=list)
    lenient: list[float | None] = field(default_factory=list)
    format: list[float] = field(default_factory=list)
    golds: list[str] = field(default_factory=list)


class Prompts(Protocol):
    """Source of a rollout's prompts, and reader of its completions."""

    def draw(self, batch: int) -> list[Problem]:
        """Return the P problems of the batch counted from 0, ids unique."""
        ...

    def prompt(self, problem: Problem) -> list[int]:
        """Return the token ids of a problem's prompt."""
        ...

    def texts(
        self, completions: Sequence[Completion], prompts: Sequence[Sequence[int]]
    ) -> list[str]:
        """Return the texts of completions of P prompts, prompt-major, for the graders."""
        ...


class PromptSource:
    """Problems in the run's order, rendered as prompts when first needed.

    `prompts` caches prompts by problem id; runs of one scale that train together share it.

    Raises `ValueError` if there are fewer problems than a rollout takes, or if two share an id.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        tokenizer: PreTrainedTokenizerBase,
        run: RunConfig,
        prompts: dict[str, list[int]] | None = None,
    ) -> None:
        scale: TrainScale = run.scale
        self.size = scale.prompts_per_rollout
        if len(problems) < self.size:
            raise ValueError(
                f"there are {len(problems)} training problems; a rollout takes {self.size}"
            )
        if len({problem.id for problem in problems}) != len(problems):
            raise ValueError("two training problems share an id; ids must be unique")
        self.problems = problems
        self.tokenizer = tokenizer
        self._seed = run.seed
        self._template = scale.prompt_template
        self._longest = scale.max_prompt_tokens
        self._prompts: dict[str, list[int]] = {} if prompts is None else prompts
        self._order: tuple[int, list[int]] = (-1, [])

    def draw(self, batch: int) -> list[Problem]:
        """Return the problems of the batch counted from 0; the rest of an epoch is left out."""
        per_epoch = len(self.problems) // self.size
        epoch, place = divmod(batch, per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, order_of_epoch(self._seed, epoch, len(self.problems)))
        indices = self._order[1][place * self.size : (place + 1) * self.size]
        return [self.problems[index] for index in indices]

    def prompt(self, problem: Problem) -> list[int]:
        """Return a problem's prompt; raises `ValueError` naming one that is too long."""
        if problem.id not in self._prompts:
            prompt = render_within(problem, self._template, self.tokenizer, self._longest)
            self._prompts[problem.id] = prompt
        return self._prompts[problem.id]

    def texts(
        self, completions: Sequence[Completion], prompts: Sequence[Sequence[int]]
    ) -> list[str]:
        """Return the texts of completions of P prompts, prompt-major, for the graders."""
        return read_texts([own.token_ids for own in completions], prompts, self.tokenizer)


def order_of_epoch(seed: int, epoch: int, count: int) -> list[int]:
    """Return the order in which a run of this seed goes through `count` problems in an epoch."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "problems", epoch))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """One batch of problems for a sampler and a grader: P prompts, and P * G golds and seeds.

    Golds and seeds are prompt-major, and so are `problems`, each G times.
    """

    prompts: list[list[int]]
    golds: list[str]
    seeds: list[int]
    problems: list[Problem]


class GrowingRollout:
    """A rollout that grows by batches, which the caller samples and grades.

    It starts at an optimiser step, counted from 0, with `draws` batches of problems drawn before.
    """

    def __init__(self, run: RunConfig, source: Prompts, *, step: int, draws: int) -> None:
        self.run, self.source, self.step = run, source, step
        self._draws, self._batches, self._informative, self._tokens = draws, 0, 0, 0
        self._accuracy: list[float | None] = []
        self._lenient: list[float | None] = []
        self._examples: list[tuple[int, ...]] = []
        # The batch asked for last, with what is known of it, until `add` takes it.
        self._collected, self.latest = _Drawn(), _Drawn()

    @property
    def complete(self) -> bool:
        """Whether the rollout needs no further batch."""
        scale: TrainScale = self.run.scale
        full = len(self._collected.prompts) == scale.prompts_per_rollout
        return full or self._batches >= max(self.run.arm.loss.dynamic_sampling, 1)

    def request(self) -> BatchRequest:
        """Return the next batch to sample; the same until `add` takes it."""
        group_size = self.run.scale.group_size
        problems = self.source.draw(self._draws)
        again = () if self._batches == 0 else ("again", self._batches)
        request = BatchRequest(
            prompts=[self.source.prompt(problem) for problem in problems],
            golds=[problem.answer for problem in problems for _ in range(group_size)],
            problems=[problem for problem in problems for _ in range(group_size)],
            seeds=[
                derive_seed(self.run.seed, "rollout", self.step, *again, problem.id, k)
                for problem in problems
                for k in range(group_size)
            ],
        )
        self.latest = _Drawn(prompts=request.prompts, seeds=request.seeds)
        return request

    def add(
        self, request: BatchRequest, completions: Sequence[Completion], rewards: Rewards
    ) -> None:
        """Take a sampled and graded batch; dynamic sampling keeps its informative groups."""
        scale: TrainScale = self.run.scale
        loss, limit = self.run.arm.loss, scale.rollout.max_new_tokens
        reward = [
            None
            if value is None
            else value
            + overlong_penalty(
                len(completion.token_ids), max_new_tokens=limit, buffer=loss.overlong_buffer
            )
            for value, completion in zip(rewards.total, completions, strict=True)
        ]
        drawn = _Drawn(
            prompts=request.prompts,
            seeds=request.seeds,
            completions=list(completions),
            reward=reward,
            paid=list(rewards.total),
            accuracy=list(rewards.accuracy),
            lenient=list(rewards.lenient_accuracy),
            format=list(rewards.format),
            golds=request.golds,
        )
        self._draws, self._batches = self._draws + 1, self._batches + 1
        self._tokens += sum(len(completion.token_ids) for completion in completions)
        self._accuracy += rewards.accuracy
        self._lenient += rewards.lenient_accuracy
        room = EXAMPLES - len(self._examples)
        self._examples += [tuple(completion.token_ids) for completion in completions[:room]]
        group_ids = _group_ids(len(drawn.prompts), scale.group_size)
        arm = self.run.arm
        other = loss.dynamic_sampling > 0 and arm.reward != "task"
        by_reward = other or arm.reward_function is not None
        informative = informative_groups(drawn.paid if by_reward else drawn.accuracy, group_ids)
        self._informative += len(informative)
        every = list(range(len(drawn.prompts)))
        room = scale.prompts_per_rollout - len(self._collected.prompts)
        groups = (informative if loss.dynamic_sampling else every)[:room]
        _append(self._collected, drawn, groups, scale.group_size)
        self.latest = _Drawn()

    def batch(self) -> dict[str, Tensor]:
        """Return the rows taken so far, in their order, then those not sampled or scored yet.

        `prompts`, `completions` (int64) and `sampled_logprobs` (float64) are those of P prompts and
        B rows one after another, `prompt_tokens` (P,) and `completion_tokens` (B,) how many are
        whose; `seeds` (B,) int64; `rewards` (B,) float64, NaN where there is none. Of rows not
        sampled there are seeds alone.
        """
        both = (self._collected, self.latest)
        prompts = [prompt for drawn in both for prompt in drawn.prompts]
        rows = [row for drawn in both for row in drawn.completions]
        rewards = self._collected.reward + [None] * len(self.latest.completions)
        whole = partial(torch.tensor, dtype=torch.int64)
        real = partial(torch.tensor, dtype=torch.float64)
        return {
            "prompts": whole([token for prompt in prompts for token in prompt]),
            "prompt_tokens": whole([len(prompt) for prompt in prompts]),
            "completions": whole([token for row in rows for token in row.token_ids]),
            "completion_tokens": whole([len(row.token_ids) for row in rows]),
            "sampled_logprobs": real([value for row in rows for value in row.sampled_logprobs]),
            "seeds": whole([seed for drawn in both for seed in drawn.seeds]),
            "rewards": real([math.nan if reward is None else reward for reward in rewards]),
        }

    def rollout(self) -> Rollout:
        """Return the complete rollout, with advantages."""
        scale: TrainScale = self.run.scale
        loss, collected = self.run.arm.loss, self._collected
        drawn = self._batches * scale.prompts_per_rollout
        group_ids = _group_ids(len(collected.prompts), scale.group_size)
        advantages = group_advantages(
            collected.reward,
            group_ids,
            scale_by_std=loss.scale_by_std,
            epsilon=loss.advantage_epsilon,
        )
        rows = make_rows(
            collected.prompts,
            collected.completions,
            group_size=scale.group_size,
        )
        all_cut_off = loss.mask_truncated and bool(rows.truncated.all()) and len(rows) > 0
        mixed = 0 if all_cut_off else len(informative_groups(collected.paid, group_ids))
        return Rollout(
            rows=rows,
            advantages=advantages,
            reward=collected.reward,
            accuracy=collected.accuracy,
            format=collected.format,
            batches=self._batches,
            groups_drawn=drawn,
            tokens_sampled=self._tokens,
            informative=self._informative / drawn,
            accuracy_sampled=mean_of(self._accuracy),
            lenient_sampled=mean_of(self._lenient),
            lenient=collected.lenient,
            golds=collected.golds,
            mixed=mixed,
            all_cut_off=all_cut_off,
            examples=tuple(self._examples),
        )


def collect(
    growing: Sequence[GrowingRollout],
    state: RunStates,
    sample: Sample,
    score: Score,
    clock: Clock,
) -> list[Rollout | None]:
    """Return the rollout of every live run; a run for which that fails has failed.

    `growing` has an empty rollout per run. `sample` samples from each run's current policy,
    including added noise. The clock is marked after each batch's sampling and after its grading.
    """
    while True:
        asked = state.each(lambda s: None if growing[s].complete else growing[s].request())
        if not any(request is not None for request in asked):
            return state.each(lambda s: growing[s].rollout())
        _add_batch(growing, asked, state, sample, score, clock)


def _add_batch(
    growing: Sequence[GrowingRollout],
    asked: Sequence[BatchRequest | None],
    state: RunStates,
    sample: Sample,
    score: Score,
    clock: Clock,
) -> None:
    """Sample and score a batch for the runs that need one; the others idle."""
    sampled = sample(asked)
    clock.mark("rollout")
    rewards = score([_asked(*one) for one in zip(growing, asked, sampled, strict=True)])
    clock.mark("reward")
    state.each(lambda s: _take(growing[s], asked[s], sampled[s], rewards[s]))


def _asked(
    growing: GrowingRollout,
    request: BatchRequest | None,
    completions: Sequence[Completion] | None,
) -> GradingRequest | None:
    if request is None or completions is None:
        return None
    growing.latest.completions = list(completions)
    cut = [completion.finish_reason == "length" for completion in completions]
    texts = growing.source.texts(completions, request.prompts)
    return texts, request.golds, request.seeds, cut, request.problems


def _take(
    growing: GrowingRollout,
    request: BatchRequest | None,
    completions: Sequence[Completion] | None,
    rewards: Rewards | None,
) -> None:
    if request is not None and completions is not None and rewards is not None:
        growing.add(request, completions, rewards)


def _append(collected: _Drawn, drawn: _Drawn, groups: Sequence[int], group_size: int) -> None:
    """Add the named groups of `drawn` to `collected`."""
    for group in groups:
        rows = slice(group * group_size, (group + 1) * group_size)
        collected.prompts.append(drawn.prompts[group])
        for column in fields(_Drawn)[1:]:
            getattr(collected, column.name).extend(getattr(drawn, column.name)[rows])


def _group_ids(groups: int, group_size: int) -> list[int]:
    return torch.arange(groups).repeat_interleave(group_size).tolist()


def loss_mask(rollout: Rollout, *, mask_truncated: bool) -> Tensor:
    """Return (B, T) bool: the tokens that count in the loss's numerator and denominator.

    Rows without a reward do not count, and with overlong filtering neither do truncated rows.
    """
    counting = rollout.advantages.scored.clone()
    if mask_truncated:
        counting &= ~rollout.rows.truncated
    return rollout.rows.mask & counting[:, None]
