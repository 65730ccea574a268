"""The interface of procedures: a procedure carries out one run and returns its measurements.

It gets the resolved configuration and a context: a folder of its own, and callbacks for progress
and stopping. It returns `Measured` or raises. `repro.run.carry_out` makes the record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from repro.evidence.estimate import Estimate
from repro.spec.config import RunConfig
from repro.spec.facts import Facts

Progress = Callable[[str, dict[str, float]], None]
# A number of this name marks the text of a progress as a warning, which stays on the screen.
WARNING = "warning"
# The same of a text that stays on the screen as it is.
NOTE = "note"


class Stopped(Exception):  # noqa: N818 - not an error: the run was asked to stop and can go on
    """The run was asked to stop; it can be resumed from its checkpoint."""


class PeerLostError(RuntimeError):
    """Another rank died or did not start; this one is intact, and so is the run's checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Results of one run: series have one value per step, None where a step has none.

    By facts about what the run did receipts show that no step was skipped; `sources` are the states
    of the source that its checkpoints carried. Inputs are SHA-256 digests: checkpoint, problems,
    prompt template.
    """

    metrics: dict[str, Estimate] = field(default_factory=dict)
    series: dict[str, list[float | None]] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    inputs: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", Facts(self.facts))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Where a run is carried out (its own folder, for checkpoints) and whom it tells.

    `progress` is told what is done now, with numbers such as `step`. `should_stop` says whether the
    run is to end at its next step, by `Stopped`.
    """

    folder: Path
    progress: Progress = lambda text, values: None
    should_stop: Callable[[], bool] = lambda: False
    threads: int


# Carries out one run, and returns its measurements.
Procedure = Callable[[RunConfig, RunContext], Measured]
