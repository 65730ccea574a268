"""What a throughput arm has measured so far, kept on disk part by part.

The seeds of an arm on large models take minutes together. Each finished point and check is written
to the run's checkpoint folder, and a second start of the same seeds goes on after it. What another
state of the source measured is not taken up.

A part that runs out of memory is noted as not fitting, and the others are measured in a fresh
process: this one may have kept some of the memory (`repro.measure.fresh_process`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro.evidence.provenance import source_digest
from repro.evidence.record import Estimate
from repro.measure.device_state import is_out_of_memory, needs_by_allocator
from repro.measure.fresh_process import FreshProcessNeededError
from repro.spec.whole_files import replace_text

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
        One per seed.
    effects
        What stands in the models that were loaded; `not_run` says of parts why they were not.
    done
        Names of finished points, their batches, and checks.
    """

    folder: Path
    repeats: list[Repeat]
    effects: dict[str, Any]
    done: list[str] = field(default_factory=list)

    def finish(self, name: str) -> None:
        """Note that a part is finished, and write everything so far."""
        self.done.append(name)
        content = {
            "source": source_digest(),
            "repeats": [dataclasses.asdict(repeat) for repeat in self.repeats],
            "effects": self.effects,
            "done": self.done,
        }
        replace_text(self.folder / _FILE, json.dumps(content))

    def leave_out(self, names: Sequence[str], sentence: str) -> None:
        """Note why parts were not run, and forget what metrics they had so far."""
        for name in names:
            self.effects["not_run"][name] = sentence
            for repeat in self.repeats:
                begun = [metric for metric in repeat.metrics if metric.endswith(f"_{name}")]
                for metric in begun:
                    del repeat.metrics[metric]
            self.finish(f"not run: {name}")

    @contextmanager
    def fit_or_left_out(self, *names: str) -> Iterator[None]:
        """Leave parts out where their work runs out of memory.

        Raises
        ------
        FreshProcessNeededError
            When it did: the other parts are measured in another process.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            sentence = needs_by_allocator(error)
            self.leave_out(names, sentence)
            raise FreshProcessNeededError(f"{', '.join(names)} {sentence}") from error


def open_parts(folder: Path, seeds: list[int], effects: dict[str, Any]) -> Parts:
    """Return what an earlier start of the same seeds and source left in `folder`, or nothing."""
    fresh = Parts(folder=folder, repeats=[Repeat(seed=seed) for seed in seeds], effects=effects)
    path = folder / _FILE
    if not path.is_file():
        return fresh
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored.get("source") != source_digest() or [r["seed"] for r in stored["repeats"]] != seeds:
        return fresh
    repeats = []
    for raw in stored["repeats"]:
        metrics = {name: Estimate(**value) for name, value in raw.pop("metrics").items()}
        repeats.append(Repeat(metrics=metrics, **raw))
    return Parts(folder=folder, repeats=repeats, effects=stored["effects"], done=stored["done"])
