"""A measurement that must go on in another process, because this one is no longer clean.

A process that ran out of device memory may keep some of it: a capture that broke off, workspaces, a
fragmented reserve. What it measured afterwards would be measured in the rest. So it raises
`FreshProcessNeededError`, its worker ends, and the task goes back into the queue to continue after
its saved parts (`repro.run.workers`). Needs no torch.
"""

from __future__ import annotations


class FreshProcessNeededError(Exception):
    """The task is to continue in a fresh process; no failure as long as it gets on.

    Attributes
    ----------
    finished
        Parts of the task that are saved: measured, or noted as not fitting. A task that comes back
        without one more has failed.
    """

    def __init__(self, reason: str, finished: int = 0) -> None:
        super().__init__(reason)
        self.finished = finished
