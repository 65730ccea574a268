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
from dataclasses import dataclass
from typing import Any

from repro.reward.answers import READINGS, lenient_answer
from repro.reward.custom import CustomReward, pay
from repro.reward.grader import Grade, GraderPool, Status
from repro.spec.arm import RewardKind
from repro.spec.config import derive_seed

RANDOM_PROBABILITY = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Rewards of B completions and what they are made of; every list has B entries.

    Attributes
    ----------
    accuracy
        1.0 or 0.0 by the strict reading; None where the item is to be dropped.
    format
        1.0 where the strict format holds, else 0.0.
    total
        The reward to train on; None where the item is to be dropped.
    lenient_accuracy
        1.0 or 0.0 by the lenient reading, never below `accuracy`; None where that is None.
    statuses
        Status of the strict grade.
    """

    accuracy: list[float | None]
    format: list[float]
    total: list[float | None]
    lenient_accuracy: list[float | None]
    statuses: list[Status]


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
) -> Rewards:
    """Score B completions, given without the prompt and the end token's text.

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
    grades, lenient_grades = both_grades(texts, golds, pool, reads)
    accuracy = [grade.accuracy for grade in grades]
    formats = [float(READINGS[reads].format_ok(text)) for text in texts]
    if own is not None:
        given = {**(columns or {}), "answers": golds}
        total = pay(own, texts, given, getattr(own, "__name__", "function"))
    else:
        total = _paid(kind, accuracy, formats, format_reward, seeds or (), truncated or ())
    return Rewards(
        accuracy=accuracy,
        format=formats,
        total=total,
        lenient_accuracy=[
            None if right is None else max(right, grade.accuracy or 0.0)
            for right, grade in zip(accuracy, lenient_grades, strict=True)
        ],
        statuses=[grade.status for grade in grades],
    )


def both_grades(
    texts: Sequence[str], golds: Sequence[str], pool: GraderPool, reads: str
) -> tuple[list[Grade], list[Grade]]:
    """Return the grades of completions by their strict and by the lenient reading."""
    strict = [READINGS[reads].answer(text) for text in texts]
    readings = strict + [lenient_answer(text) for text in texts]
    # In one call: both mostly give one answer, and a late one is not remembered.
    grades = pool.grade_answers(list(zip([*golds, *golds], readings, strict=True)))
    return grades[: len(texts)], grades[len(texts) :]


def _paid(
    kind: RewardKind,
    accuracy: Sequence[float | None],
    formats: Sequence[float],
    format_reward: float,
    seeds: Sequence[int],
    truncated: Sequence[bool],
) -> list[float | None]:
    """Return each completion's reward; None where its gold cannot be read, if that matters."""
    if kind == "random":
        draws = [random.Random(derive_seed(seed, "random reward")).random() for seed in seeds]
        return [float(draw < RANDOM_PROBABILITY) for _, draw in zip(accuracy, draws, strict=True)]
    if kind == "format":
        return list(formats)
    if kind == "finished":
        return [
            None if right is None else right * (not cut)
            for right, cut in zip(accuracy, truncated, strict=True)
        ]
    return [
        None if right is None else right + format_reward * form
        for right, form in zip(accuracy, formats, strict=True)
    ]
