"""What a proxy policy can do and what it does, measured by batched decoding on its device.

Three accuracies on generated problems that it never saw: greedy (what it does), greedy with the
working forced (what it can do: the ceiling of what a choice of habit can reach), and sampled at
temperature 1, apart for completions with and without working (the signal that reinforcement
learning starts from). On human-written problems, greedy and forced.

Answers are read strictly (`extract_answer`) and compared as exact numbers. The suite's targets
grade with math-verify; on plain numbers the two agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from repro.data.problem import Problem
from repro.data.proxy_corpus import WORKING_PREFIX, proxy_prompt
from repro.data.proxy_problems import generate_leveled_problems
from repro.reward.answers import extract_answer, lenient_answer
from repro.spec.config import derive_seed

MAX_NEW_TOKENS = 144
_ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One graded completion."""

    correct: bool
    lenient: bool
    works: bool
    truncated: bool
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyQuality:
    """Percentages; `_by_level` is keyed by the level as text, the human ones by the set's name.

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
    human_greedy, human_forced, human_problems
        Strict greedy accuracy, the same with the working forced, and the number of problems.
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
    human_greedy: dict[str, float] = field(default_factory=dict)
    human_forced: dict[str, float] = field(default_factory=dict)
    human_problems: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def measure_proxy_quality(
    model: Any,
    tokenizer: Any,
    *,
    seed: int,
    problems: int,
    samples: int,
    human: Mapping[str, Sequence[Problem]] | None = None,
) -> ProxyQuality:
    """Measure a transformers model on development problems, and on human-written test problems."""
    began = time.perf_counter()
    asked = generate_leveled_problems("development", problems, seed=seed)

    greedy, forced = greedy_and_forced(model, tokenizer, asked)
    sampled = answers_to(model, tokenizer, asked, samples=samples, seed=seed)
    drawn = [answer for group in sampled for answer in group]
    own, made = {}, {}
    for name, of in (human or {}).items():
        free, bound = greedy_and_forced(model, tokenizer, of)
        own[name] = percent(answer.correct for answer in free)
        made[name] = percent(answer.correct for answer in bound)
    return ProxyQuality(
        problems=problems,
        samples=samples,
        greedy=percent(answer.correct for answer in greedy),
        greedy_by_level=by_level(asked, [answer.correct for answer in greedy]),
        greedy_lenient=percent(answer.lenient for answer in greedy),
        working_greedy_by_level=by_level(asked, [answer.works for answer in greedy]),
        forced_working=percent(answer.correct for answer in forced),
        forced_working_by_level=by_level(asked, [answer.correct for answer in forced]),
        sampled_mean=percent(answer.correct for answer in drawn),
        sampled_mean_by_level=by_level(
            [problem for problem in asked for _ in range(samples)],
            [answer.correct for answer in drawn],
        ),
        sampled_pass=percent(any(answer.correct for answer in group) for group in sampled),
        working=percent(answer.works for answer in drawn),
        given_working=_percent_or_none([a.correct for a in drawn if a.works]),
        given_careless=_percent_or_none([a.correct for a in drawn if not a.works]),
        truncated=percent(answer.truncated for answer in drawn),
        tokens_mean=round(sum(answer.tokens for answer in drawn) / len(drawn), 2),
        human_greedy=own,
        human_forced=made,
        human_problems={name: len(of) for name, of in (human or {}).items()},
        seconds=time.perf_counter() - began,
    )


def greedy_and_forced(
    model: Any, tokenizer: Any, problems: Sequence[Problem]
) -> tuple[list[Answer], list[Answer]]:
    """Return each problem's greedy answer, and the one after the working's opening."""
    openings = ["", WORKING_PREFIX]
    twice = [problem for problem in problems for _ in openings]
    answers = answers_to(model, tokenizer, twice, openings=openings * len(problems))
    return [group[0] for group in answers[::2]], [group[0] for group in answers[1::2]]


def answers_to(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    *,
    openings: Sequence[str] = (),
    samples: int = 0,
    seed: int = 0,
) -> list[list[Answer]]:
    """Return each problem's graded completions: one greedy, or `samples` at temperature 1.

    Parameters
    ----------
    openings
        Text that each problem's completion is made to begin with; none for free completions.
    """
    begun = list(openings) or [""] * len(problems)
    texts = [
        proxy_prompt(problem.question) + opening
        for problem, opening in zip(problems, begun, strict=True)
    ]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    each = max(1, samples)
    # Prompts of like length share a batch, so that little is padded.
    order = sorted(range(len(problems)), key=lambda index: len(prompts[index]))
    answers: list[list[Answer]] = [[] for _ in problems]
    step = max(1, _ROWS_AT_ONCE // each)
    for begin in range(0, len(order), step):
        part = order[begin : begin + step]
        generated = _generate(
            model,
            tokenizer,
            [prompts[index] for index in part for _ in range(each)],
            sampled=samples > 0,
            seed=derive_seed(seed, "proxy quality", begin),
        )
        for row, ids in enumerate(generated):
            index = part[row // each]
            answers[index].append(_graded(tokenizer, begun[index], ids, problems[index].answer))
    return answers


@torch.no_grad()
def _generate(
    model: Any, tokenizer: Any, prompts: list[list[int]], *, sampled: bool, seed: int
) -> list[list[int]]:
    """Return generated token ids, cut after the end token."""
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    device = model.device
    choice = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        made = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=sampled,
            pad_token_id=pad,
            eos_token_id=end,
            **choice,
        )
    rows = made[:, width:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def _graded(tokenizer: Any, opening: str, ids: list[int], gold: str) -> Answer:
    text = opening + tokenizer.decode(ids, skip_special_tokens=True)
    return Answer(
        correct=same_number(extract_answer(text), gold),
        lenient=same_number(lenient_answer(text), gold),
        works=text.startswith(WORKING_PREFIX),
        truncated=not ids or ids[-1] != tokenizer.eos_token_id,
        tokens=len(ids),
    )


def same_number(answer: str | None, gold: str) -> bool:
    """Whether an answer is the gold's number, written with or without thousands commas."""
    if answer is None:
        return False
    try:
        return Fraction(answer.replace(",", "").strip()) == Fraction(gold.replace(",", "").strip())
    except (ValueError, ZeroDivisionError):
        return False


def percent(values: Iterable[bool]) -> float:
    """Return the share of true values, percent, two decimals."""
    found = list(values)
    return round(100.0 * sum(found) / len(found), 2)


def _percent_or_none(values: Sequence[bool]) -> float | None:
    return percent(values) if values else None


def by_level(asked: Sequence[Problem], values: Sequence[bool]) -> dict[str, float]:
    """Return the share of true values at each level, percent, keyed by the level as text."""
    of: dict[str, list[bool]] = {}
    for problem, value in zip(asked, values, strict=True):
        of.setdefault(str(problem.level), []).append(value)
    return {level: percent(found) for level, found in sorted(of.items())}
