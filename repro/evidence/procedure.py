"""What a procedure is: it carries out one run and yields what was measured.

A procedure gets the resolved configuration, its own folder, a way to tell its progress and a way to
be stopped; it returns `Measured` or raises. A record is made of what it returns
(`repro.run.carry_out`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from repro.evidence.record import Estimate
from repro.spec.config import RunConfig

Progress = Callable[[str, dict[str, float]], None]
# Among a progress's numbers: its text is a warning, to be shown whole and to stay.
WARNING = "warning"


class Stopped(Exception):  # noqa: N818 - not an error: the run was asked to stop and can go on
    """The run was asked to stop, and left a checkpoint to go on from."""


class PeerLostError(RuntimeError):
    """Another rank is gone, or did not come; this one is well, and the run's checkpoint stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Results of one run.

    Attributes
    ----------
    series
        One value per step, None where a step has none.
    effects
        What was really done: the guard against runs in which nothing happened.
    inputs
        SHA-256 of what went in: checkpoint, problems, prompt template.
    """

    metrics: dict[str, Estimate]
    series: dict[str, list[float | None]] = field(default_factory=dict)
    effects: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)


class Procedure(Protocol):
    """Carries out one run."""

    def __call__(
        self,
        run: RunConfig,
        *,
        folder: Path,
        progress: Progress,
        should_stop: Callable[[], bool],
        threads: int,
    ) -> Measured:
        """Return what was measured; raise `Stopped` when asked to stop."""
