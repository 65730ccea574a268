"""What a pre-trained policy can do, and what it does: the measures that decide its use.

A policy that reinforcement learning can sharpen knows more than it shows. Three numbers say so:
greedy accuracy (what it shows), greedy accuracy with the working forced (what it knows: the
ceiling), and accuracy at temperature 1 apart for completions with and without working (the signal
that training starts from). The loss says none of this.

Greedy accuracy rests on one near-tie, whether to work or not, at each level; it can move by tens of
points while no skill changes. Print it with the share of worked answers and the ceiling beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from repro.data.problem import Problem
from repro.data.prompts import template_named
from repro.evaluate.asking import Evaluator
from repro.evaluate.grades import Answers, Graded
from repro.evaluate.questions import questions
from repro.spec.config import SamplingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a freshly pre-trained policy is asked.

    Attributes
    ----------
    template
        Name of the prompt template; its working prefix is what is forced.
    max_prompt_tokens, max_new_tokens
        Limits of a prompt, openings not counted, and of a completion.
    samples
        Completions per problem at temperature 1.
    """

    template: str
    max_prompt_tokens: int
    max_new_tokens: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Percentages; `_by_level` is keyed by the level as text.

    Attributes
    ----------
    greedy, forced_working
        Strict accuracy of greedy decoding, and of greedy decoding after the working's opening.
    greedy_lenient
        Greedy accuracy when the answer may stand in any usual form.
    working_greedy
        Share of greedy completions that work.
    sampled_mean, sampled_pass
        Mean and best of `samples` completions at temperature 1.
    working, given_working, given_careless
        Of sampled completions: share that works, accuracy of those, and of the others (None where
        there is none).
    truncated
        Share of sampled completions that hit the length limit.
    tokens_mean
        Mean length of sampled completions, tokens.
    problems
        How many; those whose gold cannot be read are left out.
    """

    problems: int
    samples: int
    greedy: float
    greedy_by_level: dict[str, float]
    greedy_lenient: float
    working_greedy_by_level: dict[str, float]
    forced_working: float
    forced_working_by_level: dict[str, float]
    sampled_mean: float
    sampled_mean_by_level: dict[str, float]
    sampled_pass: float
    working: float
    given_working: float | None
    given_careless: float | None
    truncated: float
    tokens_mean: float
    seconds: float = 0.0


def measure_quality(evaluator: Evaluator, manner: Manner, problems: Sequence[Problem]) -> Quality:
    """Measure the evaluator's one policy on generated problems that it has never seen."""
    began = time.perf_counter()
    greedy, forced = _greedy_and_forced(evaluator, manner, problems)
    sampled = _ask(evaluator, manner, problems, samples=manner.samples)
    drawn = [one for group in sampled.groups for one in group]
    return Quality(
        problems=len(greedy.problems),
        samples=manner.samples,
        greedy=_percent(_correct, greedy),
        greedy_by_level=_by_level(_correct, greedy),
        greedy_lenient=_percent(lambda one: one.leniently_correct, greedy),
        working_greedy_by_level=_by_level(_works, greedy),
        forced_working=_percent(_correct, forced),
        forced_working_by_level=_by_level(_correct, forced),
        sampled_mean=_percent(_correct, sampled),
        sampled_mean_by_level=_by_level(_correct, sampled),
        sampled_pass=_share(any(map(_correct, group)) for group in sampled.groups),
        working=_percent(_works, sampled),
        given_working=_share_or_none([one.correct for one in drawn if one.works]),
        given_careless=_share_or_none([one.correct for one in drawn if not one.works]),
        truncated=_share(one.truncated for one in drawn),
        tokens_mean=round(sum(one.tokens for one in drawn) / len(drawn), 2),
        seconds=time.perf_counter() - began,
    )


def measure_habits(
    evaluator: Evaluator, manner: Manner, problems: Sequence[Problem]
) -> dict[str, Any]:
    """Measure greedy answers alone, free and with the working forced; names as in `Quality`."""
    greedy, forced = _greedy_and_forced(evaluator, manner, problems)
    return {
        "problems": len(greedy.problems),
        "greedy": _percent(_correct, greedy),
        "greedy_by_level": _by_level(_correct, greedy),
        "forced_working": _percent(_correct, forced),
        "forced_working_by_level": _by_level(_correct, forced),
        "working": _percent(_works, greedy),
    }


def _greedy_and_forced(
    evaluator: Evaluator, manner: Manner, problems: Sequence[Problem]
) -> tuple[Answers, Answers]:
    """Return the greedy answers, and those after the working's opening."""
    prefix = template_named(manner.template).working_prefix
    if prefix is None:
        raise ValueError(f"template {manner.template!r} names no working that could be forced")
    return _ask(evaluator, manner, problems), _ask(evaluator, manner, problems, opening=prefix)


def _ask(
    evaluator: Evaluator,
    manner: Manner,
    problems: Sequence[Problem],
    *,
    samples: int = 0,
    opening: str = "",
) -> Answers:
    """Return the answers: one greedy per problem, or `samples` at temperature 1."""
    asked = questions(
        problems,
        manner.template,
        evaluator.tokenizer,
        max_prompt_tokens=manner.max_prompt_tokens,
        opening=opening,
    )
    temperature = 1.0 if samples else 0.0
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=manner.max_new_tokens)
    (answers,) = evaluator.ask(asked, sampling, samples=max(1, samples))
    return cast(Answers, answers)  # the one run is alive


def _correct(one: Graded) -> bool:
    return one.correct


def _works(one: Graded) -> bool:
    return one.works


def _percent(of: Callable[[Graded], bool], answers: Answers) -> float:
    """Return the share of completions for which `of` holds, percent."""
    return _share(of(one) for group in answers.groups for one in group)


def _by_level(of: Callable[[Graded], bool], answers: Answers) -> dict[str, float]:
    """Return the share at each level, percent, keyed by the level as text."""
    levels: dict[str, list[bool]] = {}
    for problem, group in zip(answers.problems, answers.groups, strict=True):
        levels.setdefault(str(problem.level), []).extend(map(of, group))
    return {level: _share(values) for level, values in sorted(levels.items())}


def _share(values: Iterable[bool]) -> float:
    """Return the share of true values, percent, two decimals."""
    listed = list(values)
    return round(100.0 * sum(listed) / len(listed), 2)


def _share_or_none(values: Sequence[bool]) -> float | None:
    return _share(values) if values else None
