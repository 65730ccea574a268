"""One measured number, which every metric is, and the t interval of a mean."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One measured number, of `n` independent units; None where the run produced no finite one.

    `low` and `high` are its 95 % interval, None where there is none.
    """

    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    n: int = 1
    method: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value with its interval; `low` and `high` are None for fewer than two values."""

    value: float
    low: float | None
    high: float | None
    n: int


@functools.cache
def t_quantile(p: float, df: float) -> float:
    """Return the quantile of Student's t; p in (0, 1)."""
    from scipy.special import stdtrit

    return float(stdtrit(df, p))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of independent values, one at least, with its t interval."""
    n, mean = len(values), fmean(values)
    if n < 2:
        return Interval(value=mean, low=None, high=None, n=n)
    half = t_quantile(0.5 + confidence / 2, n - 1) * stdev(values) / math.sqrt(n)
    return Interval(value=mean, low=mean - half, high=mean + half, n=n)
