"""Sampling answers to questions: from one policy, or from many at once, with the same interface.

The samplers read the tensors that were trained. An `Asker` samples from several policies at once
and returns a batch per run, None for idle runs; a single run is a list of one.

`SingleAsker` and `StackAsker` have different limits for a batch: rows of one sampler, or rows and
prompt tokens over all runs of a stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from repro.data.prompts import texts_of
from repro.evaluate.grades import Answers, answers_of
from repro.evaluate.questions import Question, seeds_of
from repro.reward.answers import READINGS, lenient_answer
from repro.reward.grader import GraderPool
from repro.rl.single_run.ranks import ALONE, Ranks, shared
from repro.rl.single_run.torch_sampler import TorchSampler
from repro.rl.stacked.grouping import EVALUATION_ROWS, prompts_at_once
from repro.rl.stacked.stacked_sampler import SampleRequest, StackedSampler
from repro.rollout.sampler import Completion, RolloutBatch, Sampler
from repro.spec.config import SamplingConfig

# Rows asked at once: of plain torch, which holds them all; of an engine, which lets rows enter as
# others end, so that few parts have a tail in which most slots are empty.
_ROWS_AT_ONCE, _ROWS_QUEUED = 256, 2048
Prompts = Sequence[Sequence[int]]


class Asker(Protocol):
    """Samples completions of the same prompts from each of several runs."""

    def prompts_at_once(self, samples: int, longest: int) -> int:
        """Return how many prompts of at most `longest` tokens each run gets at once."""
        ...

    def sample(
        self,
        prompts: Prompts,
        seeds: Sequence[Sequence[int] | None],
        sampling: SamplingConfig,
        *,
        group_size: int,
    ) -> list[RolloutBatch | None]:
        """Return each run's completions, drawn by its own seeds; None for runs without seeds."""
        ...


class SingleAsker:
    """One run with its own sampler, whose prompts `ranks` share."""

    def __init__(self, sampler: Sampler, ranks: Ranks = ALONE) -> None:
        rows = _ROWS_AT_ONCE if isinstance(sampler, TorchSampler) else _ROWS_QUEUED
        self._rows, self.sampler = rows * ranks.world, shared(sampler, ranks)

    def prompts_at_once(self, samples: int, longest: int) -> int:
        """Return the number of prompts asked at once, whatever their length."""
        del longest
        return max(1, self._rows // samples)

    def sample(
        self,
        prompts: Prompts,
        seeds: Sequence[Sequence[int] | None],
        sampling: SamplingConfig,
        *,
        group_size: int,
    ) -> list[RolloutBatch | None]:
        """Sample from the one run; see `Asker.sample`."""
        (own,) = seeds
        if own is None:
            return [None]
        return [self.sampler.sample(prompts, sampling, group_size=group_size, seeds=own)]


class StackAsker:
    """The runs of a batched model.

    Parameters
    ----------
    rows_at_once
        Largest number of rows of all runs together; idle runs have rows as well.
    share
        Fraction of an evaluation's rows and tokens that fits in memory at once.
    """

    def __init__(
        self, sampler: StackedSampler, rows_at_once: int = EVALUATION_ROWS, share: float = 1.0
    ) -> None:
        self.sampler, self.rows_at_once, self.share = sampler, rows_at_once, share

    def prompts_at_once(self, samples: int, longest: int) -> int:
        """Return how many prompts each run gets at once, limited by rows and tokens."""
        runs = self.sampler.stack.runs
        most = max(1, self.rows_at_once // (samples * runs))
        return min(most, prompts_at_once(runs, samples, longest, self.share))

    def sample(
        self,
        prompts: Prompts,
        seeds: Sequence[Sequence[int] | None],
        sampling: SamplingConfig,
        *,
        group_size: int,
    ) -> list[RolloutBatch | None]:
        """Sample from all runs at once; see `Asker.sample`."""
        requests = [
            None if own is None else SampleRequest(prompts=prompts, seeds=own) for own in seeds
        ]
        return self.sampler.sample(requests, sampling, group_size=group_size)


class Evaluator:
    """Samples and grades the answers of one or many runs.

    Parameters
    ----------
    seeds
        One per run; the seed of a completion derives from it, the problem and the sample.

    Attributes
    ----------
    grades
        One counter per run: its number of grades by status.
    on_part
        Told the share of the questions that is answered whenever some are; may raise to stop.
    """

    def __init__(
        self,
        asker: Asker,
        tokenizer: PreTrainedTokenizerBase,
        pool: GraderPool,
        seeds: Sequence[int],
        reads: str = "tags",
    ) -> None:
        self.reads = reads
        self.asker, self.tokenizer, self.pool = asker, tokenizer, pool
        self.seeds = list(seeds)
        self.on_part: Callable[[float], None] | None = None
        self.grades: list[Counter[str]] = [Counter() for _ in seeds]

    def ask(
        self,
        asked: Sequence[Question],
        sampling: SamplingConfig,
        *,
        samples: int,
        alive: Sequence[bool] | None = None,
    ) -> list[Answers | None]:
        """Sample `samples` completions of each question from each run and grade them.

        Of runs that are not `alive` the answers are None.
        """
        alive = [True] * len(self.seeds) if alive is None else alive
        completions = self._complete(asked, sampling, samples, alive)
        openings = [question.opening for question in asked for _ in range(samples)]
        texts = [self._texts(openings, own) for own in completions]
        golds = [question.problem.answer for question in asked for _ in range(samples)]
        self.learn([pair for own in texts if own for pair in zip(golds, own, strict=True)])
        answers: list[Answers | None] = []
        for number, lives in enumerate(alive):
            if not lives:
                answers.append(None)
                continue
            before = self.pool.counters.copy()
            own = texts[number], completions[number]
            answers.append(answers_of(asked, *own, self.pool, self.reads))
            self.count(number, before)
        return answers

    def learn(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Grade all (gold, text) pairs in parallel, so that grading each run finds them cached."""
        strict = [(gold, READINGS[self.reads].answer(text)) for gold, text in pairs]
        self.pool.learn(strict + [(gold, lenient_answer(text)) for gold, text in pairs])

    def count(self, number: int, before: Counter[str]) -> None:
        """Add the pool's grades since its counters were `before` to a run's counts."""
        self.grades[number].update(self.pool.counters - before)

    def _complete(
        self,
        asked: Sequence[Question],
        sampling: SamplingConfig,
        samples: int,
        alive: Sequence[bool],
    ) -> list[list[Completion]]:
        completions: list[list[Completion]] = [[] for _ in alive]
        answered = 0
        for part in self._parts(asked, samples):
            seeds = [
                seeds_of(part, samples=samples, seed=seed) if lives else None
                for seed, lives in zip(self.seeds, alive, strict=True)
            ]
            prompts = [question.prompt for question in part]
            batches = self.asker.sample(prompts, seeds, sampling, group_size=samples)
            for own, batch in zip(completions, batches, strict=True):
                own.extend(batch.completions if batch is not None else ())
            answered += len(part)
            if self.on_part:
                self.on_part(answered / len(asked))
        return completions

    def _parts(self, asked: Sequence[Question], samples: int) -> Iterator[Sequence[Question]]:
        """Yield the questions in parts of about equal size, none too large for the asker."""
        longest = max((len(question.prompt) for question in asked), default=1)
        parts = -(-len(asked) // self.asker.prompts_at_once(samples, longest))
        size = -(-len(asked) // max(1, parts))
        for begin in range(0, len(asked), max(1, size)):
            yield asked[begin : begin + size]

    def _texts(self, openings: Sequence[str], completions: Sequence[Completion]) -> list[str]:
        """Return texts without control tokens, openings included; none where there are none."""
        if not completions:
            return []
        decoded = texts_of([own.token_ids for own in completions], self.tokenizer)
        return [opening + text for opening, text in zip(openings, decoded, strict=True)]
