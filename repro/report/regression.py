"""The commands `compare` and `regress`: whether records are worse, by `repro.judge.as_before`.

A folder's records are compared with another's, or with blessed ones. Both sides go through what
`check` asks of records: refused, failed and spoilt ones become problems of their side, and a target
with such a problem is not judged.

The exit status is 0 where nothing is shown to be worse, 1 where something regressed, and 2 where
nothing could be judged: no GPU, nothing blessed on this kind of device, no records, or records that
are refused, failed or of another configuration.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from repro.door.command_line import build_parser
from repro.evidence.origins import devices_of, named_commits
from repro.evidence.printable import one_line
from repro.evidence.provenance import source_commit
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
from repro.run import execute
from repro.run.places import absence_text, expected_folder, runs_folder
from repro.run.select import Selection, select
from repro.spec.checks import require
from repro.spec.tier import Tier, parse_tier
from repro.spec.whole_files import replace_text
from repro.targets import find

Status = Literal["fine", "regressed", "could not judge"]

EXIT_STATUS: dict[Status, int] = {"fine": 0, "regressed": 1, "could not judge": 2}
BLESSED = "blessed"
COULD_NOT_JUDGE = EXIT_STATUS["could not judge"]
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
# What `regress` measures when no target is named.
TARGETS_BY_DEFAULT = ("table6", "table3", "step_lengths", "scaling", "memory_budgets", "kernels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All comparisons for one question of `compare` or `regress`, and their joint result.

    `advice` is what to do where the blessed records could not be judged by.
    """

    comparisons: tuple[Comparison, ...] = ()
    advice: str = ""

    @property
    def rows(self) -> list[MetricRow]:
        """All rows: regressed ones first, the largest losses first."""
        return by_severity([row for item in self.comparisons for row in item.rows])

    @property
    def problems(self) -> list[str]:
        """Each reason for which something could not be judged."""
        return [problem for comparison in self.comparisons for problem in comparison.problems]

    @property
    def status(self) -> Status:
        """A regression that is shown counts, whatever else could not be judged."""
        if any(comparison.worse for comparison in self.comparisons):
            return "regressed"
        return "could not judge" if self.problems or not self.rows else "fine"

    def text(self) -> str:
        """Return plain lines: verdict, counts, reasons, rows that are not unchanged, origins."""
        found = Counter(row.verdict for row in self.rows)
        worse = sum(len(one.worse) for one in self.comparisons)
        sides = [[one.old for one in self.comparisons], [one.new for one in self.comparisons]]
        lines = [
            f"{self.status}: {len(self.rows)} values compared, {worse} worse by more than their "
            f"threshold, {len(self.problems)} not judged",
            ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS),
            *self.problems,
            *(row_text(row) for row in self.rows if row.verdict != "unchanged"),
            *([self.advice] if self.advice and self.problems else []),
            *([" -> ".join(origins)] if all(origins := [*map(_origin, sides)]) else []),
        ]
        return "".join(f"{one_line(line)}\n" for line in lines)


def _origin(sides: Sequence[Side]) -> str:
    """Return whose records these are, and what timings depend on; empty without records."""
    records = [record for side in sides for record in side.every()]
    if not records:
        return ""
    software = {
        f"{name} {version}"
        for record in records
        for name, version in record.environment.get("packages", {}).items()
        if name in ("torch", "triton") and version
    }
    gpus = [gpu for record in records for gpu in record.environment.get("gpu") or ()]
    software |= {f"driver {gpu['driver_version']}" for gpu in gpus if "driver_version" in gpu}
    names = ", ".join(dict.fromkeys(side.name for side in sides if side.every()))
    devices = sorted(str(device or "no GPU") for device in devices_of(records))
    commits = f"commit {', '.join(named_commits(records, 12))}"
    return f"{names} ({', '.join([*devices, commits, *sorted(software)])})"


def judgement_of(
    old: str, new: Path, names: Sequence[str], tier: str | None, expected: Path
) -> Judgement:
    """Compare the records of two folders, or of one and what is blessed.

    `old` is a folder of runs, or `blessed` for the blessed records of the device of the new ones.
    Without names, all targets are compared that either folder has records of; without a tier's
    name, every tier at which there are records. Raises `ValueError` if a folder does not exist,
    none has a record of what is not named, or a name is no target's or no tier's.
    """
    folders = [new] if old == BLESSED else [Path(old), new]
    for folder in folders:
        require(folder.is_dir(), f"there are no records: {absence_text(folder, folder)}")
    selections = selected(names, parse_tier(tier).value if tier else None, folders)
    where = " or ".join(map(str, folders))
    require(bool(selections), f"there is no record of any target in {where}")
    comparisons = []
    for selection in selections:
        now = side_of(str(new), selection, gather(selection, new, expected))
        if old == BLESSED:
            before = _blessed_side(selection, now, expected)
        else:
            before = side_of(old, selection, gather(selection, Path(old), expected))
        comparisons.append(compare(selection.source, selection.tier, before, now))
    tiers = dict.fromkeys(selection.tier.value for selection in selections)
    commands = [f"python -m repro bless --device --tier {at} --runs {new}" for at in tiers]
    advice = f"to make these records the baseline: {' and '.join(commands)}"
    return Judgement(comparisons=tuple(comparisons), advice=advice if old == BLESSED else "")


def selected(names: Sequence[str], tier: str | None, folders: Sequence[Path]) -> list[Selection]:
    """Return each target, of those named, at each tier at which a folder has records of its own.

    A target that is named and has none is returned at one tier all the same: that its records are
    missing is for the comparison to say.
    """
    asked = dict.fromkeys(find(name).runs.name for name in names)
    recorded = {
        (item.source.name, item.tier): item
        for folder in folders
        for item in recorded_selections(tier, folder)
        if item.target is item.source and (not asked or item.source.name in asked)
    }
    known = {name for name, _ in recorded}
    for name in (name for name in asked if name not in known):
        at = tier or ([one for one in Tier if one in find(name).scales] or [*Tier])[-1].value
        recorded |= {(one.source.name, one.tier): one for one in select([name], tier=at)}
    return [*recorded.values()]


def _blessed_side(selection: Selection, now: Side, expected: Path) -> Side:
    """Return the blessed records of the device of new ones; a problem where there are none."""
    devices = devices_of(now.every())
    device = devices[0] if len(devices) == 1 else None
    stored = stored_evidence(selection, device, expected)
    if stored is not None:
        return side_of("blessed records", selection, stored)
    sources = blessed_sources(expected, selection.tier)
    known = ", ".join(str(item.device) for item in sources if item.has(selection.source.name))
    sentence = f"nothing is blessed on {device or 'the device of these records'}"
    sentence += f" (but on {known})" if known else ""
    return Side(name="blessed records", problems=(sentence,))


def main_compare(args: argparse.Namespace) -> int:
    """Carry out `repro compare A B`; return the exit status."""
    expected = expected_folder(args.expected)
    judgement = judgement_of(args.old, Path(args.new), args.targets, args.tier, expected)
    sys.stdout.write(judgement.text())
    return EXIT_STATUS[judgement.status]


def main_regress(args: argparse.Namespace) -> int:
    """Carry out `repro regress`: measure, compare with what is blessed, keep everything.

    Raises `ValueError` without a GPU, or for a target that has no systems tier.
    """
    missing = Tier.SYSTEMS.missing()
    require(missing is None, f"regress measures on a GPU: {missing}")
    names = args.targets or _runnable_here()
    tier, expected = Tier.SYSTEMS.value, expected_folder(args.expected)
    folder = Path(args.runs) if args.runs else _new_folder()
    folder.mkdir(parents=True, exist_ok=True)
    line = [*names, "--tier", tier, "--runs", str(folder), "--expected", str(expected)]
    if execute.main_run(build_parser().parse_args(["run", *line])) == execute.INTERRUPTED:
        again = " ".join(["python -m repro regress", *args.targets, "--runs", str(folder)])
        sys.stdout.write(f"interrupted; go on with: {again}\n")
        return COULD_NOT_JUDGE
    judgement = judgement_of(BLESSED, folder, names, tier, expected)
    text = f"{judgement.text()}records, regress.md: {folder}\n"
    markdown = f"## Regression: {judgement.status}\n\n```\n{text}```\n"
    replace_text(folder / "regress.md", markdown)
    if os.environ.get(SUMMARY_VARIABLE):
        with Path(os.environ[SUMMARY_VARIABLE]).open("a", encoding="utf-8") as summary:
            summary.write(markdown)
    sys.stdout.write(text)
    return EXIT_STATUS[judgement.status]


def _runnable_here() -> list[str]:
    """Return the targets measured by default that this machine has the devices for."""
    lacks = {name: find(name).not_runnable(Tier.SYSTEMS) for name in TARGETS_BY_DEFAULT}
    for name, sentence in lacks.items():
        if sentence:
            sys.stdout.write(f"{name}: not run: {sentence}\n")
    return [name for name, sentence in lacks.items() if sentence is None]


def _new_folder() -> Path:
    """Return the folder of a new start: two on one day and commit must not share records."""
    commit, dirty = source_commit()
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
    return runs_folder(None) / "regress" / f"{now}-{commit[:12]}{'-dirty' if dirty else ''}"
