"""What others measured: the bundles of a folder, judged by today's rules, shown as theirs.

They lie at `reported/<who>/<name>.jsonl.xz`; the folder's README says how they get there. Nothing
that is blessed or answered counts them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from repro.judge.bundle import bundles_in, judge_bundle, unbelieved
from repro.judge.check import Checked, device_name
from repro.report.numbers import device_title
from repro.report.tables import plain, table
from repro.report.tidy import Row, statements
from repro.report.verdict_words import Kind, counted, of_kind
from repro.run.places import PACKAGE

REPORTED = PACKAGE.parent / "reported"
_WHO = re.compile(r"[A-Za-z0-9-]{1,39}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MARKS = re.compile(r"([\\`*_\[\]])")
_SHORT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A bundle with its verdicts: whose account sent it, what it is of, what they come to.

    One that cannot be judged has its file's name and the reason in place of them.
    """

    who: str
    title: str
    said: str
    checked: Checked | None = None
    rows: tuple[Row, ...] = ()


def reports(folder: Path, expected: Path) -> list[Report]:
    """Return what the bundles in a folder report; empty without any."""
    if not any(folder.glob("*/*")):
        return []
    return [_report(path, expected) for path in bundles_in(folder)]


def _report(path: Path, expected: Path) -> Report:
    who = path.parent.name if _WHO.fullmatch(path.parent.name) else "no account's name"
    try:
        checked = judge_bundle(path, expected)
        with unbelieved(path):
            return _judged(who, checked, expected)
    except ValueError as error:
        return Report(who=who, title=path.name, said=str(error))


def _judged(who: str, checked: Checked, expected: Path) -> Report:
    target, tier = checked.selection.target.name, checked.selection.tier.value
    records = [*checked.evidence.every_record(), *checked.evidence.failed_records]
    known = {r.commit[:_SHORT] for r in records if _COMMIT.fullmatch(r.commit)}
    commits = ", ".join(sorted(known)) or "unknown"
    device = device_title(device_name(checked.evidence) or "")
    title = f"{target}, {tier} tier, {device}, commit {commits}: {len(records)} records"
    said = counted(of_kind(checked, Kind.PAPER)) or "no claim of the paper's"
    if refused := len(checked.evidence.refused):
        said += f"; {refused} records refused"
    rows = tuple(statements([checked], expected))
    return Report(who=who, title=title, said=said, checked=checked, rows=rows)


def reported_rows(folder: Path, expected: Path) -> list[str]:
    """Return a table of results reported by others, or a sentence if there are none."""
    found = reports(folder, expected)
    if not found:
        return ["Nobody has sent one yet."]
    rows = [[_as_text(cell) for cell in (one.who, one.title, one.said)] for one in found]
    return table(["reported by", "what", "verdicts"], rows)


def _as_text(said: str) -> str:
    """Return what a stranger's bundle may say so that Markdown shows it, and obeys none of it."""
    return _MARKS.sub(r"\\\1", plain(said))
