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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from repro.reward.answers import READINGS, lenient_answer
from repro.reward.custom import CustomReward, pay
from repro.reward.grader import Grade, GraderPool
from repro.spec.arm import RewardKind
from repro.spec.config import derive_seed

RANDOM_PROBABILITY = 0.3


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
    texts: Sequence[str],
    golds: Sequence[str],
    kind: RewardKind,
    format_reward: float,
    pool: GraderPool,
    seeds: Sequence[int] | None = None,
    own: CustomReward | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    reads: str = "tags",
    truncated: Sequence[bool] | None = None,
) -> list[Graded]:
    """Score B completions, given without the prompt and the end token's text; nothing is shaped.

    Raises `ValueError` if lengths differ.

    Parameters
    ----------
    format_reward
        What the strict format adds under `task`.
    seeds, truncated
        Of each completion: what alone decides under `random`, and whether it was cut at the length
        limit, which `finished` asks for.
    own, columns
        A user's function that pays instead of `kind`, and what else it may ask for, B entries each.
    """
    strict, lenient = both_grades(texts, golds, pool, reads)
    graded = [
        Graded(
            accuracy=grade.accuracy,
            reward=None,
            lenient=None if grade.accuracy is None else max(grade.accuracy, other.accuracy or 0.0),
            format=float(READINGS[reads].format_ok(text)),
            gold=gold,
        )
        for text, gold, grade, other in zip(texts, golds, strict, lenient, strict=True)
    ]
    if own is not None:
        given = {**(columns or {}), "answers": golds}
        paid = pay(own, texts, given, getattr(own, "__name__", "function"))
    elif kind == "random":
        draws = [random.Random(derive_seed(seed, "random reward")).random() for seed in seeds or ()]
        paid = [float(draw < RANDOM_PROBABILITY) for draw in draws]
    else:
        cuts = truncated or () if kind == "finished" else [False] * len(texts)
        paid = [_paid(kind, one, format_reward, cut) for one, cut in zip(graded, cuts, strict=True)]
    return [
        replace(one, unshaped=reward, reward=reward)
        for one, reward in zip(graded, paid, strict=True)
    ]


def both_grades(
    texts: Sequence[str], golds: Sequence[str], pool: GraderPool, reads: str
) -> tuple[list[Grade], list[Grade]]:
    """Return the grades of completions by their strict and by the lenient reading."""
    strict = [READINGS[reads].answer(text) for text in texts]
    readings = strict + [lenient_answer(text) for text in texts]
    # In one call: both mostly give one answer, and a late one is not remembered.
    grades = pool.grade_answers(list(zip([*golds, *golds], readings, strict=True)))
    return grades[: len(texts)], grades[len(texts) :]


def _paid(kind: RewardKind, graded: Graded, format_reward: float, cut: bool) -> float | None:
    """Return a completion's reward; None where its gold cannot be read, if that matters."""
    if kind == "format":
        return graded.format
    if graded.accuracy is None:
        return None
    if kind == "finished":
        return graded.accuracy * (not cut)
    return graded.accuracy + format_reward * graded.format
