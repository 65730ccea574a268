"""The command `check`: verdicts as short tables on the terminal, or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import markup
from rich.console import Console
from rich.table import Table

from repro.evidence.origins import seeds_text
from repro.evidence.printable import without_controls
from repro.evidence.verdicts.verdict import Status
from repro.judge.blessed import blessed_of
from repro.judge.bundle import bundles_in, judge_bundle, untrusted
from repro.judge.check import Checked, check_selection, checked_json, seeds_by_device
from repro.report.numbers import device_title
from repro.report.run_report import chosen_selections
from repro.report.tidy import write_table
from repro.report.verdict_words import Kind, about, counted, kind_of, labelled, of_kind, to_show
from repro.run.places import expected_folder, runs_folder
from repro.run.select import CHANGING
from repro.spec.arm import require

_COLOURS: Mapping[Status, str] = {
    "reproduced": "green",
    "contradicted": "red",
    "below a tenth": "green",
    "excluded": "cyan",
    "no difference": "cyan",
    "inconclusive": "yellow",
    "not judged": "yellow",
    "not testable": "dim",
    "not addressed": "dim",
    "not run": "dim",
}


# The paper's claims first; values that the suite holds against itself last.
_ORDER = tuple(Kind)
_WIDTH = 120


def escape(text: str) -> str:
    """Return a text that rich shows literally, without control characters."""
    return markup.escape(without_controls(text))


class _Pipe(Console):
    """A console whose reader (head, less) may leave early: then rich would exit with status 1."""

    def on_broken_pipe(self) -> None:
        """Let the command line handle it, which ends quietly."""
        raise BrokenPipeError


def print_check(checked: Checked, console: Console | None = None) -> None:
    """Print the verdicts of one target."""
    console = console or _console()
    if checked.lacking:
        console.print(f"[red]{escape(checked.lacking)}[/]", highlight=False, soft_wrap=True)
        return
    target, tier = checked.selection.target, checked.selection.tier
    devices = seeds_by_device(checked.evidence)
    where = "".join(
        f", {device_title(device)}" + (f" ({seeds_text(seeds)})" if len(devices) > 1 else "")
        for device, seeds in devices.items()
    )
    title = f"{target.name}, {tier.value} tier{where}: {checked.evidence.count} records"
    if not target.claims:
        line = f"{escape(title)}; {escape(target.name)} states no claim of its own."
        console.print(line, highlight=False, soft_wrap=True)
    table = Table(title=escape(title), title_justify="left")
    table.add_column("claim, bar or blessed value", overflow="fold")
    table.add_column("verdict", overflow="fold", min_width=12)
    table.add_column("because", overflow="fold")
    shown = to_show(checked)
    for verdict in sorted(shown, key=lambda item: _ORDER.index(kind_of(item))):
        kind = f" ({about(verdict)})" if about(verdict) else ""
        table.add_row(
            escape(verdict.statement + kind),
            f"[{_COLOURS[verdict.status]}]{labelled(verdict)}[/]",
            escape(verdict.sentence),
        )
    if shown:
        console.print(table)
    if blessed := of_kind(checked, Kind.BLESSED):
        console.print(f"{Kind.BLESSED.value}: {counted(blessed)}", highlight=False)
    for path, reason in checked.evidence.refused:
        console.print(f"[red]refused[/] {escape(f'{path}: {reason}')}", highlight=False)
    for path, reason in checked.evidence.failed:
        console.print(f"[yellow]failed[/] {escape(f'{path}: {reason}')}", highlight=False)


def _console() -> Console:
    """Return the terminal; anything else (a pipe, a log) takes lines of 120 columns."""
    console = _Pipe()
    return console if console.is_terminal else _Pipe(width=_WIDTH)


def conclusion(checks: Sequence[Checked]) -> str:
    """Return the result of the checks in a sentence: the paper's claims, this suite's faults."""
    paper = [verdict for item in checks for verdict in of_kind(item, Kind.PAPER)]
    claims = f"Claims of the paper: {counted(paper) or 'none judged here'}"
    named = {
        "this suite is at fault in": [i for i in checks if any(v.own_fault for v in i.verdicts)],
        "records were refused of": [item for item in checks if item.evidence.refused],
        "there are no records of": [item for item in checks if item.lacking],
    }
    parts = [
        f"{what} {', '.join(dict.fromkeys(item.selection.target.name for item in items))}"
        for what, items in named.items()
        if items
    ]
    return f"{claims}; {'; '.join(parts) or 'nothing says that this suite is at fault'}."


def main_check(args: argparse.Namespace) -> int:
    """Carry out `repro check`; return the exit status."""
    expected = expected_folder(args.expected)
    table = args.table or "-"
    require(table == "-" or table.endswith(".csv"), f"--table {table}: needs a FILE ending in .csv")
    named = args.targets or args.table or args.runs
    require(named, "check: name a target (see `repro list`), or give --runs or --table")
    if args.blessed:
        given = [name for name in ("runs", *CHANGING) if vars(args).get(name)]
        require(not given, f"--blessed reads stored records; leave out --{', --'.join(given)}")
        checks = blessed_of(expected, args.targets, args.tier)
    else:
        folder = runs_folder(args.runs)
        chosen = chosen_selections(args, folder)
        checks = [check_selection(selection, folder, expected) for selection in chosen]
    if args.table:
        write_table(checks, expected, args.table)
        if args.table != "-":
            print(conclusion(checks))  # noqa: T201
    elif args.json:
        print(json.dumps([checked_json(item) for item in checks], indent=1))  # noqa: T201
    else:
        for item in checks:
            print_check(item)
        print(conclusion(checks))  # noqa: T201
    if any(item.faulty for item in checks):
        return 1
    return 0 if all(item.sound for item in checks) else 2


def main_verify(place: Path, expected: Path) -> int:
    """Carry out `repro bundle --verify`; return the exit status."""
    checks = []
    for path in bundles_in(place):
        checked = judge_bundle(path, expected)
        with untrusted(path):
            print_check(checked)
        checks.append(checked)
    print(conclusion(checks))  # noqa: T201
    return 1 if any(item.evidence.refused or item.lacking for item in checks) else 0
