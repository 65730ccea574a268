"""The two sides of a comparison: records of a folder, and records of another one or blessed ones.

Both go through what `check` asks of records: refused, failed and spoilt ones become problems of
their side, and a target with such a problem is not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from repro.evidence.origins import devices_of
from repro.evidence.record import iterate_records
from repro.judge.blessed import blessed_checks
from repro.judge.check import device_name
from repro.judge.gathering import Evidence, gather
from repro.regression.judgement import Judgement, Side, compare
from repro.run.places import absence_text
from repro.run.select import Selection, select
from repro.spec.checks import require
from repro.spec.tier import PLANNED, Tier, parse_tier
from repro.targets import TARGETS, find, runs_of

BLESSED = "blessed"
BLESS_COMMAND = "python -m repro bless --device --tier {tier} --runs {runs}"


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
    tiers = [parse_tier(tier)] if tier else list(Tier)
    selections = selected(names, tiers, folders)
    if not selections:
        asked = ", ".join(names) or "any target"
        where = " or ".join(map(str, folders))
        return Judgement(problems=(f"there is no record of {asked} in {where}",))
    comparisons = []
    for selection in selections:
        now = side_of(str(new), selection, gather(selection, new))
        if old == BLESSED:
            devices = devices_of(now.every())
            device = devices.pop() if len(devices) == 1 else None
            before = blessed_side(expected, selection, device, new)
        else:
            before = side_of(old, selection, gather(selection, Path(old)))
        comparisons.append(compare(selection.source, selection.tier, before, now))
    return Judgement(comparisons=tuple(comparisons))


def selected(
    names: Sequence[str], tiers: Sequence[Tier], folders: Sequence[Path]
) -> list[Selection]:
    """Return each target at each tier at which a folder has records of it.

    A target that is named and has none is returned at one tier all the same: that its records are
    missing is for the comparison to say.
    """
    asked = [runs_of(find(name)).name for name in names]
    every = [target.name for target in TARGETS if target.records_of is None]
    selections = []
    for name in dict.fromkeys(asked or every):
        recorded = [
            tier
            for tier in tiers
            if any(path for folder in folders for path in iterate_records(folder, tier.value, name))
        ]
        if asked and not recorded:
            scales = find(name).scales
            recorded = [tier for tier in tiers if tier in scales][-1:] or list(tiers[-1:])
        selections += [select([name], tier=tier.value)[0] for tier in recorded]
    return selections


def side_of(name: str, selection: Selection, evidence: Evidence) -> Side:
    """Return evidence as one side; arms that other targets record are left to those.

    Where learning is planned, a run that fails is a result like any other, and spoils nothing.
    """
    shared = selection.source.shared
    failed = [] if selection.tier in PLANNED else evidence.failed
    spoilt = [
        f"{'/'.join(path.parts[-4:])} {what}: {why}"
        for what, items in (("is refused", evidence.refused), ("failed", failed))
        for path, why in items
    ]
    own = {arm: by_seed for arm, by_seed in evidence.records.items() if arm not in shared}
    return Side(name=name, records=own, problems=tuple(spoilt))


def blessed_side(expected: Path, selection: Selection, device: str | None, runs: Path) -> Side:
    """Return the blessed records of a selection on a device; a problem where there are none.

    Parameters
    ----------
    runs
        The folder whose records may become the baseline, for that sentence.
    """
    by_device: dict[str | None, Side] = {}
    for checked in blessed_checks(expected, selection.source.name):
        if checked.selection.tier is selection.tier:
            side = side_of("blessed records", checked.selection, checked.evidence)
            by_device[device_name(checked.evidence)] = side
    if selection.tier is Tier.SMOKE:  # its values belong to no device
        device = next(iter(by_device), None)
    # Where all of them are refused, as of a configuration since changed, none names a device.
    baseline = by_device.get(device) or by_device.get(None)
    command = BLESS_COMMAND.format(tier=selection.tier.value, runs=runs)
    if baseline is not None:
        again = tuple(f"{why}; to replace the baseline: {command}" for why in baseline.problems)
        return replace(baseline, problems=again)
    known = ", ".join(sorted(map(str, by_device)))
    sentence = (
        f"nothing is blessed on {device or 'the device of these records'}"
        + (f" (but on {known})" if known else "")
        + f"; to make these records the baseline: {command}"
    )
    return Side(name="blessed records", problems=(sentence,))
