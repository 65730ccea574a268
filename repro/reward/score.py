"""From completions to rewards, with everything that a record wants to know kept apart.

The kinds of reward:

* `task`: accuracy (0 or 1, by the strict reading, through math-verify) plus `format_reward` for the
  strict format;
* `finished`: accuracy of completions that ended by themselves, 0 for those cut at the length limit;
* `format`: 1 for the strict format and 0 otherwise, whatever the answer; a control;
* a user's own function (`repro.reward.custom`) in place of `task`: what it returns;
* `random`: 1 with probability 0.3, whatever the text; a control, since random reward alone has been
  seen to raise the accuracy of some models (arXiv 2506.10947).

Under every kind the same accuracy and format are measured. An item whose gold cannot be parsed has
no reward (None), which is not a zero: it leaves the group.

Easy to get wrong: accuracy and format are summed *before* the group's standardisation, so when all
answers of a group are equally right, a single missing tag is stretched to unit variance.

Source for 0.2: the released `utils/rewards.py` pays 0.2 for the soft format, with 2.0 (GSM8K) or
1.0 (BigMath) for the answer; the paper gives no weights, and its plotted accuracy reward ends at 1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from repro.data.problem import Problem, columns_of
from repro.reward.answers import READINGS, lenient_answer
from repro.reward.custom import CustomReward, pay
from repro.reward.grader import Grade, GraderPool
from repro.spec.arm import RewardKind
from repro.spec.config import derive_seed

RANDOM_PROBABILITY = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingRequest:
    """A completion to be graded: its text, without the prompt and the end token's, and its problem.

    `seed` alone decides its random reward; `cut` says whether it ended at the length limit.
    """

    text: str
    problem: Problem
    seed: int
    cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """What is known of a completion beside its tokens.

    Attributes
    ----------
    accuracy, lenient
        1.0 where it is right by the strict and the lenient reading, else 0.0, the lenient never
        below the strict; None where it could not be graded.
    format
        1.0 where the strict format holds.
    unshaped, reward
        What its reward function gave, and that with shaping, from which advantages are computed;
        None where none could be computed.
    gold
        The answer that it was graded against.
    """

    accuracy: float | None
    reward: float | None
    unshaped: float | None = None
    lenient: float | None = None
    format: float = 0.0
    gold: str = ""


def score(
    requests: Sequence[GradingRequest],
    kind: RewardKind,
    format_reward: float,
    pool: GraderPool,
    *,
    own: CustomReward | None = None,
    reads: str = "tags",
) -> list[Graded]:
    """Score B completions; nothing is shaped.

    `format_reward` is what the strict format adds under `task`. A user's `own` function pays
    instead of `kind`.
    """
    pairs = [(request.problem.answer, request.text) for request in requests]
    graded = [
        Graded(
            accuracy=grade.accuracy,
            reward=None,
            lenient=None if grade.accuracy is None else max(grade.accuracy, other.accuracy or 0.0),
            format=float(READINGS[reads].format_ok(text)),
            gold=gold,
        )
        for (gold, text), (grade, other) in zip(pairs, both_grades(pairs, pool, reads), strict=True)
    ]
    if own is None:
        paid = [_paid(kind, *row, format_reward) for row in zip(requests, graded, strict=True)]
    else:
        columns = columns_of([request.problem for request in requests])
        texts = [request.text for request in requests]
        named = getattr(own, "__name__", type(own).__name__)
        paid = pay(own, texts, columns, f"{own.__module__}:{named}")
    return [
        replace(one, unshaped=reward, reward=reward)
        for one, reward in zip(graded, paid, strict=True)
    ]


def both_grades(
    pairs: Sequence[tuple[str, str]], pool: GraderPool, reads: str
) -> list[tuple[Grade, Grade]]:
    """Return the grades of `(gold, text)` pairs by their strict and by the lenient reading."""
    strict = [(gold, READINGS[reads].answer(text)) for gold, text in pairs]
    lenient = [(gold, lenient_answer(text)) for gold, text in pairs]
    # In one call: both mostly give one answer, and a late one is not remembered.
    grades = pool.grade_answers(strict + lenient)
    return list(zip(grades[: len(pairs)], grades[len(pairs) :], strict=True))


def _paid(
    kind: RewardKind, request: GradingRequest, graded: Graded, format_reward: float
) -> float | None:
    """Return a completion's reward; None where its gold cannot be read, if that matters."""
    if kind == "random":
        drawn = random.Random(derive_seed(request.seed, "random reward")).random()
        return float(drawn < RANDOM_PROBABILITY)
    if kind == "format":
        return graded.format
    if graded.accuracy is None:
        return None
    if kind == "finished":
        return graded.accuracy * (not request.cut)
    return graded.accuracy + format_reward * graded.format
