"""From the values of a claim's arms, pair by pair, to an estimate with a test: no verdict yet.

Each pair has one number, the claim's contrast, which is tested against its bound. The arms of an
order are tested by their ranks, and a claim about runs that may collapse by the signs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import correlation, stdev

from repro.evidence.estimate import Interval, mean_interval, t_quantile
from repro.evidence.verdicts import statistics as st
from repro.evidence.verdicts.secondary import secondary
from repro.evidence.verdicts.sizes import Values
from repro.spec.claim import ALPHA, Claim, Dose, Test


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A claim's estimate, in the metric's unit or, of a quotient, as a logarithm.

    Attributes
    ----------
    values
        One per pair.
    effect
        Their mean, or their median for the sign-flip test.
    p
        Uncorrected: two-sided, or one-sided for the sign-flip test.
    above, below
        Side of the bound on which the effect is; for `within`, whether it is inside or outside.
        The sign-flip test has only one side.
    welch
        Of arms that were compared as if not paired; else None.
    secondary
        What the claim shows beside its estimate, by name.
    """

    values: tuple[float, ...]
    effect: float
    p: float
    above: bool
    below: bool
    test: Test
    welch: st.Welch | None = None
    secondary: Mapping[str, Interval] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Pairs."""
        return len(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation of the values, or what it would have to be for Welch's error."""
        if self.welch is not None:
            return self.welch.error * math.sqrt(self.n)
        return stdev(self.values)

    @property
    def level(self) -> float:
        """Level of the interval's two ends together."""
        return 2 * ALPHA if self.test == "tost" else ALPHA

    def interval(self, confidence: float) -> tuple[float, float, float]:
        """Return low, high and their confidence, which for a median may be less than asked for."""
        if self.test == "sign_flip":
            interval, reached = st.median_interval(self.values, confidence)
        elif self.welch is not None:
            half = t_quantile(0.5 + confidence / 2, self.welch.freedom) * self.welch.error
            return self.effect - half, self.effect + half, confidence
        else:
            interval, reached = mean_interval(self.values, confidence), confidence
        assert interval.low is not None
        assert interval.high is not None
        return interval.low, interval.high, min(confidence, reached)


def compare(claim: Claim, blocks: Sequence[Sequence[float]]) -> Compared:
    """Return the comparison of a claim on blocks, two or more, as `blocks_of` returns them.

    Raises `ValueError` for a quotient of values that are not positive, or a slope over what hardly
    differs.
    """
    values, bound = contrasts(claim, blocks), bound_of(claim)
    effect, welch = st.mean(values), _unpaired(claim, blocks)

    def p_against(bound: float) -> float:
        return st.t_test(values, bound) if welch is None else welch.p(effect - bound)

    if claim.test == "sign_flip":
        effect = st.median_interval(values)[0].value
        p, above, below = st.sign_flip(values), effect > 0, False
    elif claim.test == "page":
        upward = st.page_trend(blocks)[1]
        downward = st.page_trend([block[::-1] for block in blocks])[1]
        p, above, below = min(1.0, 2 * min(upward, downward)), upward < downward, downward < upward
    elif claim.side == "within":
        # Against the nearer of the two bounds, the harder one to tell from.
        p = p_against(math.copysign(bound, effect))
        above, below = abs(effect) < bound, abs(effect) > bound
        # Of the two one-sided tests the larger p counts, which is that of the nearer bound.
        p = p / 2 if claim.test == "tost" and above else p
    else:
        p, above, below = p_against(bound), effect > bound, effect < bound
    return Compared(
        values=tuple(values),
        effect=effect,
        p=p,
        above=above,
        below=below,
        test=claim.test,
        welch=welch,
        secondary=secondary(claim, blocks, paired=welch is None) if claim.secondary else {},
    )


def _unpaired(claim: Claim, blocks: Sequence[Sequence[float]]) -> st.Welch | None:
    """Return Welch's comparison where the claim declares it for pairs that correlate so little."""
    if claim.unpaired_below is None:
        return None
    columns = [_on_scale(claim, column) for column in zip(*blocks, strict=True)]
    if min(map(stdev, columns)) == 0 or correlation(*columns) >= claim.unpaired_below:
        return None
    return st.welch(columns, [*claim.contrast.values()], correlation(*columns))


def contrasts(claim: Claim, blocks: Sequence[Sequence[float]]) -> list[float]:
    """Return the claim's contrast in each block."""
    if claim.dose is not None:
        return [_slope(claim, claim.dose, block) for block in blocks]
    weights = claim.contrast.values()
    scaled = [_on_scale(claim, block) for block in blocks]
    return [sum(w * value for w, value in zip(weights, block, strict=True)) for block in scaled]


def _on_scale(claim: Claim, values: Sequence[float]) -> Sequence[float]:
    """Return values as they are compared: of a quotient their logarithms."""
    if not claim.log:
        return values
    if min(values) <= 0:
        raise ValueError(f"claim {claim.name}: a quotient needs positive values")
    return [math.log(value) for value in values]


def bound_of(claim: Claim) -> float:
    """Return the bound on the scale on which the claim is compared."""
    return math.log(claim.bound) if claim.log else claim.bound


def blocks_of(claim: Claim, values: Mapping[str, Values]) -> list[list[float]]:
    """Return the values of the claim's arms, one block per pair for which none is missing.

    `values` is {metric: {arm: {pair: value}}}. A slope's block has its metric of each arm, then the
    dose's, then those that are given.
    """
    over = () if claim.dose is None else claim.dose.metrics
    metrics = [values.get(name, {}) for name in (claim.metric, *over)]
    columns = [metric.get(arm, {}) for metric in metrics for arm in claim.arms]
    pairs = sorted(set.intersection(*(set(column) for column in columns)))
    return [[column[pair] for column in columns] for pair in pairs]


def _slope(claim: Claim, dose: Dose, block: Sequence[float]) -> float:
    """Return the first slope of a block by least squares, times the dose's size.

    Beside variables that are given it is the partial one.
    """
    from numpy.linalg import lstsq

    count = len(claim.arms)
    heights, *over = (block[at : at + count] for at in range(0, len(block), count))
    units = [max(map(abs, column)) or 1.0 for column in over]
    scaled = [[v / unit for v in column] for unit, column in zip(units, over, strict=True)]
    columns = [*zip([1.0] * count, *scaled, strict=True)]
    slopes, _, rank, _ = lstsq(columns, _on_scale(claim, heights), rcond=1e-9)
    if rank <= len(over):
        raise ValueError(
            f"claim {claim.name}: arms {', '.join(claim.arms)} do not differ in "
            f"{' and '.join(dose.metrics)} by themselves; a slope needs arms of other doses"
        )
    return float(slopes[1]) / units[0] * dose.size
