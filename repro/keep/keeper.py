"""What training leaves behind while it goes on, for one run or several side by side.

In each run's folder, which lies beside its record and is named by its digest:

    metrics.jsonl        one line per step: what the record's series will hold
    evaluations.jsonl    one line per evaluation on the development split
    completions/         one Parquet file per rollout, where asked for (`--completions`)
    tensorboard/, wandb/ where asked for (`--log`)

None of it decides anything: a run with and without is the same run to the bit, so what is asked for
is no part of its configuration. It reaches worker processes by the environment, as folders do.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from repro.keep.stream import StepLines
from repro.keep.trackers import ADAPTERS, Tracker, parse_trackers
from repro.spec.config import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from repro.rl.collect import Rollout
    from repro.rl.loop import Hooks, StepValues

LOG_VARIABLE, COMPLETIONS_VARIABLE = "REPRO_LOG", "REPRO_COMPLETIONS"
Values = Mapping[str, float | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What is kept beside metrics.jsonl.

    Attributes
    ----------
    trackers
        Names in `repro.keep.trackers.ADAPTERS`.
    completions
        Whether completions are written.
    """

    trackers: tuple[str, ...] = ()
    completions: bool = False

    @classmethod
    def from_environment(cls) -> Keeping:
        """Return what this process was asked to keep; `ValueError` as `parse_trackers`."""
        named = os.environ.get(LOG_VARIABLE) or None
        return cls(
            trackers=parse_trackers(named),
            completions=bool(os.environ.get(COMPLETIONS_VARIABLE)),
        )

    def pass_on(self) -> None:
        """Let worker processes that start from now on keep this."""
        os.environ[LOG_VARIABLE] = ",".join(self.trackers)
        os.environ[COMPLETIONS_VARIABLE] = "1" if self.completions else ""


class Keeper:
    """Writes the steps of runs into their folders and to trackers; to be used as a context manager.

    Trackers are opened before a policy is loaded, so that one that cannot be used says so at once.

    Parameters
    ----------
    runs, folders
        One folder per run.
    """

    def __init__(
        self, runs: Sequence[RunConfig], folders: Sequence[Path], keeping: Keeping
    ) -> None:
        self.runs, self.folders, self.keeping = runs, folders, keeping
        self._steps = [StepLines(folder / "metrics.jsonl") for folder in folders]
        self._evaluations = [StepLines(folder / "evaluations.jsonl") for folder in folders]
        self._trackers: list[list[Tracker]] = [[] for _ in runs]
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            for number, (run, folder) in enumerate(zip(self.runs, self.folders, strict=True)):
                for name in self.keeping.trackers:
                    tracker = ADAPTERS[name].open(run, folder)
                    opening.callback(tracker.close)
                    self._trackers[number].append(tracker)
            self._open = opening.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def around(self, hooks: Hooks, tokenizer: PreTrainedTokenizerBase) -> Hooks:
        """Return a training's hooks with what is kept before each of them."""

        def on_step(step: int, values: StepValues) -> None:
            self.steps(step, values)
            if hooks.on_step is not None:
                hooks.on_step(step, values)

        def evaluate(step: int, alive: Sequence[bool]) -> Sequence[float | None]:
            accuracies = cast(Any, hooks.evaluate)(step, alive)
            self.evaluations(step, accuracies)
            return accuracies

        return dataclasses.replace(
            hooks,
            evaluate=None if hooks.evaluate is None else evaluate,
            on_step=on_step,
            on_rollout=lambda step, rollouts: self.rollouts(step, rollouts, tokenizer),
        )

    def steps(self, step: int, values: Sequence[Values | None]) -> None:
        """Take the values of every run's step, counted from 1; None for those without."""
        self._take(self._steps, step, values)

    def evaluations(self, step: int, accuracies: Sequence[float | None]) -> None:
        """Take every run's accuracy on the development split after `step` steps, percent."""
        values = [None if a is None else {"evaluation_accuracy": a} for a in accuracies]
        self._take(self._evaluations, step, values)

    def rollouts(
        self, step: int, rollouts: Sequence[Rollout | None], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Write every run's rollout after `step` steps, where completions are kept."""
        if not self.keeping.completions:
            return
        from repro.keep.completions import write_completions

        for run, folder, rollout in zip(self.runs, self.folders, rollouts, strict=True):
            if rollout is not None:
                write_completions(folder / "completions", run, step, rollout, tokenizer)

    def _take(self, files: Sequence[StepLines], step: int, values: Sequence[Values | None]) -> None:
        for file, trackers, own in zip(files, self._trackers, values, strict=True):
            if own is None:
                continue
            file.write(step, {"time": datetime.now(UTC).isoformat(timespec="seconds"), **own})
            for tracker in trackers if step > file.last_before else ():
                tracker.log(step, _finite(own))


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
