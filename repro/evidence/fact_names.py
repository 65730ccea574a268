"""Names of facts that a record may lack: a misspelt one would let a receipt pass in silence.

What every record of a procedure has is missed by its receipt, however it is misspelt.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

DEVICE = "device"
NOT_RUN = "not_run"
OUT_OF_MEMORY = "out_of_memory"
REPEATS_TOGETHER = "repeats_together"
SETS_LEFT_OUT = "test_sets_left_out"
SOURCES = "sources"
TIMED_RETRIES = "timed_retries"
TIMED_SLOWED = "timed_slowed"
TIMING = "timing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What was timed, and the device's own rates: a timer that did not wait shows higher ones.

    Attributes
    ----------
    bytes, flops
        Of the work that took `seconds`.
    """

    method: Literal["device_events", "synchronized_clock"] = "device_events"
    seconds: float
    bytes: float
    flops: float | None = None
    bytes_per_second: float
    flops_per_second: float | None = None

    def fact(self) -> dict[str, Any]:
        """Return the fact by its name, as JSON values."""
        values = dataclasses.asdict(self)
        return {TIMING: {name: value for name, value in values.items() if value is not None}}
