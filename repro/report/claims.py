"""The page of claims: how many of each kind have which verdict, accuracies, then every claim.

Claims of the paper, questions that it leaves open, claims about the machinery and bars are counted
apart. A tier speaks for itself alone; its devices stand side by side. The tables of claims are
folded, a summary per target and tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from repro.evidence.verdicts.verdict import Verdict
from repro.judge.check import Checked
from repro.report.numbers import device_heads, device_title, unit_words
from repro.report.tables import (
    NOTHING,
    Group,
    Line,
    arms_table,
    device_of,
    folded,
    grouped,
    paper_columns,
    plain,
    side_by_side,
    table,
    target_of,
)
from repro.report.verdicts import CLAIMS, Kind, all_bars, counted, labelled, of_kind
from repro.spec.tier import Tier

KINDS = (*CLAIMS, Kind.BAR)


def place_text(tier: Tier, device: str) -> str:
    """Return where records were made: `smoke, CPU` or `systems, NVIDIA H200`."""
    return f"{tier.value}, {device_title(device)}"


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
    rows = [
        [kind.value, *(
            counted(item for checked in group for item in _verdicts(checked, kind, expected))
            for group in places.values()
        )]
        for kind in KINDS
    ]  # fmt: skip
    return table(["", *places], rows)[:-1] if places else NOTHING


def accuracy_rows(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return the tables for which the paper prints accuracies: its columns, then each of ours."""
    tables: dict[str, list[Checked]] = {}
    for checked in checks:
        target = checked.selection.target
        if target.headline and checked.evidence.count and paper_columns(target, expected):
            tables.setdefault(target.name, []).append(checked)
    lines = [line for same in tables.values() for line in _accuracies(same, expected)]
    return lines[:-1] or NOTHING


def _accuracies(checks: Sequence[Checked], expected: Path) -> list[str]:
    target = checks[0].selection.target
    metric = target.metric(target.headline or "")
    places = [place_text(item.selection.tier, device_of(item)) for item in checks]
    columns = [(place, item, metric) for place, item in zip(places, checks, strict=True)]
    what = f"{metric.name} {unit_words(metric.unit)}, mean ± 95 % interval:"
    lines = arms_table(target, paper_columns(target, expected), columns)
    return [f"**{target.title}**, {what}", "", *lines]


def target_rows(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return a table per tier, a row per target: claims and bars by verdict."""
    lines: list[str] = []
    groups = grouped(checks)
    for tier in Tier:
        parts: dict[str, list[Line]] = {}
        for group in groups:
            for device, checked in group.items():
                if checked.selection.tier is tier:
                    own = counts_of(checked, expected)
                    if any(own):
                        line = Line(common=(target_of(group).title,), own=own)
                        parts.setdefault(device, []).append(line)
        rows = side_by_side(["target"], [kind.value for kind in KINDS], parts)
        places = " and ".join(device_title(device) for device in parts)
        lines += [f"**{tier.value} tier**, {places}:", "", *rows] if rows else []
    return lines[:-1] or NOTHING


def claims_rows(checks: Sequence[Checked]) -> list[str]:
    """Return every claim with its verdict and reason, a table per target, folded below its counts.

    A target's summary has its title and, per device, how many of its claims have which verdict.
    """
    lines: list[str] = []
    for group in grouped(checks):
        parts = {device: _claim_lines(checked) for device, checked in group.items()}
        rows = side_by_side(["claim", "source"], ["verdict", "because"], parts)
        lines += folded(_summary(group), rows)
    return lines[:-1] or NOTHING


def _summary(group: Group) -> str:
    counts = "; ".join(
        f"({place_text(checked.selection.tier, device)}): "
        + counted(verdict for _, verdict in checked.statements())
        for device, checked in group.items()
    )
    return f"<b>{escape(target_of(group).title, quote=False)}</b> {counts}"


def _claim_lines(checked: Checked) -> list[Line]:
    return [
        Line(
            common=(item.statement, item.source),
            own=(labelled(item), plain(item.sentence)),
            name=item.name,
        )
        for _, item in checked.statements()
    ]
