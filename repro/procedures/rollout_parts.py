"""What a throughput arm has measured so far, kept on disk part by part.

The seeds of an arm on large models take minutes together. Each finished point and check is written
to the run's checkpoint folder, and a second start of the same seeds goes on after it. What another
commit measured is not taken up.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro.evidence.provenance import source_commit
from repro.evidence.record import Estimate, replace_text

_FILE = "parts.json"


@dataclass(slots=True, eq=False)
class Repeat:
    """What one seed has measured so far: metrics, and the work behind them for the receipt."""

    seed: int
    metrics: dict[str, Estimate] = field(default_factory=dict)
    seconds: float = 0.0
    nbytes: float = 0.0
    flops: float = 0.0


@dataclass(slots=True, eq=False)
class Parts:
    """The finished parts of an arm's runs.

    Attributes
    ----------
    folder
        The checkpoint folder, which is removed once all records are written.
    repeats
        One a seed.
    effects
        What stands in the models that were loaded.
    done
        Names of finished points and checks.
    """

    folder: Path
    repeats: list[Repeat]
    effects: dict[str, Any]
    done: list[str] = field(default_factory=list)

    def finish(self, name: str) -> None:
        """Note that a part is finished, and write everything so far."""
        self.done.append(name)
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = {
            "commit": source_commit()[0],
            "repeats": [dataclasses.asdict(repeat) for repeat in self.repeats],
            "effects": self.effects,
            "done": self.done,
        }
        replace_text(self.folder / _FILE, json.dumps(kept))


def open_parts(folder: Path, seeds: list[int], effects: dict[str, Any]) -> Parts:
    """Return what an earlier start of the same seeds and commit left in `folder`, or nothing."""
    fresh = Parts(folder=folder, repeats=[Repeat(seed=seed) for seed in seeds], effects=effects)
    path = folder / _FILE
    if not path.is_file():
        return fresh
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["commit"] != source_commit()[0] or [r["seed"] for r in kept["repeats"]] != seeds:
        return fresh
    repeats = []
    for raw in kept["repeats"]:
        metrics = {name: Estimate(**value) for name, value in raw.pop("metrics").items()}
        repeats.append(Repeat(metrics=metrics, **raw))
    return Parts(folder=folder, repeats=repeats, effects=kept["effects"], done=kept["done"])
