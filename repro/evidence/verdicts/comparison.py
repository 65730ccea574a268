"""From the values of a claim's arms, pair by pair, to an estimate with a test: no verdict yet.

Each kind of claim is one number per pair and a bound that it is tested against: a difference
against 0 (or minus the margin), the logarithm of a ratio against that of its margin, the slope over
another metric, the slope over an order of arms, whose test is by ranks. A share of runs (of those
that collapse, say) is compared by the pairs in which one of two arms has it and the other has not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from repro.evidence.verdicts import statistics as st
from repro.evidence.verdicts.sizes import Values
from repro.spec.claim import Claim, Test
from repro.spec.effect import ALPHA

# Kinds whose arms are in an order, tested by ranks.
RANKED = ("trend", "order")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A claim's estimate, in the metric's unit or, of a ratio, as a logarithm.

    Attributes
    ----------
    values
        One per pair.
    effect
        Their mean, or their median where the test is by sign flips.
    bound
        What it is tested against.
    p
        Of the test, uncorrected: two-sided, or one-sided where the test is by sign flips.
    above, below
        On which side of the bound it lies. A test by sign flips has one side alone.
    test
        As the claim declares it.
    unresolved
        Of an order: the adjacent pairs that are not shown to be in it.
    """

    values: tuple[float, ...]
    effect: float
    bound: float
    p: float
    above: bool
    below: bool
    test: Test = "t"
    unresolved: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        """Pairs."""
        return len(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation of the values."""
        return st.paired(self.values).deviation

    def interval(self, confidence: float) -> tuple[float, float, float]:
        """Return low, high and the confidence that they have: of a median it may be less."""
        if self.test == "sign_flip":
            interval, reached = st.median_interval(self.values, confidence)
        elif self.test == "mcnemar":
            interval, reached = st.paired_share_interval(self.values, confidence), confidence
        else:
            interval, reached = st.mean_interval(self.values, confidence), confidence
        assert interval.low is not None
        assert interval.high is not None
        return interval.low, interval.high, min(confidence, reached)


def compare(claim: Claim, blocks: Sequence[Sequence[float]]) -> Compared:
    """Return the comparison of a claim.

    Parameters
    ----------
    blocks : sequence of (arms,) sequences
        As `blocks_of` returns them, two or more.

    Raises
    ------
    ValueError
        For a ratio of values that are not positive, or a slope over what hardly differs.
    """
    if claim.kind in RANKED:
        return _ranked(claim, blocks)
    values, bound = values_and_bound(claim, blocks)
    if claim.test == "sign_flip":
        return _by_sign_flips(values)
    if claim.test == "mcnemar":
        return _of_shares(claim, values)
    result = st.paired(values, bound)
    above, below, tested = result.mean > bound, result.mean < bound, result
    if claim.kind == "equivalent":
        # Against the nearer of the two bounds, the harder one to tell from.
        margin = claim.margin or 0.0
        margin = math.log(margin) if claim.is_ratio else margin
        tested = st.paired(values, math.copysign(margin, result.mean))
        above, below = abs(result.mean) < margin, abs(result.mean) > margin
    return Compared(
        values=tuple(values),
        effect=result.mean,
        bound=bound,
        p=tested.p_two_sided,
        above=above,
        below=below,
    )


def values_and_bound(claim: Claim, blocks: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """Return the value per pair that is tested, and the bound that it is tested against."""
    if claim.kind in RANKED:
        return [st.trend_slope(block) for block in blocks], 0.0
    if claim.kind == "slope":
        return [_slope(claim, block) for block in blocks], 0.0
    if claim.kind in ("gain", "no_gain"):
        return [block[0] for block in blocks], claim.margin or 0.0
    if claim.is_ratio:
        if any(value <= 0 for block in blocks for value in block):
            raise ValueError(f"claim {claim.name}: a ratio needs positive values")
        if claim.kind == "interaction":
            return [math.log(a / b) - math.log(c / d) for a, b, c, d in blocks], 0.0
        bound = 0.0 if claim.kind == "equivalent" else math.log(claim.margin or 1.0)
        return [math.log(a / b) for a, b in blocks], bound
    if claim.kind == "interaction":
        return [(a - b) - (c - d) for a, b, c, d in blocks], 0.0
    margin = claim.margin if claim.kind == "non_inferior" else None
    return [a - b for a, b in blocks], 0.0 - (margin or 0.0)


def blocks_of(claim: Claim, values: Mapping[str, Values]) -> list[list[float]]:
    """Return the values of the claim's arms, one block per pair for which none is missing.

    Parameters
    ----------
    values
        {metric: {arm: {pair: value}}}. A slope's block has its metric of each arm, then the one
        that it is over, then those that are given.
    """
    metrics = [values.get(name, {}) for name in (claim.metric, *_over(claim))]
    columns = [metric.get(arm, {}) for metric in metrics for arm in claim.arms]
    pairs = sorted(set.intersection(*(set(column) for column in columns)))
    return [[column[pair] for column in columns] for pair in pairs]


def _over(claim: Claim) -> tuple[str, ...]:
    return (claim.against, *claim.given) if claim.kind == "slope" else ()


def _slope(claim: Claim, block: Sequence[float]) -> float:
    """Return the first slope of a block by least squares, times the claim's dose.

    What is given is taken out of the doses first; the slope on what is left is the partial one
    (Frisch and Waugh, 1933).
    """
    count = len(claim.arms)
    heights, *over = (block[at : at + count] for at in range(0, len(block), count))
    if claim.is_ratio:
        if min(heights) <= 0:
            raise ValueError(f"claim {claim.name}: a ratio needs positive values")
        heights = [math.log(height) for height in heights]
    axes: list[list[float]] = []
    for column in reversed(over):
        mean = fmean(column)
        left = [value - mean for value in column]
        size = _dot(left, left)
        for axis in axes:
            share = _dot(left, axis) / _dot(axis, axis)
            left = [value - share * part for value, part in zip(left, axis, strict=True)]
        if _dot(left, left) <= 1e-9 * size:
            raise ValueError(
                f"claim {claim.name}: arms {', '.join(claim.arms)} do not differ in "
                f"{' and '.join(_over(claim))} by themselves; a slope needs arms of other doses"
            )
        axes.append(left)
    return _dot(axes[-1], heights) / _dot(axes[-1], axes[-1]) * claim.dose


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(first, second, strict=True))


def _by_sign_flips(values: Sequence[float]) -> Compared:
    interval, _ = st.median_interval(values)
    return Compared(
        values=tuple(values),
        effect=interval.value,
        bound=0.0,
        p=st.sign_flip(values),
        above=interval.value > 0,
        below=False,
        test="sign_flip",
    )


def _of_shares(claim: Claim, values: Sequence[float]) -> Compared:
    if any(value not in (-1.0, 0.0, 1.0) for value in values):
        raise ValueError(f"claim {claim.name}: a share of runs needs values of 0 or 1 per run")
    mean = fmean(values)
    return Compared(
        values=tuple(values),
        effect=mean,
        bound=0.0,
        p=st.mcnemar(values),
        above=mean > 0,
        below=mean < 0,
        test="mcnemar",
    )


def _ranked(claim: Claim, blocks: Sequence[Sequence[float]]) -> Compared:
    slopes, bound = values_and_bound(claim, blocks)
    upward = st.page_trend(blocks)[1]
    downward = st.page_trend([block[::-1] for block in blocks])[1]
    unresolved, reversed_pairs = (
        _adjacent_pairs(claim.arms, blocks) if claim.kind == "order" else ([], [])
    )
    return Compared(
        values=tuple(slopes),
        effect=st.paired(slopes).mean,
        bound=bound,
        p=min(1.0, 2 * min(upward, downward)),
        above=upward < downward,
        below=downward < upward or bool(reversed_pairs),
        unresolved=tuple(unresolved) if upward < downward else (),
    )


def _adjacent_pairs(
    arms: Sequence[str], blocks: Sequence[Sequence[float]]
) -> tuple[list[str], list[str]]:
    """Return the adjacent pairs not resolved, and those resolved the other way round."""
    tests = [
        st.paired([block[place + 1] - block[place] for block in blocks])
        for place in range(len(arms) - 1)
    ]
    adjusted = st.holm([test.p_two_sided for test in tests])
    unresolved, reversed_pairs = [], []
    for place, (test, p) in enumerate(zip(tests, adjusted, strict=True)):
        pair = f"{arms[place]} < {arms[place + 1]}"
        if p >= ALPHA:
            unresolved.append(pair)
        elif test.mean < 0:
            reversed_pairs.append(pair)
    return unresolved, reversed_pairs
