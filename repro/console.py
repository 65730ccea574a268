"""Short tables for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from repro.check import Checked
from repro.report.verdicts import Kind, about, counted, of_kind, to_show, word

_COLOURS = {
    "reproduced": "green",
    "contradicted": "red",
    "inconclusive": "yellow",
    "not run": "dim",
}


def print_check(checked: Checked, console: Console | None = None) -> None:
    """Print the verdicts of one target."""
    console = console or Console()
    if checked.lacking:
        console.print(f"[red]{escape(checked.lacking)}[/]", highlight=False, soft_wrap=True)
        return
    target, tier = checked.selection.target, checked.selection.tier
    table = Table(
        title=f"{target.name}, {tier.value} tier: {checked.evidence.count} records",
        title_justify="left",
    )
    table.add_column("claim, bar or blessed value", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("because", overflow="fold")
    for verdict in to_show(checked):
        kind = f" ({about(verdict)})" if about(verdict) else ""
        table.add_row(
            escape(verdict.statement + kind),
            f"[{_COLOURS[verdict.status]}]{word(verdict)}[/]",
            escape(verdict.sentence),
        )
    console.print(table)
    if blessed := of_kind(checked, Kind.BLESSED):
        console.print(f"{Kind.BLESSED.value}: {counted(blessed)}", highlight=False)
    for path, reason in checked.evidence.refused:
        console.print(f"[red]refused[/] {escape(f'{path}: {reason}')}", highlight=False)
    for path, reason in checked.evidence.failed:
        console.print(f"[yellow]failed[/] {escape(f'{path}: {reason}')}", highlight=False)
