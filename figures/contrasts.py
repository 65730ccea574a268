"""Paired differences between arms: the contrasts that a target's claims are about.

A contrast is one arm minus another, or such a difference minus a second one (an interaction), in
one metric: the mean over seeds with the interval of its claim's verdict, which holds for all claims
of a target together; where nothing is claimed of it, with its own 95 % t interval. Every contrast
is shown in every metric that the target's claims name; only where a claim names both does it have a
claimed side. Of an order of arms the neighbours are contrasts, but of no single pair does it claim
anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from repro.evidence.record import Record
from repro.evidence.verdicts.statistics import mean_interval
from repro.evidence.verdicts.verdict import Verdict
from repro.spec.target import Claim, Target
from repro.spec.tier import Tier

# Of targets whose claims are about learning; what is timed has ratios, in pictures of their own.
PROCEDURES = ("train", "dose")
# What is drawn: A - B, and (A - B) - (C - D).
_SIGNS = {2: (1, -1), 4: (1, -1, -1, 1)}
_CONTROL = "not in the paper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A metric, and the unit of its differences: `points` of accuracy in percent.

    Attributes
    ----------
    base
        The arm that is most often subtracted, and its mean in the metric's unit.
    """

    metric: str
    title: str
    unit: str
    base: tuple[str, float, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What a claim says of one contrast of arms; `is_sided` where it claims a side of it."""

    claim: Claim
    arms: tuple[str, ...]
    is_sided: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One contrast in one metric.

    Attributes
    ----------
    arms
        A, B for A - B; A, B, C, D for (A - B) - (C - D).
    pairs
        The difference of each pair, in the order of seeds.
    claimed
        1 where more is claimed, -1 where less, 0 where nothing is.
    bound
        Where the claimed side begins.
    paper
        Whether the claim is the paper's.
    """

    arms: tuple[str, ...]
    column: Column
    mean: float
    low: float | None
    high: float | None
    pairs: tuple[float, ...]
    claimed: int = 0
    bound: float = 0.0
    paper: bool = False


def cells(
    records: Sequence[Record],
    target: Target,
    tier: Tier,
    verdicts: Mapping[str, Verdict] | None = None,
) -> list[Cell]:
    """Return the cells for which there are two pairs or more, contrast by contrast.

    Parameters
    ----------
    verdicts
        By the names of claims: whose intervals are drawn.
    """
    parts = [part for claim in target.claims if not claim.mechanism for part in _parts(claim)]
    contrasts = _contrasts(parts, target)
    table = []
    for metric in dict.fromkeys(part.claim.metric for part in parts):
        values = _values(records, metric)
        known = [arms for arms in contrasts if set(arms) <= set(values)]
        if known:
            column = _column(target, metric, known, values)
            table += [_cell(arms, column, values, parts, verdicts or {}) for arms in known]
    return sorted(
        (cell for cell in table if len(cell.pairs) > 1),
        key=lambda cell: contrasts.index(cell.arms),
    )


def _parts(claim: Claim) -> list[_Part]:
    """Return what a claim says of single contrasts: itself, or its neighbours, the higher first.

    Quotients of arms are no differences: what claims them has no part here.
    """
    if claim.log or claim.side != "above":
        return []
    if claim.test == "page":
        neighbours = pairwise(claim.arms)
        return [_Part(claim=claim, arms=(high, low), is_sided=False) for low, high in neighbours]
    drawn = tuple(claim.contrast.values()) == _SIGNS.get(len(claim.contrast))
    return [_Part(claim=claim, arms=claim.arms, is_sided=True)] if drawn else []


def _contrasts(parts: Sequence[_Part], target: Target) -> list[tuple[str, ...]]:
    """Return the contrasts in the order of their claims.

    Where claims about two arms have them either way round (more of one metric, less of another),
    the arm that the target names first is subtracted.
    """
    places = [arm.name for arm in target.arms]
    known = {part.arms for part in parts}
    contrasts: dict[tuple[str, ...], None] = {}
    for part in parts:
        arms = part.arms
        if arms[::-1] in known and places.index(arms[0]) < places.index(arms[1]):
            arms = arms[::-1]
        contrasts.setdefault(arms)
    return list(contrasts)


def _values(records: Sequence[Record], metric: str) -> dict[str, dict[int, float]]:
    """Return {arm: {seed: value}}."""
    by_arm: dict[str, dict[int, float]] = {}
    for record in sorted(records, key=lambda item: item.seed):
        value = record.value(metric)
        if value is not None:
            by_arm.setdefault(record.arm, {})[record.seed] = value
    return by_arm


def _column(
    target: Target,
    metric: str,
    contrasts: Sequence[tuple[str, ...]],
    values: Mapping[str, Mapping[int, float]],
) -> Column:
    stated = target.metric(metric)
    pairs = [arms for arms in contrasts if len(arms) == 2] or contrasts
    base = Counter(arms[1] for arms in pairs).most_common(1)[0][0]
    return Column(
        metric=metric,
        title=stated.title,
        unit="points" if stated.unit == "percent" else stated.unit,
        base=(base, fmean(values[base].values()), stated.unit),
    )


def _cell(
    arms: tuple[str, ...],
    column: Column,
    values: Mapping[str, Mapping[int, float]],
    parts: Sequence[_Part],
    verdicts: Mapping[str, Verdict],
) -> Cell:
    common = sorted(set.intersection(*(set(values[arm]) for arm in arms)))
    signs = _SIGNS[len(arms)]
    pairs = tuple(
        sum(sign * values[arm][key] for sign, arm in zip(signs, arms, strict=True))
        for key in common
    )
    interval = mean_interval(pairs or [0.0])
    sided = [item for item in parts if item.is_sided and item.claim.metric == column.metric]
    part = next((item for item in sided if _about(item, arms)), None)
    side = 0 if part is None else 1 if part.arms == arms else -1
    judged = None if part is None else verdicts.get(part.claim.name)
    low, high = interval.low, interval.high
    # An order's verdict has another estimate than its neighbours, which keep their own.
    if judged is not None and math.isclose(
        side * (judged.effect or 0.0), interval.value, rel_tol=1e-9
    ):
        ends = [side * end for end in (judged.low, judged.high) if end is not None]
        low, high = (min(ends), max(ends)) if len(ends) == 2 else (low, high)
    return Cell(
        arms=arms,
        column=column,
        mean=interval.value,
        low=low,
        high=high,
        pairs=pairs,
        claimed=side,
        bound=0.0 if part is None else side * part.claim.bound,
        paper=part is not None and not part.claim.source.startswith(_CONTROL),
    )


def _about(part: _Part, arms: tuple[str, ...]) -> bool:
    return arms in (part.arms, part.arms[::-1] if len(arms) == 2 else part.arms)
