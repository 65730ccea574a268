"""The same failure twice: what shares it is not tried again.

Runs of a target go through all arms of a seed before the next, and one that fails may have loaded a
model for minutes first. Two arms that fail alike have a cause in common, and the target's other
runs have it, too; two seeds of one arm that fail alike speak of that arm. Numbers in the reason
(a seed, bytes, a step) do not make two failures different.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from repro.run.worker import Event, Task
from repro.spec.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Two runs that failed alike, and what is not started for it.

    Attributes
    ----------
    arm
        None covers all arms of the target.
    """

    target: str
    arm: str | None
    reason: str

    @property
    def sentence(self) -> str:
        """What is said of it."""
        what = self.target if self.arm is None else f"{self.target}, {self.arm}"
        return f"{what}: two runs failed alike ({self.reason}); its other runs are not started."

    def covers(self, task: Task) -> bool:
        """Whether a task is of what failed."""
        return all(
            run.target == self.target and self.arm in (None, run.arm.name) for run in task.every
        )


@dataclass(slots=True)
class RepeatedFailures:
    """The failures of a start, by target and reason."""

    _runs: dict[tuple[str, str], list[RunConfig]] = field(default_factory=dict)

    def note(self, event: Event) -> Alike | None:
        """Take in an event; return what it shares with an earlier failure, if anything."""
        if event.kind != "failed":
            return None
        run, reason = event.task.run, event.text.splitlines()[0] if event.text else ""
        earlier = self._runs.setdefault((run.target, re.sub(r"[0-9.]+", "#", reason)), [])
        same_arm = [other for other in earlier if other.arm == run.arm]
        other_arm = len(same_arm) < len(earlier)
        earlier.append(run)
        if not same_arm and not other_arm:
            return None
        arm = None if other_arm else run.arm.name
        return Alike(target=run.target, arm=arm, reason=reason)
