"""Accuracy of a policy on problems: one evaluator for every arm, trained or not.

The released evaluation forgets the adapter, compares first characters only and cuts answers short
(docs/paper_and_code.md, row 16). Here the sampler reads the very
tensors that were trained, the grader is the one that paid the rewards, and what is beside accuracy
(format, working, truncation, the lenient reading) is always reported with it.

Easy mistakes: taking samples of one problem for independent ones (the interval is over problems);
another prompt for the untrained row; comparing arms on different random numbers (the seed of a
completion depends on the run's seed, the problem and the sample, never on the arm).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from transformers import PreTrainedTokenizerBase

from repro.data.problem import Problem
from repro.data.prompts import Tokenizer, render
from repro.evidence.record import Estimate
from repro.evidence.statistics import mean_interval
from repro.reward.answers import format_ok, lenient_answer
from repro.reward.grader import GraderPool
from repro.rollout.sampler import Completion, Sampler
from repro.spec.config import SamplingConfig, derive_seed

ROWS_AT_ONCE = 256
_THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A problem as the policy reads it.

    Attributes
    ----------
    prompt
        Token ids.
    opening
        Text that the completion is made to begin with; empty lets the policy choose.
    """

    problem: Problem
    prompt: tuple[int, ...]
    opening: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Per-problem means over the samples, in the order of the questions; percents where shares.

    Attributes
    ----------
    accuracy
        By the strict reading that pays the reward; problems whose gold cannot be read are left out.
    lenient
        Accuracy when the answer may stand in any usual form.
    """

    accuracy: list[float]
    lenient: list[float]
    format_ok: list[float]
    working: list[float]
    truncated: list[float]
    tokens: list[float]
    dropped: int

    def estimates(self, prefix: str = "") -> dict[str, Estimate]:
        """Return the metrics, each with its 95 % interval over problems."""
        named = {
            "accuracy": (self.accuracy, "percent"),
            "accuracy_lenient": (self.lenient, "percent"),
            "format_rate": (self.format_ok, "percent"),
            "working_rate": (self.working, "percent"),
            "truncation_rate": (self.truncated, "percent"),
            "completion_tokens_mean": (self.tokens, "tokens"),
        }
        return {prefix + name: estimate(values, unit) for name, (values, unit) in named.items()}


def estimate(values: Sequence[float], unit: str) -> Estimate:
    """Return the mean of independent values with its 95 % t interval."""
    interval = mean_interval(values)
    return Estimate(
        value=interval.value,
        unit=unit,
        low=interval.low,
        high=interval.high,
        n=len(values),
        method="mean over problems, 95 % t interval",
    )


def questions(
    problems: Sequence[Problem],
    template: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    opening: str = "",
) -> list[Question]:
    """Render problems as prompts; raise `ValueError` naming a prompt that is too long."""
    asked = []
    for problem in problems:
        prompt = render(problem, template, cast(Tokenizer, tokenizer))
        if len(prompt) > max_prompt_tokens:
            raise ValueError(
                f"problem {problem.id}: its prompt has {len(prompt)} tokens; "
                f"this scale takes at most {max_prompt_tokens}"
            )
        asked.append(Question(problem=problem, prompt=tuple(prompt), opening=opening))
    return asked


def ask(
    asked: Sequence[Question],
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    pool: GraderPool,
    sampling: SamplingConfig,
    *,
    samples: int,
    seed: int,
) -> Answers:
    """Sample `samples` completions a question and grade them.

    Parameters
    ----------
    seed : int
        The run's seed; a completion's own seed follows from it, the problem and the sample.
    """
    texts: list[str] = []
    completions: list[Completion] = []
    step = max(1, ROWS_AT_ONCE // samples)
    for begin in range(0, len(asked), step):
        part = asked[begin : begin + step]
        batch = sampler.sample(
            [with_opening(question, tokenizer) for question in part],
            sampling,
            group_size=samples,
            seeds=seeds_of(part, samples=samples, seed=seed),
        )
        completions += batch.completions
        texts += [
            part[row // samples].opening + decode(completion, tokenizer)
            for row, completion in enumerate(batch.completions)
        ]
    golds = [question.problem.answer for question in asked for _ in range(samples)]
    return answers_of(texts, golds, completions, pool, samples)


def seeds_of(asked: Sequence[Question], *, samples: int, seed: int) -> list[int]:
    """Return the seeds of a run's completions, `samples` a question."""
    return [
        derive_seed(seed, "evaluation", question.problem.id, sample)
        for question in asked
        for sample in range(samples)
    ]


def decode(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a completion's text without control tokens."""
    return str(tokenizer.decode(list(completion.token_ids), skip_special_tokens=True))


def with_opening(question: Question, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return a question's prompt with its opening behind it."""
    opening = tokenizer(question.opening, add_special_tokens=False)["input_ids"]
    return [*question.prompt, *opening]


def answers_of(
    texts: Sequence[str],
    golds: Sequence[str],
    completions: Sequence[Completion],
    pool: GraderPool,
    samples: int,
) -> Answers:
    """Grade completions, `samples` of each question in order, and average over the samples."""
    strict = [grade.accuracy for grade in pool.grade(list(zip(golds, texts, strict=True)))]
    read = [lenient_answer(text) for text in texts]
    lenient = [grade.accuracy for grade in pool.grade_answers(list(zip(golds, read, strict=True)))]
    kept = [row for row in range(0, len(texts), samples) if None not in strict[row : row + samples]]

    def means(values: Sequence[float | None], scale: float = 100.0) -> list[float]:
        return [
            scale * sum(value or 0.0 for value in values[row : row + samples]) / samples
            for row in kept
        ]

    return Answers(
        accuracy=means(strict),
        lenient=means(lenient),
        format_ok=means([float(format_ok(text)) for text in texts]),
        working=means([float(shows_working(text)) for text in texts]),
        truncated=means([float(item.finish_reason == "length") for item in completions]),
        tokens=means([float(len(item.token_ids)) for item in completions], scale=1.0),
        dropped=(len(texts) // samples) - len(kept),
    )


def shows_working(text: str) -> bool:
    """Return whether there is anything between the thinking tags."""
    match = _THINKING.search(text)
    return match is not None and bool(match.group(1).strip())
