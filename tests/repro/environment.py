"""What a forked process does first; apart, so that it imports nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def with_environment(environment: dict[str, str], target: Callable[..., None], *args: Any) -> None:
    """Call `target` in an environment that differs from that of the process's server."""
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
