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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from repro.data.problem import Problem
from repro.data.prompts import opening_of, read_texts, render_within
from repro.reward.score import Graded, GradingRequest
from repro.rl.advantage import Advantages, group_advantages, overlong_penalty
from repro.rl.clock import Clock
from repro.rl.rows import Rows, make_rows, mean_of
from repro.spec.config import RunConfig, TrainScale, derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from repro.rollout.sampler import Completion, Sampler

# Completions that a rollout shows of those sampled.
EXAMPLES = 3


Score = Callable[[Sequence[GradingRequest]], Sequence[Graded]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """B scored completions, ready for updates.

    Attributes
    ----------
    graded
        B values.
    batches, tokens_sampled
        Batches of problems and tokens sampled, including those that were discarded.
    informative
        Share of the sampled groups that are informative (see the module docstring).
    accuracy_sampled, lenient_sampled
        Share of correct completions among all sampled ones, including discarded groups, by strict
        and lenient grading; None if none could be graded.
    mixed
        Groups of the B rows with different rewards before any shaping; 0 where all is cut off.
    all_cut_off
        Whether overlong filtering leaves no row to train on.
    examples
        Token ids of the first completions sampled.
    """

    rows: Rows
    advantages: Advantages
    graded: list[Graded]
    batches: int
    tokens_sampled: int
    informative: float
    accuracy_sampled: float | None = None
    lenient_sampled: float | None = None
    mixed: int = 0
    all_cut_off: bool = False
    examples: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A completion that was sampled with a seed, graded and rewarded."""

    seed: int
    completion: Completion
    graded: Graded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A prompt and its G rows."""

    prompt: list[int]
    rows: list[_Row]


class PromptSource:
    """Problems in the run's order, rendered as prompts when first needed.

    Raises `ValueError` if there are fewer problems than a rollout takes, or if two share an id.
    """

    def __init__(
        self, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, run: RunConfig
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
        self._prompts: dict[str, list[int]] = {}
        self._order: tuple[int, list[int]] = (-1, [])

    def draw(self, batch: int) -> list[Problem]:
        """Return the problems of the batch counted from 0; the rest of an epoch is left out."""
        epoch, place = divmod(batch, len(self.problems) // self.size)
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
        openings = [opening_of(prompt, self.tokenizer) for prompt in prompts]
        return read_texts([own.token_ids for own in completions], openings, self.tokenizer)


def order_of_epoch(seed: int, epoch: int, count: int) -> list[int]:
    """Return the order in which a run of this seed goes through `count` problems in an epoch."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "problems", epoch))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


class GrowingRollout:
    """A rollout that grows by batches of problems, which are sampled and graded.

    It starts at an optimiser step, counted from 0, with `draws` batches of problems drawn before.
    """

    def __init__(self, run: RunConfig, source: PromptSource, *, step: int, draws: int) -> None:
        self.run, self.source, self.step = run, source, step
        self._draws, self._batches, self._informative, self._tokens = draws, 0, 0, 0
        self._groups: list[_Group] = []
        # Of all rows sampled, those of discarded groups, too
        self._graded: list[Graded] = []
        self._examples: list[tuple[int, ...]] = []
        # Of a batch that is not taken yet: prompts, seeds, and completions once they are sampled
        self._prompts: list[list[int]] = []
        self._seeds: list[int] = []
        self._sampled: Sequence[Completion] = ()

    @property
    def complete(self) -> bool:
        """Whether the rollout needs no further batch."""
        scale: TrainScale = self.run.scale
        full = len(self._groups) == scale.prompts_per_rollout
        return full or self._batches >= max(self.run.arm.loss.dynamic_sampling, 1)

    def grow(self, sampler: Sampler, score: Score, clock: Clock) -> None:
        """Sample and grade the next batch, marking the clock after both; see `collect`."""
        group_size = self.run.scale.group_size
        problems = self.source.draw(self._draws)
        again = () if self._batches == 0 else ("again", self._batches)
        self._prompts = [self.source.prompt(problem) for problem in problems]
        self._seeds = [
            derive_seed(self.run.seed, "rollout", self.step, *again, problem.id, k)
            for problem in problems
            for k in range(group_size)
        ]
        self._sampled = sampler.sample(
            self._prompts, self.run.rollout, group_size=group_size, seeds=self._seeds
        )
        clock.mark("rollout")
        texts = self.source.texts(self._sampled, self._prompts)
        of_rows = [problem for problem in problems for _ in range(group_size)]
        rows = zip(texts, of_rows, self._seeds, self._sampled, strict=True)
        graded = score(
            [
                GradingRequest(
                    text=text, problem=problem, seed=seed, cut=own.finish_reason == "length"
                )
                for text, problem, seed, own in rows
            ]
        )
        clock.mark("reward")
        self._take(graded)

    def _take(self, graded: Sequence[Graded]) -> None:
        """Take the graded batch; dynamic sampling keeps its informative groups."""
        scale: TrainScale = self.run.scale
        groups = self._scored(graded)
        self._draws, self._batches = self._draws + 1, self._batches + 1
        self._tokens += sum(len(completion.token_ids) for completion in self._sampled)
        self._graded += [row.graded for group in groups for row in group.rows]
        room = EXAMPLES - len(self._examples)
        self._examples += [tuple(completion.token_ids) for completion in self._sampled[:room]]
        arm = self.run.arm
        other = arm.loss.dynamic_sampling > 0 and arm.reward != "task"
        by_reward = other or arm.reward_function is not None
        informative = _informative(groups, "unshaped" if by_reward else "accuracy")
        self._informative += len(informative)
        kept = informative if self.run.arm.loss.dynamic_sampling else groups
        self._groups += kept[: scale.prompts_per_rollout - len(self._groups)]
        self._prompts, self._seeds, self._sampled = [], [], ()

    def _scored(self, graded: Sequence[Graded]) -> list[_Group]:
        """Return the batch's groups, rewards shaped by length."""
        scale: TrainScale = self.run.scale
        limit, buffer = scale.rollout.max_new_tokens, self.run.arm.loss.overlong_buffer
        rows = []
        for completion, seed, one in zip(self._sampled, self._seeds, graded, strict=True):
            length = len(completion.token_ids)
            penalty = overlong_penalty(length, max_new_tokens=limit, buffer=buffer)
            shaped = None if one.unshaped is None else one.unshaped + penalty
            own = replace(one, reward=shaped)
            rows.append(_Row(seed=seed, completion=completion, graded=own))
        size = scale.group_size
        return [
            _Group(prompt=prompt, rows=rows[place * size : (place + 1) * size])
            for place, prompt in enumerate(self._prompts)
        ]

    def batch(self) -> dict[str, Tensor]:
        """Return the rows taken so far, in their order, then those not sampled or scored yet.

        `prompts`, `completions` (int64) and `sampled_logprobs` (float64) are those of P prompts and
        B rows one after another, `prompt_tokens` (P,) and `completion_tokens` (B,) how many are
        whose; `seeds` (B,) int64; `rewards` (B,) float64, NaN where there is none. Of rows not
        sampled there are seeds alone.
        """
        taken = [row for group in self._groups for row in group.rows]
        prompts = [group.prompt for group in self._groups] + self._prompts
        seeds = [row.seed for row in taken] + self._seeds
        completions = [*(row.completion for row in taken), *self._sampled]
        rewards = [row.graded.reward for row in taken] + [None] * len(self._sampled)
        whole = partial(torch.tensor, dtype=torch.int64)
        real = partial(torch.tensor, dtype=torch.float64)
        return {
            "prompts": whole([token for prompt in prompts for token in prompt]),
            "prompt_tokens": whole([len(prompt) for prompt in prompts]),
            "completions": whole([token for one in completions for token in one.token_ids]),
            "completion_tokens": whole([len(one.token_ids) for one in completions]),
            "sampled_logprobs": real([v for one in completions for v in one.sampled_logprobs]),
            "seeds": whole(seeds),
            "rewards": real([math.nan if reward is None else reward for reward in rewards]),
        }

    def rollout(self) -> Rollout:
        """Return the complete rollout, with advantages."""
        scale: TrainScale = self.run.scale
        loss, rows = self.run.arm.loss, [row for group in self._groups for row in group.rows]
        graded = [row.graded for row in rows]
        as_rows = make_rows(
            [group.prompt for group in self._groups],
            [row.completion for row in rows],
            group_size=scale.group_size,
        )
        all_cut_off = loss.mask_truncated and bool(rows) and bool(as_rows.truncated.all())
        return Rollout(
            rows=as_rows,
            advantages=group_advantages(
                [one.reward for one in graded],
                [place for place, group in enumerate(self._groups) for _ in group.rows],
                scale_by_std=loss.scale_by_std,
                epsilon=loss.advantage_epsilon,
            ),
            graded=graded,
            batches=self._batches,
            tokens_sampled=self._tokens,
            informative=self._informative / (self._batches * scale.prompts_per_rollout),
            accuracy_sampled=mean_of([one.accuracy for one in self._graded]),
            lenient_sampled=mean_of([one.lenient for one in self._graded]),
            mixed=0 if all_cut_off else len(_informative(self._groups, "unshaped")),
            all_cut_off=all_cut_off,
            examples=tuple(self._examples),
        )


def _informative(groups: Sequence[_Group], by: Literal["unshaped", "accuracy"]) -> list[_Group]:
    """Return the groups whose rows differ in a value; None, of rows without one, does not count.

    By accuracy the expected share of groups is 1 - p^G - (1-p)^G. The shaped reward would keep
    groups that differ in length or tags alone.
    """
    values = [{getattr(row.graded, by) for row in group.rows} - {None} for group in groups]
    return [group for group, own in zip(groups, values, strict=True) if len(own) >= 2]


def collect(growing: GrowingRollout, sampler: Sampler, score: Score, clock: Clock) -> Rollout:
    """Return the rollout that an empty one grows to.

    `sampler` samples from the current policy, including added noise. The clock is marked after each
    batch's sampling and after its grading.
    """
    while not growing.complete:
        growing.grow(sampler, score, clock)
    return growing.rollout()


def loss_mask(rollout: Rollout, *, mask_truncated: bool) -> Tensor:
    """Return (B, T) bool: the tokens that count in the loss's numerator and denominator.

    Rows without a reward do not count, and with overlong filtering neither do truncated rows.
    """
    counting = rollout.advantages.scored.clone()
    if mask_truncated:
        counting &= ~rollout.rows.truncated
    return rollout.rows.mask & counting[:, None]
