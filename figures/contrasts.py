"""Paired differences between arms: the contrasts that a target's claims are about.

A contrast is one arm minus another, or such a difference minus a second one (an interaction), in
one metric: the mean over pairs with the interval of its claim's verdict, which holds for all
claims of a target together; where nothing is claimed of it, with its own 95 % t interval. Pairs
share a seed, or a prompt where no training is needed. Every contrast is shown in every metric that
the target's claims name; only where a claim names both does it have a claimed side. Of an order of
arms, the neighbours are contrasts, as they are tested; of a trend too, but of no single pair does
it claim anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from repro.evidence.by_prompt import means_by_prompt
from repro.evidence.record import Record
from repro.evidence.verdicts.statistics import mean_interval
from repro.evidence.verdicts.verdict import Verdict
from repro.spec.target import Claim, ClaimKind, Target
from repro.spec.tier import Tier

# Of targets whose claims are about learning; what is timed has ratios, in pictures of their own.
PROCEDURES = ("train", "finetune", "dose")
_KINDS = ("difference", "non_inferior", "interaction")
_KINDS_OF_MANY = ("order", "trend")
_CONTROL = "not in the paper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A metric, and the pairing and unit of its differences: `points` of accuracy in percent.

    Attributes
    ----------
    base
        The arm that is most often subtracted, and its mean in the metric's unit.
    """

    metric: str
    title: str
    unit: str
    paired_by: str
    base: tuple[str, float, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One contrast in one metric.

    Attributes
    ----------
    arms
        A, B for A - B; A, B, C, D for (A - B) - (C - D).
    pairs
        The difference of each pair, in the order of seeds or prompts.
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
    claims = [
        part
        for claim in target.claims
        if claim.applies(tier) and not claim.mechanism
        for part in _parts(claim)
    ]
    contrasts = _contrasts(claims, target)
    table = []
    for metric, paired_by in dict.fromkeys((claim.metric, claim.paired_by) for claim in claims):
        values = _values(records, metric, paired_by)
        known = [arms for arms in contrasts if set(arms) <= set(values)]
        if known:
            column = _column(target, metric, paired_by, known, values)
            table += [_cell(arms, column, values, claims, verdicts or {}) for arms in known]
    return sorted(
        (cell for cell in table if len(cell.pairs) > 1),
        key=lambda cell: contrasts.index(cell.arms),
    )


def _parts(claim: Claim) -> list[Claim]:
    """Return what a claim says of single contrasts: itself, or its neighbours, the higher first.

    Quotients of arms are no differences: what claims them has no part here.
    """
    if claim.effect is not None and claim.effect.measure == "ratio":
        return []
    if claim.kind in _KINDS:
        return [claim]
    if claim.kind not in _KINDS_OF_MANY:
        return []
    kind: ClaimKind = "difference" if claim.kind == "order" else "trend"
    return [
        dataclasses.replace(claim, kind=kind, arms=(high, low))
        for low, high in pairwise(claim.arms)
    ]


def _contrasts(claims: Sequence[Claim], target: Target) -> list[tuple[str, ...]]:
    """Return the contrasts in the order of their claims.

    Where claims about two arms have them either way round (more of one metric, less of another),
    the arm that the target names first is subtracted.
    """
    places = [arm.name for arm in target.arms]
    known = {claim.arms for claim in claims}
    contrasts: dict[tuple[str, ...], None] = {}
    for claim in claims:
        arms = claim.arms
        if arms[::-1] in known and places.index(arms[0]) < places.index(arms[1]):
            arms = arms[::-1]
        contrasts.setdefault(arms)
    return list(contrasts)


def _values(records: Sequence[Record], metric: str, paired_by: str) -> dict[str, dict[int, float]]:
    """Return {arm: {seed or prompt: value}}."""
    by_arm: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda item: item.seed):
        by_arm.setdefault(record.arm, []).append(record)
    by_seed = {}
    for arm, arm_records in by_arm.items():
        if paired_by == "prompt":
            by_seed[arm] = means_by_prompt(arm_records, metric)
        else:
            seeds = {record.seed: record.value(metric) for record in arm_records}
            by_seed[arm] = {seed: value for seed, value in seeds.items() if value is not None}
    return {arm: values for arm, values in by_seed.items() if values}


def _column(
    target: Target,
    metric: str,
    paired_by: str,
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
        paired_by=paired_by,
        base=(base, fmean(values[base].values()), stated.unit),
    )


def _cell(
    arms: tuple[str, ...],
    column: Column,
    values: Mapping[str, Mapping[int, float]],
    claims: Sequence[Claim],
    verdicts: Mapping[str, Verdict],
) -> Cell:
    common = sorted(set.intersection(*(set(values[arm]) for arm in arms)))
    # A - B, and of an interaction minus (C - D).
    signs = (1, -1, -1, 1)[: len(arms)]
    pairs = tuple(
        sum(sign * values[arm][key] for sign, arm in zip(signs, arms, strict=True))
        for key in common
    )
    interval = mean_interval(pairs or [0.0])
    # A trend's pair is shown, and nothing is claimed of it.
    sided = [claim for claim in claims if claim.kind != "trend" and claim.metric == column.metric]
    claim = next((claim for claim in sided if _about(claim, arms)), None)
    side = 0 if claim is None else 1 if claim.arms == arms else -1
    judged = None if claim is None else verdicts.get(claim.name)
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
        bound=0.0 if claim is None else -side * (claim.margin or 0.0),
        paper=claim is not None and not claim.source.startswith(_CONTROL),
    )


def _about(claim: Claim, arms: tuple[str, ...]) -> bool:
    return arms in (claim.arms, claim.arms[::-1] if len(arms) == 2 else claim.arms)
