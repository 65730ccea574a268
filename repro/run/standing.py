"""What stands at the place of each run's record: its record, nothing, or something else.

An unreadable file, or a record of another configuration, costs its own run alone: the run is not
carried out, since nothing is written over what stands, and the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from repro.evidence.record import RecordError, find_record
from repro.spec.config import RunConfig


@dataclass(slots=True, kw_only=True)
class Standing:
    """Runs with a record of success, runs without one, and why what stands is not a run's record.

    A sentence of `blocked` names the file.
    """

    recorded: list[RunConfig] = field(default_factory=list)
    left: list[RunConfig] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)


def standing_of(runs: Iterable[RunConfig], folder: Path) -> Standing:
    """Sort runs by what stands at the place of their record under a folder."""
    standing = Standing()
    for run in runs:
        try:
            found = find_record(run, folder)
        except RecordError as error:
            standing.blocked.append(str(error))
        else:
            (standing.left if found is None else standing.recorded).append(run)
    return standing
