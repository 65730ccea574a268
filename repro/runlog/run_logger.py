"""The log of training in progress.

In the run's folder, which lies beside its record and is named by its digest:

    metrics.jsonl        one line per step: what the record's series will hold
    evaluations.jsonl    one line per evaluation on the development or test split
    warnings.txt         what was said of it on the way, if anything
    completions/         one Parquet file per rollout, where asked for (`--completions`)
    tensorboard/, wandb/ where asked for (`--log`)

None of it moves a number: a run with and without is the same run to the bit, so what is asked for
is no part of its configuration; at most a run that learns nothing ends early, as a failed one
(`--stop-idle`, `repro.runlog.watch`). A tracker that fails is left after one warning. It reaches
worker processes by the environment, as folders do.

A run that is stopped goes on from its last checkpoint, which may lie some steps before its last
line. Those steps are done again, to the same values: the lines from there on are dropped first.

Easy to get wrong: a process that is killed may leave half a line, which is no step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from repro.data.prompts import texts_of
from repro.evidence.procedure import NOTE, WARNING, Progress
from repro.runlog.trackers import TRACKERS, Tracker, name_of, parse_trackers
from repro.runlog.watch import LENIENT, MIXED, Watch
from repro.spec.checks import require
from repro.spec.config import RunConfig
from repro.spec.whole_files import replace_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from repro.rl.collect import Rollout
    from repro.rl.rollout_receipts import Values

# Holds the options of a run's worker processes as JSON.
VARIABLE = "REPRO_LOGGING"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """What is logged besides metrics.jsonl.

    A run ends as failed after `stop_idle` steps in a row that teach nothing; 0 never ends one. With
    `example` a prompt, a completion and its reward are shown before the first update.
    """

    trackers: tuple[str, ...] = ()
    completions: bool = False
    stop_idle: int = 0
    example: bool = False

    @classmethod
    def from_environment(cls) -> LogOptions:
        """Return the options that this process was started with; `ValueError` as of a line."""
        given = json.loads(os.environ.get(VARIABLE) or "{}")
        return cls(**given | {"trackers": parse_trackers(given.get("trackers"))})

    @classmethod
    def of_line(cls, args: argparse.Namespace) -> LogOptions:
        """Return the options of a command line; what cannot be used raises `ValueError`."""
        idle = getattr(args, "stop_idle", None)
        require(idle is None or idle >= 1, f"--stop-idle {idle}: needs 1 or more")
        return cls(
            trackers=parse_trackers(getattr(args, "log", None)),
            completions=getattr(args, "completions", False),
            stop_idle=idle or 0,
            example=getattr(args, "example", False),
        )

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """Let worker processes that start meanwhile keep this."""
        before = os.environ.get(VARIABLE)
        trackers = ",".join(self.trackers) or None
        os.environ[VARIABLE] = json.dumps(dataclasses.asdict(self) | {"trackers": trackers})
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            if before is not None:
                os.environ[VARIABLE] = before


class RunLogger:
    """Writes a run's steps into its folder and to trackers; to be used as a context manager.

    Trackers are opened before a policy is loaded, so that one that cannot be used says so at once.
    `progress` takes warnings; without it they are in the folder alone.
    """

    def __init__(
        self, run: RunConfig, folder: Path, options: LogOptions, progress: Progress | None = None
    ) -> None:
        self.run, self.folder, self.options, self._progress = run, folder, options, progress
        self._watch: Watch | None = None
        self._seen: dict[str, float | int | None] = {}
        self._steps = StepLines(folder / "metrics.jsonl")
        self._evaluations = StepLines(folder / "evaluations.jsonl")
        self._trackers: list[Tracker] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        run = self.run
        with ExitStack() as opening:
            for name in self.options.trackers:
                tracker = TRACKERS[name](name_of(run), run.digest(), run.resolved(), self.folder)
                opening.callback(self._tell, tracker, tracker.close, "at its end")
                self._trackers.append(tracker)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    def step(self, step: int, values: Values) -> None:
        """Take the values of a step, counted from 1."""
        every = {**values, **self._seen}
        self._take(self._steps, step, every)
        if self._watch is not None:
            self._warn(self._watch.step(every))

    def evaluation(self, step: int, values: Values) -> None:
        """Take what the development or test split gave after `step` steps, percent."""
        self._take(self._evaluations, step, values)

    def rollout(self, step: int, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the rollout after `step` steps, and write it where completions are kept.

        Raises `ValueError` where the run is to end here since it learns nothing.
        """
        if self.options.completions:
            from repro.runlog.completions import write_completions

            write_completions(self.folder / "completions", self.run, step, rollout, tokenizer)
        if self.options.example and step == 0 and self._progress is not None:
            self._progress(example_text(rollout, tokenizer), {NOTE: 1.0})
        self._seen = {LENIENT: rollout.lenient_sampled, MIXED: rollout.mixed}
        texts = texts_of(rollout.examples, tokenizer)
        scale = self.run.scale
        if self._watch is None:  # it goes on from the run's lines up to `step`
            if step and self._progress is not None:
                self._progress(f"goes on after step {step} of {scale.steps}", {NOTE: 1.0})
            lines = read_lines(self._steps.path) if step else []
            earlier = [line for line in lines if line["step"] <= step]
            self._watch = Watch(self.options.stop_idle, earlier, scale.steps)
        self._warn(self._watch.rollout(rollout, scale.updates_per_rollout, texts))

    def _warn(self, sentence: str | None) -> None:
        """Say something of the run, in its folder and where progress is shown."""
        if sentence is None:
            return
        text = f"{name_of(self.run)}: {sentence}"
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "warnings.txt").open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
        if self._progress is not None:
            self._progress(text, {WARNING: 1.0})

    def _take(self, file: StepLines, step: int, values: Values) -> None:
        file.write(step, {"time": datetime.now(UTC).isoformat(timespec="seconds"), **values})
        finite = {
            name: value
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        for tracker in self._trackers if step > file.last_before else ():
            self._tell(tracker, partial(tracker.log, step, finite), f"at step {step}")

    def _tell(self, tracker: Tracker, act: Callable[[], None], when: str) -> None:
        """Let a tracker act; one that fails is left, for the numbers are in the files."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a tracker's library raises what it likes
            self._trackers = [one for one in self._trackers if one is not tracker]
            failed = f"{type(tracker).__name__.strip('_')} failed {when}"
            why = f"({type(error).__name__}: {error}); the run's numbers are in metrics.jsonl"
            self._warn(f"{failed} {why}")


def example_text(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the first row of a rollout: its prompt with control tokens, its text, its reward."""
    rows = rollout.rows
    if not len(rows):
        return "no completion of the first rollout is trained on"
    graded = rollout.graded[0]
    prompt = tokenizer.decode(list(rows.prompts[int(rows.prompt_of_row[0])]))
    text = tokenizer.decode(rows.token_ids[0][rows.mask[0]].tolist())
    ended = "cut at the length limit" if bool(rows.truncated[0]) else "ended by itself"
    return (
        f"The model is given:\n{prompt}\nOne completion, {ended}:\n{text}\n"
        f"Its reward: {graded.reward} (gold answer: {graded.gold or 'none'})"
    )


class StepLines:
    """A file with one JSON object per step, without duplicates, made when the first line comes.

    `last_before` is the last step that the file held when it was opened; -1 for a new one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        earlier = read_lines(path)
        self.last_before = int(earlier[-1]["step"]) if earlier else -1
        self._goes_on = False

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the values of a step, counted from 1, and hand them to the operating system.

        A step that the file holds already is replaced, with all after it. Numbers that are not
        finite become null.
        """
        if not self._goes_on:  # what the file holds from `step` on is dropped, and half lines
            earlier = [line for line in read_lines(self.path) if line["step"] < step]
            replace_text(self.path, "".join(map(_line, earlier)))
            self._goes_on = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line({"step": step} | {key: _plain(v) for key, v in values.items()}))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the steps that a file holds, up to the first that is not whole."""
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            break
        lines.append(line)
    return lines


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
