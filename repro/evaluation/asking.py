"""Sampling a policy's answers to questions, and grading them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from repro.data.prompts import read_texts
from repro.distributed import ALONE, Ranks
from repro.evaluation.grades import Answers, answers_of
from repro.evaluation.questions import Question, seeds_of
from repro.reward.grader import GraderPool
from repro.rollout.sampler import Completion, Sampler, shared
from repro.rollout.torch_sampler import TorchSampler
from repro.spec.config import SamplingConfig

# Rows asked at once: of plain torch, which holds them all; of an engine, which lets rows enter as
# others end, so that few parts have a tail in which most slots are empty.
_ROWS_AT_ONCE, _ROWS_QUEUED = 256, 2048


class Evaluator:
    """Samples and grades answers, by ranks that share the questions.

    Attributes
    ----------
    rows_at_once
        Completions that the sampler is asked for at once.
    on_part
        Told the share of the questions that is answered whenever some are; may raise to stop.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        pool: GraderPool,
        seed: int,
        *,
        reads: str = "tags",
        ranks: Ranks = ALONE,
    ) -> None:
        self.sampler, self.tokenizer, self.pool = shared(sampler, ranks), tokenizer, pool
        self.seed, self.reads = seed, reads
        rows = _ROWS_AT_ONCE if isinstance(sampler, TorchSampler) else _ROWS_QUEUED
        self.rows_at_once = rows * ranks.world
        self.on_part: Callable[[float], None] | None = None

    def ask(self, asked: Sequence[Question], sampling: SamplingConfig, *, samples: int) -> Answers:
        """Sample `samples` completions of each question and grade them."""
        completions = self._complete(asked, sampling, samples)
        token_ids = [own.token_ids for own in completions]
        texts = read_texts(token_ids, [question.opening for question in asked], self.tokenizer)
        return answers_of(asked, texts, completions, self.pool, self.reads)

    def _complete(
        self, asked: Sequence[Question], sampling: SamplingConfig, samples: int
    ) -> list[Completion]:
        completions: list[Completion] = []
        # Parts of about equal size, none too large for the sampler.
        parts = -(-len(asked) // max(1, self.rows_at_once // samples))
        size = max(1, -(-len(asked) // max(1, parts)))
        for begin in range(0, len(asked), size):
            part = asked[begin : begin + size]
            prompts = [question.prompt for question in part]
            seeds = seeds_of(part, samples=samples, seed=self.seed)
            completions += self.sampler.sample(prompts, sampling, group_size=samples, seeds=seeds)
            if self.on_part:
                self.on_part((begin + len(part)) / len(asked))
        return completions
