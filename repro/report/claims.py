"""What README says was measured: the paper's accuracies beside ours, then a line a target.

The claims themselves, with their verdicts, stand on a page of their own (`docs/claims.md`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from repro.check import Checked, device_name
from repro.evidence.verdict import Verdict
from repro.report.numbers import OWN_BAR, cell_text, paper_columns, stated_bars, unit_words
from repro.spec.tier import Tier

_NOTHING = "No records are blessed yet."
_STATUSES = ("reproduced", "contradicted", "inconclusive", "not run")


def results_rows(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return README's results: tables that the paper prints accuracies for, then all targets."""
    if not checks:
        return [_NOTHING]
    lines: list[str] = []
    by_target: dict[str, list[Checked]] = {}
    for checked in checks:
        target = checked.selection.target
        if target.headline and checked.evidence.count and paper_columns(target, expected):
            by_target.setdefault(target.name, []).append(checked)
    for group in by_target.values():
        lines += _beside_the_paper(group, expected)
    return lines + _overview(checks, expected)


def _beside_the_paper(group: Sequence[Checked], expected: Path) -> list[str]:
    """Return one target's arms: the paper's columns, then one for each tier and device."""
    target = group[0].selection.target
    assert target.headline is not None
    columns = paper_columns(target, expected)
    metric = target.metric(target.headline)
    measured = [checked.evidence.values(metric.name) for checked in group]
    heads = [*(f"paper, {name}" for name in columns), *map(_place, group)]
    lines = [
        f"**{target.title}**, {metric.name} {unit_words(metric.unit)}, mean ± 95 % interval:",
        "",
        f"| arm | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for arm in target.arms:
        cells = [columns[name].get(arm.name, "") for name in columns]
        cells += [
            cell_text(list(values.get(arm.name, {}).values()), unit=metric.unit)
            for values in measured
        ]
        lines.append(f"| {arm.label} | {' | '.join(cells)} |")
    return [*lines, ""]


def _place(checked: Checked) -> str:
    tier, device = checked.selection.tier, device_name(checked.evidence)
    whose = ", tiny policy" if tier is Tier.SMOKE else f", {device}" if device else ""
    return f"`{tier.value}` tier{whose}"


def _overview(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return a line a target and tier: claims by verdict, and bars of this suite's own."""
    lines = [
        "Claims of the paper and of this suite about its machinery, by verdict, and the suite's "
        "own bars on speed and size:",
        "",
        f"| target | tier | {' | '.join(_STATUSES)} | bars that hold | undecided | missed |",
        "|---" * (len(_STATUSES) + 5) + "|",
    ]
    for checked in checks:
        if not checked.evidence.count:
            continue
        claims: Counter[str] = Counter(item.status for item in _claims(checked, own=False))
        own: Counter[str] = Counter(item.status for item in _claims(checked, own=True))
        own.update(verdict.status for _, verdict in stated_bars(checked, expected))
        cells = [_count(claims[status]) for status in _STATUSES]
        cells += [_count(own[status]) for status in ("reproduced", "inconclusive", "contradicted")]
        title = in_cell(checked.selection.target.title)
        lines.append(f"| {title} | {_place(checked)} | {' | '.join(cells)} |")
    return lines


def claims_rows(checks: Sequence[Checked]) -> list[str]:
    """Return every claim with its verdict and the sentence that gives the reason."""
    if not checks:
        return [_NOTHING]
    lines: list[str] = []
    for checked in checks:
        claims = _claims(checked, own=None)
        if not claims:
            continue
        lines += [f"**{checked.selection.target.title}**, {_place(checked)}:", ""]
        lines += ["| claim | source | verdict | because |", "|---|---|---|---|"]
        for verdict in claims:
            cells = (verdict.statement, verdict.source, verdict.status, verdict.sentence)
            lines.append(f"| {' | '.join(map(in_cell, cells))} |")
        lines.append("")
    return lines[:-1]


def _claims(checked: Checked, *, own: bool | None) -> list[Verdict]:
    """Return verdicts on claims; `own` takes this suite's bars alone or leaves them out."""
    found: Iterable[Verdict] = checked.verdicts
    return [
        verdict
        for verdict in found
        if verdict.about in ("claim", "mechanism")
        and (own is None or own == (verdict.source == OWN_BAR))
    ]


def in_cell(text: str) -> str:
    """Return a text as a cell of a Markdown table takes it."""
    return text.replace("|", "\\|").replace("\n", " ")


def _count(number: int) -> str:
    return str(number) if number else ""
