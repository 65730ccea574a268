"""The time of day by a clock that nobody sets: read once, then counted by the monotonic clock.

So what a process times has no negative length, whatever happens to the machine's clock meanwhile.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

_ORIGIN = datetime.now(UTC) - timedelta(seconds=time.monotonic())


def steady_now() -> datetime:
    """Return the time, UTC; within a process it never goes back."""
    return _ORIGIN + timedelta(seconds=time.monotonic())
