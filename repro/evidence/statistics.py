"""The statistics behind verdicts, in the standard library alone.

What is used, and why (rules as in the suite's analysis plan):

* Intervals of a mean over seeds are Student's t intervals: the percentile bootstrap's nominal 95 %
  covers 75 to 87 % at 3 to 8 seeds.
* Shares get Wilson's interval.
* Two arms with the same seeds are compared by their paired differences, with the t interval and the
  exact sign-flip test; five pairs are the fewest whose one-sided p can fall below 0.05.
* An order of arms is tested as a trend (Page's L, exact by convolution, ties by midranks), pairs
  only behind that gate and with Holm's correction.
* What n seeds could have shown is the minimum detectable effect at 80 % power, from the noncentral
  t distribution.

The tests compare each of these with scipy.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, stdev

NORMAL = NormalDist()
_EXACT_FLIPS = 16
_SAMPLED_FLIPS = 50_000
# Of the largest summand: a mean below it is the rounding of floats.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value with its interval; `low` and `high` are None for fewer than two values."""

    value: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Comparison of per-seed values with a bound.

    Attributes
    ----------
    mean, low, high
        Mean and its 95 % t interval.
    deviation
        Standard deviation of the values (n - 1).
    p_two_sided
        t test that the mean is `bound`.
    p_sign_flip
        One-sided sign-flip test that it is above.
    """

    mean: float
    low: float
    high: float
    deviation: float
    n: int
    p_two_sided: float
    p_sign_flip: float


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b)."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    log_front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    front = math.exp(log_front)
    # The continued fraction converges fast only below the mean; above it, use the symmetry.
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1.0 - front * _beta_fraction(b, a, 1 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Lentz's evaluation of the continued fraction of the incomplete beta function."""
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(tiny, abs(1 - (a + b) * x / (a + 1)))
    d = math.copysign(d, 1 - (a + b) * x / (a + 1))
    result = d
    for m in range(1, 400):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + step * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1 + step / (c if abs(c) > tiny else tiny)
            result *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return result


def t_cdf(t: float, df: float) -> float:
    """Return the distribution function of Student's t."""
    tail = 0.5 * incomplete_beta(df / 2, 0.5, df / (df + t * t))
    return 1 - tail if t > 0 else tail


@functools.cache
def t_quantile(p: float, df: float) -> float:
    """Return the quantile of Student's t; p in (0, 1)."""
    if not 0 < p < 1:
        raise ValueError(f"p is {p}; it must lie in (0, 1)")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    return _bisect(lambda t: t_cdf(t, df) - p, 0.0, 2.0)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of independent values with its t interval.

    Raises
    ------
    ValueError
        If there are no values.
    """
    if not values:
        raise ValueError("the mean of no values is not defined")
    n, mean = len(values), fmean(values)
    if n < 2:
        return Interval(value=mean, low=None, high=None, n=n)
    half = t_quantile(0.5 + confidence / 2, n - 1) * stdev(values) / math.sqrt(n)
    return Interval(value=mean, low=mean - half, high=mean + half, n=n)


def wilson_interval(successes: float, n: int, confidence: float = 0.95) -> Interval:
    """Return a share with Wilson's interval, as fractions of 1."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} is no share")
    z = NORMAL.inv_cdf(0.5 + confidence / 2)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(value=share, low=max(0.0, centre - half), high=min(1.0, centre + half), n=n)


def paired(differences: Sequence[float], bound: float = 0.0, confidence: float = 0.95) -> Paired:
    """Compare paired differences with `bound`.

    Differences that cancel but for the rounding of floats have a mean of 0.

    Raises
    ------
    ValueError
        With fewer than two differences.
    """
    n = len(differences)
    if n < 2:
        raise ValueError(f"a paired comparison needs 2 or more pairs; found {n}")
    interval = mean_interval(differences, confidence)
    assert interval.low is not None
    assert interval.high is not None
    deviation = stdev(differences)
    cancelled = abs(interval.value) < _ROUNDING * max(map(abs, differences))
    mean = 0.0 if cancelled else interval.value
    return Paired(
        mean=mean,
        low=interval.low,
        high=interval.high,
        deviation=deviation,
        n=n,
        p_two_sided=_t_test(mean - bound, deviation, n),
        p_sign_flip=sign_flip([value - bound for value in differences]),
    )


def _t_test(distance: float, deviation: float, n: int) -> float:
    if deviation == 0:
        return 1.0 if distance == 0 else 0.0
    t = abs(distance) / (deviation / math.sqrt(n))
    return 2 * (1 - t_cdf(t, n - 1))


def sign_flip(differences: Sequence[float]) -> float:
    """Return the one-sided p that the sum of `differences` is this large under random signs.

    Exact up to 16 differences, by 50 000 seeded draws above.
    """
    sizes = [abs(value) for value in differences]
    slack = 1e-12 * (1 + sum(sizes))
    observed = sum(differences) - slack
    if len(sizes) <= _EXACT_FLIPS:
        sums = [0.0]
        for size in sizes:
            sums = [s + size for s in sums] + [s - size for s in sums]
        return sum(s >= observed for s in sums) / len(sums)
    # A byte of signs at a time: the sums of eight sizes under each of the 256 signs of a byte.
    sizes = [0.0] * (-len(sizes) % 8) + sizes
    sums_of = [_byte_sums(sizes[place : place + 8]) for place in range(0, len(sizes), 8)]
    hits = sum(
        sum(sums[byte] for sums, byte in zip(sums_of, signs, strict=True)) >= observed
        for signs in _sampled_signs(len(differences))
    )
    return (hits + 1) / (_SAMPLED_FLIPS + 1)


def _byte_sums(sizes: Sequence[float]) -> list[float]:
    """Return the sum of eight sizes for each byte of signs, the first size's in its highest bit."""
    sums = [0.0]
    for size in sizes:
        sums = [s + sign for s in sums for sign in (-size, size)]
    return sums


@functools.lru_cache(maxsize=2)
def _sampled_signs(count: int) -> list[bytes]:
    """Return the signs of each seeded draw as bits, 1 for plus, filled up in front to bytes."""
    draw = random.Random(20251013)
    length = -(-count // 8)
    drawn = []
    for _ in range(_SAMPLED_FLIPS):
        bits = "".join("1" if draw.random() < 0.5 else "0" for _ in range(count))
        drawn.append(int(bits, 2).to_bytes(length, "big"))
    return drawn


def probability_of_improvement(first: Sequence[float], second: Sequence[float]) -> float:
    """Return P(first > second) over all pairs, ties counted half."""
    wins = sum((a > b) + 0.5 * (a == b) for a, b in itertools.product(first, second))
    return wins / (len(first) * len(second))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p values, in the order given."""
    m = len(p_values)
    adjusted = [0.0] * m
    largest = 0.0
    for rank, index in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (m - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def midranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1, equal values sharing the mean of theirs."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    for _, tied in itertools.groupby(enumerate(order, 1), key=lambda pair: values[pair[1]]):
        group = list(tied)
        for _, index in group:
            ranks[index] = fmean(rank for rank, _ in group)
    return ranks


def page_trend(blocks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return Page's L and its one-sided exact p, for treatments listed in the claimed order.

    Parameters
    ----------
    blocks : sequence of (k,) sequences
        One block a seed, the k arms from the claimed lowest to the claimed highest; k up to 7.
    """
    widths = {len(block) for block in blocks}
    if len(widths) != 1 or not 2 <= next(iter(widths)) <= 7:
        raise ValueError(f"Page's test needs blocks of one width from 2 to 7; found {widths}")
    # Twice the statistic is a whole number, midranks included.
    total: dict[int, float] = {0: 1.0}
    observed = 0
    for block in blocks:
        ranks = midranks(block)
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


def trend_slope(block: Sequence[float]) -> float:
    """Return the least-squares slope of a block over its places: units a place."""
    centre = (len(block) - 1) / 2
    weights = [place - centre for place in range(len(block))]
    return sum(w * value for w, value in zip(weights, block, strict=True)) / sum(
        w * w for w in weights
    )


def power(effect: float, n: int, alpha: float = 0.05) -> float:
    """Return the power of a one-sided paired t test at level alpha / 2.

    One side of the two-sided 95 % interval that verdicts use.

    Parameters
    ----------
    effect
        True mean difference in units of the differences' standard deviation.
    """
    df = n - 1
    critical = t_quantile(1 - alpha / 2, df)
    shift = effect * math.sqrt(n)
    # P(T > c) = E over u = sqrt(chi2_df / df) of Phi(shift - c u), by Simpson's rule.
    log_norm = math.log(2) + (df / 2) * math.log(df / 2) - math.lgamma(df / 2)
    upper = 1 + 8 / math.sqrt(df)
    steps = 400
    width = upper / steps
    total = 0.0
    for index in range(1, steps + 1):
        u = index * width
        density = math.exp(log_norm + (df - 1) * math.log(u) - df * u * u / 2)
        weight = 1 if index == steps else 4 if index % 2 else 2
        total += weight * density * NORMAL.cdf(shift - critical * u)
    if df == 1:  # the density does not vanish at 0 there
        total += math.exp(log_norm) * NORMAL.cdf(shift)
    return min(1.0, total * width / 3)


def minimum_detectable_effect(deviation: float, n: int, wanted: float = 0.8) -> float:
    """Return the smallest true mean difference found with probability `wanted` by n pairs."""
    if n < 2:
        return math.inf
    return deviation * _detectable(n, wanted)


@cache
def _detectable(n: int, wanted: float) -> float:
    """Return the effect, in standard deviations, that n pairs find with probability `wanted`."""
    return _bisect(lambda effect: power(effect, n) - wanted, 0.0, 1.0)


def seeds_needed(
    effect: float, deviation: float, wanted: float = 0.8, most: int = 1000, alpha: float = 0.05
) -> int | None:
    """Return how many pairs would show a true difference of `effect`; None above `most`.

    Parameters
    ----------
    wanted
        Power.
    alpha
        Level at which it is tested.
    """
    if effect == 0:
        return None
    if deviation == 0:
        return 2
    size = abs(effect) / deviation
    low, high = 2, 2
    while power(size, high, alpha) < wanted:
        low, high = high + 1, high * 2
        if low > most:
            return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if power(size, middle, alpha) >= wanted else (middle + 1, high)
    return low if low <= most else None


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the root of an increasing function that is negative at `low`."""
    while function(high) < 0:
        low, high = high, high * 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2
