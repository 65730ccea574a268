"""The rule of `repro.evidence.benchmarks` in the form that pytest-benchmark takes.

pytest-benchmark's own (`--benchmark-compare-fail=median:10%`) knows no scatter; given by hand it is
used instead of this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_benchmark.utils import RegressionCheck

from repro.evidence.benchmarks import LOSS_PERCENT, loss_percent


class LossBeyondNoise(RegressionCheck):
    """Fails for a row that has lost."""

    def __init__(self, percent: float = LOSS_PERCENT) -> None:
        super().__init__("median", percent)

    def compute(self, current: Mapping[str, Any], compared: Mapping[str, Any]) -> float:
        """Return the loss in percent of the stored median; 0 for one within the noise.

        And 0 for a row that waits for the host, as far as `current` says.
        """
        if getattr(current, "extra_info", {}).get("waits_for_host"):
            return 0.0
        return loss_percent(current, compared)
