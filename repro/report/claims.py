"""The page of claims: how many of each kind have which verdict, then every claim.

Claims of the paper, questions that it leaves open, claims about the machinery and bars are counted
apart. A tier speaks for itself alone; of its claims each has one row, with a cell per device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repro.evidence.verdicts.verdict import SHOWN, Verdict
from repro.judge.check import Checked
from repro.report.numbers import device_heads
from repro.report.tables import NOTHING, device_of, plain
from repro.report.tidy import Row, grouped_by, rendered, statements
from repro.report.verdict_words import CLAIMS, OWN_BAR, Kind, all_bars, counted, of_kind

KINDS = (*CLAIMS, Kind.BAR)
# Statuses that need no reason.
_SETTLED = (*SHOWN, "no difference", "excluded")


def _verdicts(checked: Checked, kind: Kind, expected: Path) -> list[Verdict]:
    return all_bars(checked, expected) if kind is Kind.BAR else of_kind(checked, kind)


def counts_of(checked: Checked, expected: Path) -> tuple[str, ...]:
    """Return the counts of a check's verdicts, a text per kind of `KINDS`."""
    return tuple(counted(_verdicts(checked, kind, expected)) for kind in KINDS)


def count_rows(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return how many verdicts of each kind there are, a column per tier and device."""
    recorded = [checked for checked in checks if checked.evidence.count]
    names = device_heads(dict.fromkeys(device_of(checked) for checked in recorded))
    places: dict[str, list[Checked]] = {}
    for checked in recorded:
        place = f"{checked.selection.tier.value}, {names[device_of(checked)]}"
        places.setdefault(place, []).append(checked)
    counts = {
        place: {
            kind.value: counted(v for one in group for v in _verdicts(one, kind, expected))
            for kind in KINDS
        }
        for place, group in places.items()
    }
    kinds = [kind.value for kind in KINDS]
    return rendered("counts.md", places=counts, kinds=kinds) if counts else NOTHING


def claims_rows(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return a table per target and tier with a row for each claim that its tier addresses."""
    wanted = {kind.value for kind in CLAIMS}
    rows = [row for row in statements(checks, expected) if row.device]
    claims = [row for row in rows if row.kind in wanted or row.source == OWN_BAR]
    groups = grouped_by(claims, lambda row: f"{row.target} {row.tier}")
    written = [_group(rows) for rows in groups.values()]
    return rendered("claims.md", groups=written) if written else NOTHING


def _group(rows: Sequence[Row]) -> dict[str, Any]:
    devices = list(dict.fromkeys(row.device for row in rows))
    addressed = [row for row in rows if row.status != "not addressed"]
    lines = []
    for same in grouped_by(addressed, lambda row: row.name).values():
        cells = {row.device: _cell(row) for row in same}
        about = "" if same[0].kind == Kind.PAPER.value else f" ({_BESIDE[same[0].kind]})"
        lines.append({
            "statement": same[0].statement + about,
            "paper": next((row.stated_by_paper for row in same if row.stated_by_paper), ""),
            "cells": [cells.get(device, "") for device in devices],
        })  # fmt: skip
    return {
        "title": rows[0].title,
        "places": f"{rows[0].tier}, `{rows[0].target}`",
        "devices": devices,
        "rows": lines,
        "unaddressed": (len(rows) - len(addressed)) // len(devices),
    }


# Note after a claim that is not the paper's.
_BESIDE = {
    Kind.OPEN.value: "open question",
    Kind.MACHINERY.value: "machinery",
    Kind.BAR.value: "bar",
}


def _cell(row: Row) -> str:
    """Return effect, interval and verdict; the reason, too, where nothing was decided."""
    reason = "" if row.status in _SETTLED or row.measured else f" ({plain(row.because)})"
    return f"{row.measured}: {row.verdict}" if row.measured else f"{row.verdict}{reason}"
