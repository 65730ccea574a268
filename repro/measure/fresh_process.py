"""A measurement that must be made in another process, because this one is no longer clean.

A process that ran out of device memory may keep some of it: a capture that broke off, workspaces, a
fragmented reserve. What it measured afterwards would be measured in the rest. So it notes what did
not fit, raises `FreshProcessNeededError`, its worker ends, and the task goes back into the queue
(`repro.run.workers`) to be measured again without what did not fit. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from repro.evidence.provenance import source_digest
from repro.spec.tier import cuda_devices
from repro.spec.whole_files import replace_text


class FreshProcessNeededError(Exception):
    """The task is to be measured in a fresh process; no failure as long as it gets on.

    Attributes
    ----------
    finished
        Parts of the task that are noted as not fitting. A task that comes back without one more has
        failed.
    """

    def __init__(self, reason: str, finished: int = 0) -> None:
        super().__init__(reason)
        self.finished = finished


class LeftOut:
    """What of a run ran out of memory: by name, the sentence that its record has.

    Kept in a file until the run is recorded, so that a fresh process does not try it again.
    What another state of the source or another kind of device noted counts for nothing.

    Parameters
    ----------
    folder
        Of the run's checkpoint, which is removed once its record is written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "left_out.json"
        self._made_by = [source_digest(), *(device.name for device in cuda_devices())]
        self.sentences: dict[str, str] = {}
        if self._path.is_file():
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            if stored["made_by"] == self._made_by:
                self.sentences = stored["sentences"]

    def note(self, names: Iterable[str], sentence: str) -> None:
        """Note why some parts are left out, on disk at once."""
        self.sentences |= dict.fromkeys(names, sentence)
        content = {"made_by": self._made_by, "sentences": self.sentences}
        replace_text(self._path, json.dumps(content))
