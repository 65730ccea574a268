"""The comparisons of `compare` and `regress`: a folder's records with another's or blessed ones.

Both go through what `check` asks of records: refused, failed and spoilt ones become problems of
their side, and a target with such a problem is not judged. A judgement is written as plain lines.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from repro.evidence.origins import devices_of, named_commits
from repro.evidence.printable import one_line
from repro.evidence.store import blessed_sources
from repro.judge.as_before import (
    VERDICTS,
    Comparison,
    MetricRow,
    Side,
    by_severity,
    compare,
    side_of,
)
from repro.judge.check import stored_evidence
from repro.judge.gathering import gather
from repro.judge.recorded import recorded_selections
from repro.report.verdict_words import row_text
from repro.run.places import absence_text
from repro.run.select import Selection, select
from repro.spec.checks import require
from repro.spec.tier import parse_tier
from repro.targets import find, runs_of

Status = Literal["fine", "regressed", "could not judge"]

EXIT_STATUS: dict[Status, int] = {"fine": 0, "regressed": 1, "could not judge": 2}
BLESSED = "blessed"
LINES = 10
_PROBLEMS_SHOWN = 3
BLESS_COMMAND = "python -m repro bless --device --tier {tier} --runs {runs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All comparisons for one question of `compare` or `regress`, and their joint result."""

    comparisons: tuple[Comparison, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def rows(self) -> list[MetricRow]:
        """All rows: regressed ones first, the largest losses first."""
        return by_severity([row for item in self.comparisons for row in item.rows])

    @property
    def every_problem(self) -> list[str]:
        """Each reason for which something could not be judged."""
        own = [problem for comparison in self.comparisons for problem in comparison.problems]
        return [*self.problems, *own]

    @property
    def status(self) -> Status:
        """A regression that is shown counts, whatever else could not be judged."""
        if any(comparison.worse for comparison in self.comparisons):
            return "regressed"
        return "could not judge" if self.every_problem or not self.rows else "fine"

    @property
    def exit_status(self) -> int:
        """0 fine, 1 regressed, 2 could not judge."""
        return EXIT_STATUS[self.status]


def judgement_of(
    old: str, new: Path, names: Sequence[str], tier: str | None, expected: Path
) -> Judgement:
    """Compare the records of two folders.

    Raises `ValueError` if a folder does not exist, or a name is no target's or no tier's.

    Parameters
    ----------
    old
        A folder of runs, or `blessed` for the blessed records of the device of the new ones.
    names
        Targets; with none, all that either folder has records of.
    tier
        Its name; None for every tier at which there are records.
    """
    folders = [new] if old == BLESSED else [Path(old), new]
    for folder in folders:
        require(folder.is_dir(), f"there are no records: {absence_text(folder, folder)}")
    selections = selected(names, parse_tier(tier).value if tier else None, folders)
    if not selections:
        asked = ", ".join(names) or "any target"
        where = " or ".join(map(str, folders))
        return Judgement(problems=(f"there is no record of {asked} in {where}",))
    comparisons = []
    for selection in selections:
        now = side_of(str(new), selection, gather(selection, new, expected))
        if old == BLESSED:
            devices = devices_of(now.every())
            device = devices.pop() if len(devices) == 1 else None
            before = blessed_side(expected, selection, device, new)
        else:
            before = side_of(old, selection, gather(selection, Path(old), expected))
        comparisons.append(compare(selection.source, selection.tier, before, now))
    return Judgement(comparisons=tuple(comparisons))


def selected(names: Sequence[str], tier: str | None, folders: Sequence[Path]) -> list[Selection]:
    """Return each target, of those named, at each tier at which a folder has records of its own.

    A target that is named and has none is returned at one tier all the same: that its records are
    missing is for the comparison to say.
    """
    asked = dict.fromkeys(runs_of(find(name)).name for name in names)
    recorded = {
        (item.source.name, item.tier): item
        for folder in folders
        for item in recorded_selections(tier, folder)
        if item.target is item.source and (not asked or item.source.name in asked)
    }
    known = {name for name, _ in recorded}
    for name in (name for name in asked if name not in known):
        at = tier or list(find(name).scales)[-1].value
        recorded |= {(one.source.name, one.tier): one for one in select([name], tier=at)}
    return [*recorded.values()]


def blessed_side(expected: Path, selection: Selection, device: str | None, runs: Path) -> Side:
    """Return the blessed records of a selection on a device; a problem where there are none.

    Parameters
    ----------
    runs
        The folder whose records may become the baseline, for that sentence.
    """
    command = BLESS_COMMAND.format(tier=selection.tier.value, runs=runs)
    stored = stored_evidence(selection, device, expected)
    if stored is not None:
        side = side_of("blessed records", selection, stored)
        again = tuple(f"{why}; to replace the baseline: {command}" for why in side.problems)
        return replace(side, problems=again)
    sources = blessed_sources(expected, selection.tier)
    known = ", ".join(str(item.device) for item in sources if item.has(selection.source.name))
    sentence = (
        f"nothing is blessed on {device or 'the device of these records'}"
        + (f" (but on {known})" if known else "")
        + f"; to make these records the baseline: {command}"
    )
    return Side(name="blessed records", problems=(sentence,))


def headline(judgement: Judgement) -> str:
    """Return the verdict in a line."""
    rows = len(judgement.rows)
    if judgement.status == "regressed":
        lost = sum(len(comparison.worse) for comparison in judgement.comparisons)
        return f"regressed: {lost} of {rows} values are worse by more than their threshold"
    if judgement.status == "could not judge":
        return f"could not judge: {rows} values compared, {len(judgement.every_problem)} not judged"
    return f"fine: none of {rows} values is shown to be worse by more than its threshold"


def plain_lines(judgement: Judgement, files: str = "", most: int | None = LINES) -> list[str]:
    """Return lines without markup: verdict, counts, reasons, the worst rows.

    Parameters
    ----------
    files
        Where the rest is, for the last line.
    most
        How many lines there may be; None for all rows and reasons.
    """
    found = Counter(row.verdict for row in judgement.rows)
    counts = ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS)
    first = [headline(judgement), counts]
    last = [line for line in (provenance_text(judgement), files) if line]
    problems = judgement.every_problem
    if most is not None and len(problems) > _PROBLEMS_SHOWN:
        more = len(problems) - (_PROBLEMS_SHOWN - 1)
        problems = [*problems[: _PROBLEMS_SHOWN - 1], f"and {more} more reasons"]
    changed = [row for row in judgement.rows if row.verdict != "unchanged"]
    middle = [*problems, *map(row_text, changed)]
    room = None if most is None else most - len(first) - len(last)
    return [one_line(line) for line in (*first, *middle[:room], *last)]


def provenance_text(judgement: Judgement) -> str:
    """Return where both sides are from, and what software differs; empty without records."""
    olds = [comparison.old for comparison in judgement.comparisons]
    news = [comparison.new for comparison in judgement.comparisons]
    old, new = _origin(olds), _origin(news)
    if not (old and new):
        return ""
    before, now = _software(olds), _software(news)
    moved = [
        f"{name} {before[name]} -> {now[name]}"
        for name in before
        if before[name] and now[name] and before[name] != now[name]
    ]
    return f"{old} -> {new}" + "".join(f"; {change}" for change in moved)


def _software(sides: Sequence[Side]) -> dict[str, str]:
    """Return the versions of the software that timings depend on, by name."""
    versions: dict[str, set[str]] = {name: set() for name in ("torch", "triton", "driver")}
    for record in (record for side in sides for record in side.every()):
        packages = record.environment.get("packages", {})
        gpus = record.environment.get("gpu")
        stated = {name: packages.get(name) for name in ("torch", "triton")}
        if isinstance(gpus, list) and gpus:
            stated["driver"] = gpus[0].get("driver_version")
        for name, value in stated.items():
            versions[name] |= {value} if value else set()
    return {name: ", ".join(sorted(values)) for name, values in versions.items()}


def _origin(sides: Sequence[Side]) -> str:
    records = [record for side in sides for record in side.every()]
    if not records:
        return ""
    names = ", ".join(dict.fromkeys(side.name for side in sides if side.every()))
    devices = ", ".join(sorted(str(device or "no GPU") for device in devices_of(records)))
    commits = ", ".join(named_commits(records, 12))
    return f"{names} ({devices}, commit {commits})"


def print_judgement(judgement: Judgement, files: str = "") -> None:
    """Print ten plain lines at most; on a terminal, all rows that are not unchanged."""
    lines = plain_lines(judgement, files, LINES if not sys.stdout.isatty() else None)
    sys.stdout.write("".join(line + "\n" for line in lines))


def markdown(judgement: Judgement) -> str:
    """Return the judgement as a CI step's summary has it: every line, as it is."""
    lines = plain_lines(judgement, most=None)
    return "\n".join([f"## Regression: {judgement.status}", "", "```", *lines, "```", ""])
