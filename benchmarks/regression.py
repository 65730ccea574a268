"""When a benchmark has lost: by more than 10 %, and by more than the two runs scatter.

A row fails if its median is more than 10 % above the stored run's, and above it by more than the
larger of both runs' interquartile ranges: of rounds that scatter by 15 %, a loss of 12 % says
nothing. pytest-benchmark's own rule (`--benchmark-compare-fail=median:10%`) knows no scatter; given
by hand it is used instead of this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_benchmark.utils import RegressionCheck

LOSS_PERCENT = 10.0


class LossBeyondNoise(RegressionCheck):  # type: ignore[misc]
    """The rule, in the form that pytest-benchmark takes."""

    def __init__(self, percent: float = LOSS_PERCENT) -> None:
        super().__init__("median", percent)

    def compute(self, current: Mapping[str, Any], compared: Mapping[str, Any]) -> float:
        """Return the loss in percent of the stored median; 0 for one within the noise."""
        before, now = float(compared["median"]), float(current["median"])
        noise = max(float(current["iqr"]), float(compared["iqr"]))
        if now - before <= noise:
            return 0.0
        return 100 * (now / before - 1) if before > 0 else float("inf")
