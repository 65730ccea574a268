"""The log of training in progress, for one run or several at once.

In each run's folder, which lies beside its record and is named by its digest:

    metrics.jsonl        one line per step: what the record's series will hold
    evaluations.jsonl    one line per evaluation on the development or test split
    warnings.txt         what was said of it on the way, if anything
    completions/         one Parquet file per rollout, where asked for (`--completions`)
    tensorboard/, wandb/ where asked for (`--log`)

None of it moves a number: a run with and without is the same run to the bit, so what is asked for
is no part of its configuration; at most a run that learns nothing ends early, as a failed one
(`--stop-idle`, `repro.runlog.watch`). A tracker that fails is left after one warning. It reaches
worker processes by the environment, as folders do.
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

from repro.data.prompts import texts_of
from repro.evidence.procedure import WARNING, Progress
from repro.runlog.stream import StepLines, read_lines
from repro.runlog.trackers import TRACKERS, Tracker, name_of, parse_trackers
from repro.runlog.watch import LENIENT, MIXED, Watch
from repro.spec.config import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from repro.rl.collect import Rollout
    from repro.rl.loop import Hooks, StepValues

LOG_VARIABLE, COMPLETIONS_VARIABLE = "REPRO_LOG", "REPRO_COMPLETIONS"
STOP_IDLE_VARIABLE = "REPRO_STOP_IDLE"
Values = Mapping[str, float | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """What is logged besides metrics.jsonl.

    Attributes
    ----------
    stop_idle
        Steps in a row that teach nothing before a run ends as failed; 0 never ends one.
    """

    trackers: tuple[str, ...] = ()
    completions: bool = False
    stop_idle: int = 0

    @classmethod
    def from_environment(cls) -> LogOptions:
        """Return the options in this process's environment; `ValueError` as `parse_trackers`."""
        named = os.environ.get(LOG_VARIABLE) or None
        return cls(
            trackers=parse_trackers(named),
            completions=bool(os.environ.get(COMPLETIONS_VARIABLE)),
            stop_idle=int(os.environ.get(STOP_IDLE_VARIABLE) or 0),
        )

    def pass_on(self) -> None:
        """Let worker processes that start from now on keep this."""
        os.environ[LOG_VARIABLE] = ",".join(self.trackers)
        os.environ[COMPLETIONS_VARIABLE] = "1" if self.completions else ""
        os.environ[STOP_IDLE_VARIABLE] = str(self.stop_idle or "")


class RunLogger:
    """Writes the steps of runs into their folders and to trackers; to be used as a context manager.

    Trackers are opened before a policy is loaded, so that one that cannot be used says so at once.

    Parameters
    ----------
    runs, folders
        One folder per run.
    progress
        Takes warnings; without one they are in the folders alone.
    """

    def __init__(
        self,
        runs: Sequence[RunConfig],
        folders: Sequence[Path],
        options: LogOptions,
        progress: Progress | None = None,
    ) -> None:
        self.runs, self.folders, self.options, self._progress = runs, folders, options, progress
        self._watches: list[Watch | None] = [None for _ in runs]
        self._seen: list[dict[str, float | int | None]] = [{} for _ in runs]
        self._steps = [StepLines(folder / "metrics.jsonl") for folder in folders]
        self._evaluations = [StepLines(folder / "evaluations.jsonl") for folder in folders]
        self._trackers: list[list[Tracker]] = [[] for _ in runs]
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            for number, (run, folder) in enumerate(zip(self.runs, self.folders, strict=True)):
                for name in self.options.trackers:
                    tracker = TRACKERS[name](name_of(run), run.digest(), run.resolved(), folder)
                    opening.callback(self._close, number, tracker)
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

        def test(step: int, alive: Sequence[bool]) -> Sequence[Mapping[str, float] | None]:
            every = cast(Any, hooks.test)(step, alive)
            named = [own and {f"test_{name}": own[name] for name in own} for own in every]
            self._take(self._evaluations, step, named)
            return every

        return dataclasses.replace(
            hooks,
            test=None if hooks.test is None else test,
            evaluate=None if hooks.evaluate is None else evaluate,
            on_step=on_step,
            on_rollout=lambda step, rollouts: self.rollouts(step, rollouts, tokenizer),
        )

    def steps(self, step: int, values: Sequence[Values | None]) -> None:
        """Take the values of every run's step, counted from 1; None for those without."""
        every = [
            None if own is None else {**own, **seen}
            for own, seen in zip(values, self._seen, strict=True)
        ]
        self._take(self._steps, step, every)
        for number, (watch, own) in enumerate(zip(self._watches, every, strict=True)):
            if watch is not None and own is not None:
                self._warn(number, watch.step(own))

    def evaluations(self, step: int, accuracies: Sequence[float | None]) -> None:
        """Take every run's accuracy on the development split after `step` steps, percent."""
        values = [None if a is None else {"evaluation_accuracy": a} for a in accuracies]
        self._take(self._evaluations, step, values)

    def rollouts(
        self, step: int, rollouts: Sequence[Rollout | None], tokenizer: PreTrainedTokenizerBase
    ) -> dict[int, Exception]:
        """Take every run's rollout after `step` steps, and write it where completions are kept.

        Returns the runs that are to fail here, since they learn nothing, each with its error.
        """
        idle: dict[int, Exception] = {}
        for number, rollout in enumerate(rollouts):
            if rollout is None:
                continue
            if self.options.completions:
                from repro.runlog.completions import write_completions

                folder = self.folders[number] / "completions"
                write_completions(folder, self.runs[number], step, rollout, tokenizer)
            self._seen[number] = {LENIENT: rollout.lenient_sampled, MIXED: rollout.mixed}
            texts = texts_of(rollout.examples, tokenizer)
            try:
                sentence = self._watch(number, step).rollout(
                    rollout, self.runs[number].scale.updates_per_rollout, texts
                )
            except ValueError as error:
                idle[number], sentence = error, None
            self._warn(number, sentence)
        return idle

    def _watch(self, number: int, step: int) -> Watch:
        """Return a run's watch, which goes on from its lines up to `step`."""
        watch = self._watches[number]
        if watch is None:
            lines = read_lines(self._steps[number].path) if step else []
            earlier = [line for line in lines if line["step"] <= step]
            steps = self.runs[number].scale.steps
            watch = self._watches[number] = Watch(self.options.stop_idle, earlier, steps)
        return watch

    def _warn(self, number: int, sentence: str | None) -> None:
        """Say something of a run, in its folder and where progress is shown."""
        if sentence is None:
            return
        text = f"{name_of(self.runs[number])}: {sentence}"
        self.folders[number].mkdir(parents=True, exist_ok=True)
        with (self.folders[number] / "warnings.txt").open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
        if self._progress is not None:
            self._progress(text, {WARNING: 1.0})

    def _take(self, files: Sequence[StepLines], step: int, values: Sequence[Values | None]) -> None:
        for number, (file, own) in enumerate(zip(files, values, strict=True)):
            if own is None:
                continue
            file.write(step, {"time": datetime.now(UTC).isoformat(timespec="seconds"), **own})
            for tracker in list(self._trackers[number]) if step > file.last_before else ():
                self._log(number, tracker, step, _finite(own))

    def _close(self, number: int, tracker: Tracker) -> None:
        """Let a tracker hand over what is left; the run is done, so that a failure is a warning."""
        try:
            tracker.close()
        except Exception as error:  # noqa: BLE001 - as in `_log`
            name = type(tracker).__name__.strip("_")
            failed = f"{name} failed at its end ({type(error).__name__}: {error})"
            self._warn(number, f"{failed}; the run's numbers are in metrics.jsonl")

    def _log(self, number: int, tracker: Tracker, step: int, values: dict[str, float]) -> None:
        """Hand a step to a tracker; one that fails is left, for the numbers are in the files."""
        try:
            tracker.log(step, values)
        except Exception as error:  # noqa: BLE001 - a tracker's library raises what it likes
            self._trackers[number].remove(tracker)
            self._warn(
                number,
                f"{type(tracker).__name__.strip('_')} failed at step {step} "
                f"({type(error).__name__}: {error}); training goes on, with metrics.jsonl",
            )


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
