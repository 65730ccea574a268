"""One measured number: what every metric is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One measured number.

    Attributes
    ----------
    value
        None where the run produced no finite number.
    low, high
        95 % interval, None where there is none.
    n
        How many independent units are behind it.
    """

    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    n: int = 1
    method: str = ""
