"""The command `check`: verdicts as short tables on the terminal, or as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich import markup
from rich.console import Console
from rich.table import Table

from repro.evidence.origins import seeds_text
from repro.evidence.printable import without_controls
from repro.evidence.store import WHOLE
from repro.judge.blessed import blessed_of
from repro.judge.bundle import Judged, judge_bundle, judge_folder, untrusted
from repro.judge.check import Checked, check_selection, checked_json, exit_status
from repro.report.ending import bar_word, ending
from repro.report.numbers import device_title
from repro.report.run_report import chosen_selections
from repro.report.tidy import write_table
from repro.report.verdict_words import COLOUR, Kind, about, as_before_lines, labelled, of_kind, word
from repro.run.places import expected_folder, runs_folder
from repro.run.select import CHANGING
from repro.spec.checks import require

_WIDTH = 120


def escape(text: str) -> str:
    """Return a text that rich shows literally, without control characters."""
    return markup.escape(without_controls(text))


class _Pipe(Console):
    """A console whose reader (head, less) may leave early: then rich would exit with status 1."""

    def on_broken_pipe(self) -> None:
        """Let the command line handle it, which ends quietly."""
        raise BrokenPipeError


def print_check(checked: Checked) -> None:
    """Print the verdicts of one target; of anything but a terminal a line has 120 columns."""
    terminal = _Pipe()
    console = terminal if terminal.is_terminal else _Pipe(width=_WIDTH)
    if checked.lacking:
        console.print(f"[red]{escape(checked.lacking)}[/]", highlight=False, soft_wrap=True)
        return
    target, tier = checked.selection.target, checked.selection.tier
    devices = checked.evidence.devices
    where = "".join(
        f", {device_title(device)}" + (f" ({seeds_text(seeds)})" if len(devices) > 1 else "")
        for device, seeds in devices.items()
    )
    title = f"{target.name}, {tier.value} tier{where}: {checked.evidence.count_text}"
    if not target.claims:
        line = f"{escape(title)}; {escape(target.name)} states no claim of its own."
        console.print(line, highlight=False, soft_wrap=True)
    table = Table(title=escape(title), title_justify="left")
    table.add_column("claim or target", overflow="fold")
    table.add_column("verdict", overflow="fold", min_width=12)
    table.add_column("because", overflow="fold")
    # The paper's claims first; bars, which the suite sets itself, last.
    for verdict in [item for kind in Kind for item in of_kind(checked, kind)]:
        kind = f" ({about(verdict)})" if about(verdict) else ""
        said = labelled(verdict)
        if verdict.is_bar and verdict.status == "contradicted":
            said = said.replace(word(verdict), bar_word(verdict), 1)
        table.add_row(
            escape(verdict.statement + kind),
            f"[{COLOUR[verdict.status]}]{said}[/]",
            escape(verdict.sentence),
        )
    if checked.verdicts:
        console.print(table)
    for line in as_before_lines(checked.as_before):
        console.print(escape(line), highlight=False, soft_wrap=True)
    for path, reason in checked.evidence.refused:
        console.print(f"[red]refused[/] {escape(f'{path}: {reason}')}", highlight=False)
    for path, reason in checked.evidence.failed.values():
        console.print(f"[yellow]failed[/] {escape(f'{path}: {reason}')}", highlight=False)


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
            print(ending(checks))  # noqa: T201
    elif args.json:
        print(json.dumps([checked_json(item) for item in checks], indent=1))  # noqa: T201
    else:
        for item in checks:
            print_check(item)
        print(ending(checks))  # noqa: T201
    return exit_status(checks)


def main_verify(place: Path, expected: Path) -> int:
    """Carry out `repro bundle --verify`; return the exit status.

    Of a folder, a bundle that cannot be judged costs itself alone; then the status is 2. It is 1
    when a record is refused, or when runs in a folder are also elsewhere.
    """
    if place.is_dir():
        judged = judge_folder(place, expected)
        require(bool(judged), f"{place} holds no bundle: needs WHO/NAME{WHOLE} in it")
    else:
        judged = [Judged(path=place, checked=judge_bundle(place, expected))]
    checks = []
    for one in judged:
        if one.checked is not None:
            checks.append(one.checked)
            with untrusted(one.path):
                print_check(one.checked)
    copied = [f"{one.path}: {one.elsewhere}" for one in judged if one.elsewhere]
    print("\n".join([*copied, ending(checks)]))  # noqa: T201
    broken = [one.why for one in judged if one.why]
    require(not broken, "; ".join(broken))
    return 1 if copied or any(item.evidence.refused or item.lacking for item in checks) else 0
