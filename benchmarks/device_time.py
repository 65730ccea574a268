"""Device time as pytest-benchmark's own statistic, and the limits that it is held to.

pytest-benchmark subtracts two readings of a timer. The timer here is a clock that moves only when a
work is added to it, by the seconds between two events on the device's stream, so minimum, median
and spread are of device time. On a CPU a work is timed by the host's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from repro.evidence.environment import capture_environment, device_of


class DeviceClock:
    """A timer for pytest-benchmark that only advances by what is added to its `seconds`."""

    __name__ = "device_clock"

    seconds = 0.0

    def __call__(self) -> float:
        """Return the seconds of all works so far."""
        return self.seconds


CLOCK = DeviceClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the device was measured to reach in this session.

    Bytes per second of a large copy, read and written both counted, and FLOP per second of a large
    bfloat16 product.
    """

    copy_rate: float
    matmul_rate: float

    def shares(self, seconds: float, nbytes: float, flops: float) -> dict[str, float]:
        """Return the percent of each rate and of the limit that binds: the larger of the two."""
        copied = 100 * nbytes / seconds / self.copy_rate
        multiplied = 100 * flops / seconds / self.matmul_rate
        return {
            "percent_of_copy_rate": copied,
            "percent_of_matmul_rate": multiplied,
            "limit_percent": max(copied, multiplied),
        }


def device_type() -> str:
    """Return "cuda" where the kernels serve (from compute capability 8.0 on), else "cpu"."""
    served = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    return "cuda" if served else "cpu"


@lru_cache(maxsize=1)
def device_slug() -> str:
    """Return the device's name as folders spell it, `nvidia_h200`, or `cpu`."""
    if device_type() == "cpu":
        return "cpu"
    return device_of(capture_environment()) or "cuda"


def record_rounds(benchmark: Any, seconds: Callable[[], float], *, rounds: int) -> float:
    """Let what `seconds` returns be the time of each round, by `CLOCK`; return the median."""

    def work() -> None:
        CLOCK.seconds += seconds()

    benchmark.pedantic(work, rounds=rounds, warmup_rounds=1)
    benchmark.extra_info["device"] = device_slug()
    if benchmark.disabled:  # by `--benchmark-disable` or pytest-xdist: there are no statistics
        return seconds()
    return float(benchmark.stats["median"])
