"""The difference of the means of two samples, independent (Welch's t test) or paired.

Where one of two independent samples has too few values to show a spread (fewer than three), both
are given the spread of the other; where both have, there is a difference and no test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance

from repro.evidence.estimate import t_quantile
from repro.evidence.verdicts.statistics import t_cdf
from repro.evidence.verdicts.verdict import MINIMUM_REPEATS

_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Mean of new values less mean of old ones.

    Attributes
    ----------
    low, high
        95 % t interval; None where nothing shows a spread.
    p_above, p_below
        One-sided p that new values are larger (smaller).
    """

    value: float
    low: float | None = None
    high: float | None = None
    p_above: float | None = None
    p_below: float | None = None


def difference(old: Sequence[float], new: Sequence[float], *, paired: bool = False) -> Difference:
    """Compare the means of two samples; of `paired` ones, three or more, value by value."""
    value = fmean(new) - fmean(old)
    spread = _paired_error(old, new) if paired else _standard_error(old, new)
    if spread is None:
        return Difference(value=value)
    error, df = spread
    if error == 0:
        return Difference(
            value=value, low=value, high=value, p_above=float(value <= 0), p_below=float(value >= 0)
        )
    half = t_quantile(0.5 + _CONFIDENCE / 2, df) * error
    return Difference(
        value=value,
        low=value - half,
        high=value + half,
        p_above=t_cdf(-value / error, df),
        p_below=t_cdf(value / error, df),
    )


def _paired_error(old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
    """Return the standard error of a mean of differences and its degrees of freedom."""
    changes = [after - before for before, after in zip(old, new, strict=True)]
    return stdev(changes) / math.sqrt(len(changes)), len(changes) - 1


def _standard_error(old: Sequence[float], new: Sequence[float]) -> tuple[float, float] | None:
    """Return the standard error of a difference of means and its degrees of freedom, or None."""
    n, m = len(old), len(new)
    if max(n, m) < MINIMUM_REPEATS:
        return None
    if min(n, m) < MINIMUM_REPEATS:
        known = old if n >= m else new
        return stdev(known) * math.sqrt(1 / n + 1 / m), len(known) - 1
    a, b = variance(old) / n, variance(new) / m
    if a + b == 0:
        return 0.0, n + m - 2
    return math.sqrt(a + b), (a + b) ** 2 / (a * a / (n - 1) + b * b / (m - 1))
