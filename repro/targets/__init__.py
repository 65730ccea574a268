"""The tables and figures of the paper, in its order. `find` returns one by name.

Nothing here knows a machine: a target says what is compared and how large each tier runs it.
"""

from __future__ import annotations

from repro.spec.target import Target
from repro.targets.table1 import TABLE1, TABLE1_3B

TARGETS: tuple[Target, ...] = (TABLE1, TABLE1_3B)


def find(name: str) -> Target:
    """Return the target called `name`.

    Raises
    ------
    ValueError
        If there is none; the message lists the targets.
    """
    for target in TARGETS:
        if target.name == name:
            return target
    known = ", ".join(target.name for target in TARGETS)
    raise ValueError(f"there is no target {name!r}; the targets are {known}")


def runs_of(target: Target) -> Target:
    """Return the target whose runs `target` reads: itself, or the one it names."""
    return target if target.records_of is None else find(target.records_of)
