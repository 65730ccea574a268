"""The statistics behind verdicts: scipy's distributions, and the tests that scipy lacks.

What is used, and why (rules as in the suite's analysis plan):

* Intervals of a mean over seeds are Student's t intervals (`repro.evidence.estimate`): the
  percentile bootstrap's nominal 95 % covers 75 to 87 % at 3 to 8 seeds.
* Shares get Wilson's interval.
* Two arms with the same seeds are compared by their paired differences, with the t interval; by
  Welch's test only where a claim declares it for pairs that hardly correlate.
* Equivalence is two one-sided t tests.
* An order of arms is tested as a trend (Page's L, exact by convolution, ties by midranks; scipy's
  exact test knows no ties), pairs only behind that gate and with Holm's correction.
* Where one run may collapse, its outlier widens a t interval past every other run: there the exact
  sign-flip test of the mean, in the claimed direction, and the median with its exact interval.
* Claims of one target are decided by Holm's correction, and their intervals are simultaneous
  (Bonferroni's); over a whole study, the false-discovery rate (Benjamini and Hochberg) is added.
* What n seeds could have shown is the minimum detectable effect at 80 % power, from the noncentral
  t distribution.

Parts of scipy are imported where they are used: they take longer than the commands that only list
or plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, stdev, variance

from repro.evidence.estimate import Interval, t_quantile

# Fraction of the largest summand below which a mean is the rounding of floats.
_ROUNDING = 1e-12
# Probability with which the pairs at hand should have shown a true difference.
TARGET_POWER = 0.8
# Timed repeats. A 95 % interval extends 9 standard deviations for two repeats, 2.5 for three.
MINIMUM_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Welch:
    """A sum of means of independent columns: its standard error and degrees of freedom.

    `correlation` is that of two columns, within pairs.
    """

    error: float
    freedom: float
    correlation: float

    def p(self, distance: float) -> float:
        """Return the two-sided p-value of a distance from the bound."""
        return 2 * t_cdf(-abs(distance) / self.error, self.freedom)


def welch(
    columns: Sequence[Sequence[float]], weights: Sequence[float], correlation: float
) -> Welch:
    """Return Welch's comparison of columns, their means weighted, degrees by Satterthwaite."""
    parts = [
        weight**2 * variance(column) / len(column)
        for column, weight in zip(columns, weights, strict=True)
    ]
    total = sum(parts)
    freedom = total**2 / sum(
        part**2 / (len(column) - 1) for column, part in zip(columns, parts, strict=True)
    )
    return Welch(error=math.sqrt(total), freedom=freedom, correlation=correlation)


def t_cdf(t: float, df: float) -> float:
    """Return P(T <= t) of Student's t with df degrees of freedom."""
    from scipy.special import stdtr

    return float(stdtr(df, t))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Mean of new values less mean of old ones, with its 95 % t interval where a spread is shown.

    `p_above` (`p_below`) is the one-sided p that new values are larger (smaller).
    """

    value: float
    low: float | None = None
    high: float | None = None
    p_above: float | None = None
    p_below: float | None = None


def difference(old: Sequence[float], new: Sequence[float], *, paired: bool = False) -> Difference:
    """Compare the means of two samples; of `paired` ones, three or more, value by value.

    Others are independent: Welch's t test. Where one of them has too few values to show a spread
    (fewer than three), both are given the spread of the other; where both have, there is a
    difference and no test.
    """
    value = fmean(new) - fmean(old)
    n, m = len(old), len(new)
    if paired:
        changes = [after - before for before, after in zip(old, new, strict=True)]
        error, df = stdev(changes) / math.sqrt(n), n - 1.0
    elif max(n, m) < MINIMUM_REPEATS:
        return Difference(value=value)
    elif min(n, m) < MINIMUM_REPEATS:
        known = old if n >= m else new
        error, df = stdev(known) * math.sqrt(1 / n + 1 / m), len(known) - 1.0
    elif variance(old) == variance(new) == 0:
        error, df = 0.0, n + m - 2.0
    else:
        both = welch((old, new), (-1.0, 1.0), math.nan)
        error, df = both.error, both.freedom
    if error == 0:
        return Difference(
            value=value, low=value, high=value, p_above=float(value <= 0), p_below=float(value >= 0)
        )
    half = t_quantile(0.5 + 0.95 / 2, df) * error
    return Difference(
        value=value,
        low=value - half,
        high=value + half,
        p_above=t_cdf(-value / error, df),
        p_below=t_cdf(value / error, df),
    )


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Return the ends of Wilson's 95 % interval of a share, as fractions of 1."""
    z = NormalDist().inv_cdf(0.975)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean(differences: Sequence[float]) -> float:
    """Return the mean, 0 of differences that cancel but for the rounding of floats."""
    value = fmean(differences)
    return value if abs(value) >= _ROUNDING * max(map(abs, differences)) else 0.0


def t_test(differences: Sequence[float], bound: float = 0.0) -> float:
    """Return the two-sided p-value that the mean of two or more paired differences is `bound`."""
    distance, deviation = abs(mean(differences) - bound), stdev(differences)
    if deviation == 0:
        return float(distance == 0)
    n = len(differences)
    return 2 * t_cdf(-distance / (deviation / math.sqrt(n)), n - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p values, in the order given."""
    m = len(p_values)
    adjusted = [0.0] * m
    largest = 0.0
    for rank, index in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (m - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def false_discovery(p_values: Sequence[float]) -> list[float]:
    """Return Benjamini and Hochberg's adjusted p values, in the order given; none for none."""
    from scipy.stats import false_discovery_control

    return [float(q) for q in false_discovery_control(p_values)] if p_values else []


# Sign patterns that are enumerated at most, those of 16 pairs; of more pairs as many are drawn.
_PATTERNS = 2**16


def sign_flip(differences: Sequence[float]) -> float:
    """Return the one-sided p-value that the mean of paired differences is above zero.

    Under no effect each difference is as likely of either sign, so all patterns of signs are
    equally likely; p is the share of those whose mean is at least the one observed. It is exact up
    to 16 pairs; of more, 65,536 patterns are drawn, always the same. Two differences are needed.
    """
    from scipy.stats import permutation_test

    result = permutation_test(
        (list(differences),),
        lambda values, axis: values.mean(axis=axis),
        permutation_type="samples",
        alternative="greater",
        n_resamples=_PATTERNS,
        random_state=0,
        vectorized=True,
    )
    return float(result.pvalue)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[Interval, float]:
    """Return the median between two of the values in order, and the confidence that they have.

    The pair is the narrowest whose exact confidence (the sign test's) is at least the one asked;
    of few values not even the whole range has it, and the range is returned with what it has.
    """
    from scipy.special import bdtr

    ordered, n = sorted(values), len(values)
    levels = [1 - 2 * float(bdtr(place, n, 0.5)) for place in range((n + 1) // 2)]
    place = max((i for i, level in enumerate(levels) if level >= confidence), default=0)
    interval = Interval(value=median(ordered), low=ordered[place], high=ordered[-1 - place], n=n)
    return interval, levels[place]


def page_trend(blocks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return Page's L and its one-sided exact p, for treatments listed in the claimed order.

    `blocks` holds one block of k <= 7 arms per seed: all k! orders of its ranks are counted.
    """
    from scipy.stats import rankdata

    # Twice the statistic is a whole number, midranks included.
    total: dict[int, float] = {0: 1.0}
    observed = 0
    for block in blocks:
        ranks = rankdata(block).tolist()
        observed += round(2 * _weighted(ranks))
        single: dict[int, float] = {}
        arrangements = list(itertools.permutations(ranks))
        for arrangement in arrangements:
            score = round(2 * _weighted(arrangement))
            single[score] = single.get(score, 0.0) + 1 / len(arrangements)
        convolved: dict[int, float] = {}
        for left, p in total.items():
            for right, q in single.items():
                convolved[left + right] = convolved.get(left + right, 0.0) + p * q
        total = convolved
    return observed / 2, min(1.0, sum(p for score, p in total.items() if score >= observed))


def _weighted(ranks: Sequence[float]) -> float:
    return sum(place * rank for place, rank in enumerate(ranks, 1))


def minimum_detectable_effect(deviation: float, n: int) -> float:
    """Return the smallest true mean difference found with probability `TARGET_POWER` by n pairs.

    By a one-sided paired t test at level 0.025, to six digits.
    """
    from scipy.special import nctdtrinc

    found = nctdtrinc(n - 1, 1 - TARGET_POWER, t_quantile(0.975, n - 1)) / math.sqrt(n)
    return deviation * float(found)
