"""Short tables for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from repro.check import Checked

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
    table.add_column("claim or expectation", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("because", overflow="fold")
    blessed = [item for item in checked.verdicts if item.source.startswith("measured")]
    for verdict in checked.verdicts:
        if verdict in blessed and verdict.status == "reproduced":
            continue
        colour = _COLOURS[verdict.status]
        about = "" if verdict.about == "claim" else f" ({verdict.about})"
        table.add_row(
            escape(verdict.statement + about),
            f"[{colour}]{verdict.status}[/]",
            escape(verdict.sentence),
        )
    console.print(table)
    if blessed:
        held = sum(item.status == "reproduced" for item in blessed)
        console.print(f"{held} of {len(blessed)} blessed values reproduced", highlight=False)
    for path, reason in checked.evidence.refused:
        console.print(f"[red]refused[/] {escape(f'{path}: {reason}')}", highlight=False)
    for path, reason in checked.evidence.failed:
        console.print(f"[yellow]failed[/] {escape(f'{path}: {reason}')}", highlight=False)
