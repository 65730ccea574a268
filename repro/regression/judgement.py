"""The comparisons of `compare` and `regress`: a folder's records with another's or blessed ones.

Both go through what `check` asks of records: refused, failed and spoilt ones become problems of
their side, and a target with such a problem is not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from repro.evidence.origins import devices_of
from repro.evidence.store import blessed_sources
from repro.judge.as_before import (
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
from repro.run.places import absence_text
from repro.run.select import Selection, select
from repro.spec.checks import require
from repro.spec.tier import Tier, parse_tier
from repro.targets import find, runs_of

Status = Literal["fine", "regressed", "could not judge"]

EXIT_STATUS: dict[Status, int] = {"fine": 0, "regressed": 1, "could not judge": 2}
BLESSED = "blessed"
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
        at = tier or ([one for one in Tier if one in find(name).scales] or [*Tier])[-1].value
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
