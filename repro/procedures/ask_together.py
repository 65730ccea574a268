"""`repro.procedures.evaluate` for S runs at once: the same questions, seeds and grades.

All runs of an ensemble answer the same problems; a completion's seed follows from its own run's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from repro.data.problem import Problem
from repro.ensemble.collecting import Asked
from repro.ensemble.grouping import prompts_at_once
from repro.ensemble.sampler import SampleRequest, StackSampler
from repro.procedures.evaluate import (
    Answers,
    Question,
    answers_of,
    questions,
    seeds_of,
    with_opening,
)
from repro.reward.answers import extract_answer, lenient_answer
from repro.reward.grader import GraderPool
from repro.reward.score import Rewards, score
from repro.rollout.sampler import Completion
from repro.spec.config import RunConfig, SamplingConfig, TrainScale


class Board:
    """Asks and grades all runs of an ensemble, and keeps what each was graded as.

    Attributes
    ----------
    grades
        One dictionary a run: how many grades of each status it was given.
    """

    def __init__(self, runs: Sequence[RunConfig], sampler: StackSampler, pool: GraderPool) -> None:
        self.runs, self.sampler, self.pool = runs, sampler, pool
        self.scale: TrainScale = runs[0].scale
        self.tokenizer: Any = sampler.stack.tokenizer
        self.grades: list[dict[str, int]] = [{} for _ in runs]

    def greedy(
        self, problems: Sequence[Problem], alive: Sequence[bool], *, opening: str = ""
    ) -> list[Answers | None]:
        """Ask each live run once a problem, greedily."""
        limit = self.scale.evaluation.sampling.max_new_tokens
        sampling = SamplingConfig(temperature=0.0, max_new_tokens=limit)
        return self._ask(problems, alive, sampling, samples=1, opening=opening)

    def sampled(self, problems: Sequence[Problem], alive: Sequence[bool]) -> list[Answers | None]:
        """Ask each live run as the scale's evaluation says."""
        evaluation = self.scale.evaluation
        return self._ask(problems, alive, evaluation.sampling, samples=evaluation.samples)

    def score(self, asked: Sequence[Asked | None]) -> list[Rewards | None]:
        """Return the rewards of each run's completions, by its own arm's reward."""
        texts = [(gold, text) for one in asked if one for text, gold in zip(*one[:2], strict=True)]
        self._learn(texts)
        found: list[Rewards | None] = []
        for number, one in enumerate(asked):
            if one is None:
                found.append(None)
                continue
            before = dict(self.pool.counters)
            kind = self.runs[number].arm.reward
            found.append(score(one[0], one[1], kind, self.scale.format_reward, self.pool, one[2]))
            self._count(number, before)
        return found

    def _ask(
        self,
        problems: Sequence[Problem],
        alive: Sequence[bool],
        sampling: SamplingConfig,
        *,
        samples: int,
        opening: str = "",
    ) -> list[Answers | None]:
        asked = questions(
            problems,
            self.scale.prompt_template,
            self.tokenizer,
            max_prompt_tokens=self.scale.max_prompt_tokens,
            opening=opening,
        )
        texts: list[list[str]] = [[] for _ in self.runs]
        completions: list[list[Completion]] = [[] for _ in self.runs]
        # All runs' rows, idle ones included, are what the device holds.
        longest = max((len(question.prompt) for question in asked), default=1)
        size = prompts_at_once(len(self.runs), samples, longest)
        parts = -(-len(asked) // size)
        size = -(-len(asked) // parts)
        for begin in range(0, len(asked), size):
            part = asked[begin : begin + size]
            self._sample(part, alive, sampling, samples, into=(texts, completions))
        golds = [question.problem.answer for question in asked for _ in range(samples)]
        self._learn([pair for own in texts for pair in zip(golds, own, strict=False)])
        found: list[Answers | None] = []
        for number, lives in enumerate(alive):
            if not lives:
                found.append(None)
                continue
            before = dict(self.pool.counters)
            found.append(answers_of(texts[number], golds, completions[number], self.pool, samples))
            self._count(number, before)
        return found

    def _sample(
        self,
        part: Sequence[Question],
        alive: Sequence[bool],
        sampling: SamplingConfig,
        samples: int,
        *,
        into: tuple[list[list[str]], list[list[Completion]]],
    ) -> None:
        """Add each live run's completions of some questions, and their texts."""
        prompts = [with_opening(question, self.tokenizer) for question in part]
        requests = [
            SampleRequest(prompts=prompts, seeds=seeds_of(part, samples=samples, seed=run.seed))
            if lives
            else None
            for run, lives in zip(self.runs, alive, strict=True)
        ]
        batches = self.sampler.sample(requests, sampling, group_size=samples)
        openings = [question.opening for question in part for _ in range(samples)]
        for number, batch in enumerate(batches):
            if batch is None:
                continue
            ids = [list(completion.token_ids) for completion in batch.completions]
            decoded = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            into[0][number].extend(a + b for a, b in zip(openings, decoded, strict=True))
            into[1][number].extend(batch.completions)

    def _learn(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Let all workers grade what the runs' own grading will then find in memory."""
        strict = [(gold, extract_answer(text)) for gold, text in pairs]
        self.pool.learn(strict + [(gold, lenient_answer(text)) for gold, text in pairs])

    def _count(self, number: int, before: dict[str, int]) -> None:
        for status, count in self.pool.counters.items():
            added = count - before.get(status, 0)
            if added:
                self.grades[number][status] = self.grades[number].get(status, 0) + added
