"""What a forked process does first; apart, so that it imports nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def with_environment(environment: dict[str, str], target: Callable[..., None], *args: Any) -> None:
    """Call `target` with `args` in an environment that differs from that of the process's server.

    Parameters
    ----------
    environment : dict of str to str
        Every variable that there shall be.
    target : callable
        What the process is for.
    *args
        Its arguments.
    """
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
