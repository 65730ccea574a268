"""The live display of a run: what is done, what each worker does now, and results so far.

On a terminal it is redrawn in place; elsewhere (a log, CI) each finished run is one line, and a
line every half minute says that the rest is under way.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from repro.evidence.printable import without_controls
from repro.run.worker import Event, Task
from repro.spec.tier import Tier


class Outlasting(Console):
    """A console whose reader (head, less) may leave: what runs goes on, and is no longer told."""

    def on_broken_pipe(self) -> None:
        """Let all further output of the process go to nothing."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Display:
    """Shows the events of a set of tasks, of which some were finished before."""

    def __init__(self, tasks: Sequence[Task], finished_before: int, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._active: dict[str, Event] = {}
        self._last_line = time.monotonic()
        self._total = sum(len(task.every) for task in tasks) + finished_before
        self._done = finished_before
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._bar = self._progress.add_task("runs", total=self._total, completed=finished_before)
        self._view = Live(console=console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> Display:
        if self._live:
            self._view.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._view.stop()

    def show(self, event: Event, metrics: Mapping[str, float] | None = None) -> None:
        """Take note of one event; `metrics` are those of the record of a finished run."""
        name = _name(event.task)
        if event.kind in ("warning", "note"):
            mark = "[yellow]warning[/] " if event.kind == "warning" else ""
            self._console.print(f"{mark}{escape(event.text)}", highlight=False)
            return
        if event.kind in ("started", "progress"):
            self._active[name] = event
            self._heartbeat()
            return
        self._active.pop(name, None)
        if event.kind in ("finished", "failed", "elsewhere"):
            self._done += len(event.task.every)
            self._progress.update(self._bar, completed=self._done)
        numbers = "  ".join(f"{key} {value:.1f}" for key, value in (metrics or {}).items())
        again = "it resumes from its checkpoint"
        if event.task.run.tier == Tier.SYSTEMS.value:
            again = "it is measured again from its beginning"
        label, rest = {
            "finished": ("[green]done[/]   ", numbers),
            "returned": ("[yellow]again[/]  ", _reason(event)),
            "failed": ("[red]failed[/] ", _reason(event)),
            "elsewhere": ("[green]there[/]  ", "recorded meanwhile"),
            "disk": ("[red]no disk[/]", _reason(event)),
            "stopped": ("[yellow]stopped[/]", again),
        }[event.kind]
        self._console.print(f"{label} {name:<34} {rest}", highlight=False)

    def _heartbeat(self) -> None:
        if self._live or time.monotonic() - self._last_line < 30:
            return
        self._last_line = time.monotonic()
        under_way = "; ".join(
            f"{_name(event.task)} {without_controls(event.text)} {_numbers(event.values)}".strip()
            for event in self._active.values()
        )
        self._console.print(
            f"{self._done} of {self._total} runs done; now {under_way}", markup=False
        )

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for name, event in sorted(self._active.items()):
            table.add_row("  " + name, _plain(event.text), _numbers(event.values))
        return Group(table, self._progress)


def _reason(event: Event) -> str:
    return _plain(event.text.splitlines()[0]) if event.text else "no reason given"


def _plain(text: str) -> str:
    return escape(without_controls(text))


def _name(task: Task) -> str:
    arms = {run.arm.name for run in task.every}
    if len(arms) > 1:
        return f"{len(task.every)} runs of {len(arms)} arms from {task.run.arm.name}"
    seeds = ", ".join(str(run.seed) for run in task.every)
    return f"{task.run.arm.name} {'seeds' if task.also else 'seed'} {seeds}"


def _numbers(values: Mapping[str, float]) -> str:
    rest = [f"{key} {value:.3g}" for key, value in values.items() if key not in ("step", "steps")]
    if "step" in values:
        rest.insert(0, f"step {values['step']:.0f}/{values.get('steps', 0):.0f}")
    return "  ".join(rest)
