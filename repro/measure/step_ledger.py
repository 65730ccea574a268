"""Measured steps on disk, written as each is done: a stop loses at most the step under way.

A ledger belongs to a tier and a seed and lies beside the targets' folders of records, so that arms
and targets share what was measured of a common baseline and nothing is timed twice. An entry
belongs to one way of training at one point and holds its repeats and what else was seen. It counts
only for the source commit and the kind of device that it was made with, and for the very
configuration; anything else is measured again.

Easy to get wrong: a tree with changes has no commit that says what ran. Entries of such a tree
serve the process that made them and nobody else.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch

from repro.evidence.provenance import UNKNOWN, source_commit, source_digest
from repro.spec.config import digest_of
from repro.spec.step_scale import StepArm, StepPoint, StepScale
from repro.spec.whole_files import replace_text


def ledger_path(folder: Path, seed: int) -> Path:
    """Return the ledger's place; a run's folder is `<tier>/<target>/<arm>/seed-<n>/<digest>`."""
    return folder.parents[3] / f"steps-seed-{seed}.json"


def made_by() -> dict[str, str]:
    """Return what an entry must have been made by to count here and now."""
    commit, dirty = source_commit()
    if dirty or commit == UNKNOWN:
        commit = f"{commit} with changes, process {os.getpid()}"
    return {
        "commit": commit,
        "source": source_digest(),
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }


def way_of(arm: StepArm) -> str:
    """Return the name of an arm's way of training: its format, and what is unusual about it."""
    name: str = arm.weight_format
    if arm.linears != "kernels":
        name += f"_{arm.linears}"
    return name if arm.training == "lora" else f"{name}_{arm.training}"


class StepLedger:
    """The measured steps of one tier and seed.

    Parameters
    ----------
    path
        Its file; read if it is there.
    scale
        Whose warm-up and optimiser are part of what an entry means.
    """

    def __init__(self, path: Path, scale: StepScale) -> None:
        self.path = path
        self._scale = scale
        self._made_by = made_by()
        self._entries: dict[str, dict[str, Any]] = {}
        if path.is_file():
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw.get("made_by") == self._made_by:
                self._entries = raw["entries"]

    @property
    def finished(self) -> int:
        """Timed steps, and points found not to fit, so far."""
        entries = self._entries.values()
        return sum(len(entry["repeats"]) + bool(entry["out_of_memory"]) for entry in entries)

    def entry(self, arm: StepArm, point: StepPoint) -> dict[str, Any]:
        """Return a copy of an entry: `repeats` (a list), `facts`, `out_of_memory`."""
        stored = self._entries.get(self._key(arm, point))
        if stored is None or stored["digest"] != self._digest(arm, point):
            return {"repeats": [], "facts": {}, "out_of_memory": None}
        return {name: value for name, value in stored.items() if name != "digest"}

    def missing(self, arm: StepArm, point: StepPoint) -> int:
        """Return how many repeats are to be measured still."""
        entry = self.entry(arm, point)
        if entry["out_of_memory"]:
            return 0
        return max(0, self._scale.steps - len(entry["repeats"]))

    def add(
        self, arm: StepArm, point: StepPoint, repeat: dict[str, Any], facts: dict[str, Any]
    ) -> None:
        """Add a repeat and renew the facts, on disk at once."""
        entry = self.entry(arm, point)
        entry["repeats"] = [*entry["repeats"], repeat]
        old = entry["facts"].get("peak_bytes", 0)
        # A peak is the most over all that was seen, by an earlier process too.
        entry["facts"] = facts | {"peak_bytes": max(old, facts.get("peak_bytes", 0))}
        self._put(arm, point, entry)

    def begin_again(self, arm: StepArm, point: StepPoint) -> None:
        """Forget the repeats of an entry, whose steps must be alike."""
        self._entries.pop(self._key(arm, point), None)

    def out_of_memory(self, arm: StepArm, point: StepPoint, sentence: str) -> None:
        """Note that a point does not fit, on disk at once."""
        self._put(arm, point, {"repeats": [], "facts": {}, "out_of_memory": sentence})

    def _put(self, arm: StepArm, point: StepPoint, entry: dict[str, Any]) -> None:
        self._entries[self._key(arm, point)] = entry | {"digest": self._digest(arm, point)}
        raw = {"made_by": self._made_by, "entries": self._entries}
        replace_text(self.path, json.dumps(raw, indent=1, sort_keys=True) + "\n")

    def _key(self, arm: StepArm, point: StepPoint) -> str:
        return f"{point.name} {way_of(arm)}"

    def _digest(self, arm: StepArm, point: StepPoint) -> str:
        scale = self._scale
        return digest_of(
            {
                "arm": dataclasses.asdict(arm) | {"name": "", "label": ""},
                "point": dataclasses.asdict(point),
                "scale": [scale.warm_up, scale.warm_up_tokens, scale.updates, scale.optimizer],
            }
        )
