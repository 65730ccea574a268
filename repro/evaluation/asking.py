"""Asking a policy: problems as it reads them, its sampled answers, and their grades.

A completion's seed follows from the run's seed, the problem and the sample, never from the arm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from repro.data.problem import Problem
from repro.data.prompts import opening_of, read_texts, render_within
from repro.distributed import ALONE, Ranks
from repro.evaluation.grades import Answers, Graded, shows_working
from repro.reward.answers import READINGS
from repro.reward.expression import tidy
from repro.reward.grader import Grade, GraderPool
from repro.reward.score import both_grades
from repro.rollout.sampler import Completion, Sampler, shared
from repro.rollout.torch_sampler import TorchSampler
from repro.spec.config import SamplingConfig, derive_seed

# Rows asked at once: of plain torch, which holds them all; of an engine, which lets rows enter as
# others end, so that few parts have a tail in which most slots are empty.
_ROWS_AT_ONCE, _ROWS_QUEUED = 256, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A problem as the policy reads it, and the text that its completion is made to begin with.

    That opening, of which a thinking tag at the chat template's end is a part, is in the prompt,
    too; empty lets the policy choose.
    """

    problem: Problem
    prompt: tuple[int, ...]
    opening: str = ""


def questions(
    problems: Sequence[Problem],
    template: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    opening: str = "",
) -> list[Question]:
    """Render problems as prompts; one of more than `max_prompt_tokens` tokens raises."""
    begun = tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []
    asked = []
    for problem in problems:
        prompt = render_within(problem, template, tokenizer, max_prompt_tokens)
        opened = opening_of(prompt, tokenizer) + opening
        asked.append(Question(problem=problem, prompt=(*prompt, *begun), opening=opened))
    return asked


def seeds_of(
    asked: Sequence[Question], *, samples: int, seed: int, stream: str = "evaluation"
) -> list[int]:
    """Return the seeds of a run's completions by the stream's name, question by question."""
    return [
        derive_seed(seed, stream, question.problem.id, sample)
        for question in asked
        for sample in range(samples)
    ]


class Evaluator:
    """Samples and grades answers, by ranks that share the questions.

    The sampler is asked for `rows_at_once` completions. `on_part` is told the share of the
    questions that is answered whenever some are; it may raise to stop.
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


def answers_of(
    asked: Sequence[Question],
    texts: Sequence[str],
    completions: Sequence[Completion],
    pool: GraderPool,
    reads: str = "tags",
) -> Answers:
    """Grade whole texts, forced openings included, equally many of each question in order."""
    samples = len(texts) // max(1, len(asked))
    golds = [question.problem.answer for question in asked for _ in range(samples)]
    grades = both_grades([*zip(golds, texts, strict=True)], pool, reads)
    graded = [
        Graded(
            accuracy=strictly.accuracy,
            lenient=leniently.accuracy,
            format_ok=READINGS[reads].format_ok(text),
            works=shows_working(text),
            truncated=completion.finish_reason == "length",
            tokens=len(completion.token_ids),
            surprisal=-sum(completion.sampled_logprobs),
            answer=_vote(strictly),
            lenient_answer=_vote(leniently),
        )
        for (strictly, leniently), text, completion in zip(grades, texts, completions, strict=True)
    ]
    problems, groups = [], []
    for number, question in enumerate(asked):
        group = graded[number * samples : (number + 1) * samples]
        if all(one.accuracy is not None for one in group):
            problems.append(question.problem)
            groups.append(group)
    return Answers(problems=problems, groups=groups, dropped=len(asked) - len(groups))


def _vote(grade: Grade) -> str | None:
    """Return the answer that a graded completion votes for."""
    return None if grade.answer is None else tidy(grade.answer)
