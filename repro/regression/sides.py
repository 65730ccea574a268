"""The two sides of a comparison: records of a folder, and records of another one or blessed ones.

Both go through what `check` asks of records: refused, failed and spoilt ones become problems of
their side, and a target with such a problem is not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from repro.evidence.record import iterate_records
from repro.evidence.verdicts.compare import Comparison, Judgement, Side, compare
from repro.judge.blessed import blessed_checks
from repro.judge.check import device_name
from repro.judge.gathering import Evidence, gather
from repro.run.places import absence_text
from repro.run.select import Selection, select
from repro.spec.arm import require
from repro.spec.tier import PLANNED, Tier, parse_tier
from repro.targets import TARGETS, find, runs_of

BLESSED = "blessed"
BLESS_COMMAND = "python -m repro bless --device --tier {tier} --runs {runs}"

Sides = Mapping[tuple[str, Tier], Side]


def judge(old: str, new: Path, names: Sequence[str], tier: str | None, expected: Path) -> Judgement:
    """Compare the records of two folders.

    Parameters
    ----------
    old
        A folder of runs, or `blessed` for the blessed records of the device of the new ones.
    new
        A folder of runs.
    names
        Targets; with none, all that either folder has records of.
    tier
        Its name; None for every tier at which there are records.

    Raises
    ------
    ValueError
        If a folder does not exist, or a name is no target's or no tier's.
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
    news = {key_of(item): folder_side(item, new) for item in selections}
    if old == BLESSED:
        olds: Sides = blessed_sides(expected, selections, news, new)
    else:
        olds = {key_of(item): folder_side(item, Path(old)) for item in selections}
    comparisons = (compare_sides(item, olds, news) for item in selections)
    return Judgement(comparisons=tuple(comparisons))


def compare_sides(selection: Selection, olds: Sides, news: Sides) -> Comparison:
    """Compare the two sides of one selection."""
    key = key_of(selection)
    return compare(selection.source, selection.tier, olds[key], news[key])


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


def folder_side(selection: Selection, runs: Path) -> Side:
    """Return the records of a selection in a folder."""
    return side_of(str(runs), selection, gather(selection, runs))


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


def blessed_sides(
    expected: Path, selections: Sequence[Selection], news: Sides, runs: Path
) -> Sides:
    """Return the blessed records of each selection on the device of its new ones."""
    devices = {}
    for item in selections:
        records = news[key_of(item)].records
        devices[key_of(item)] = device_name(
            Evidence(records={k: dict(v) for k, v in records.items()})
        )
    return blessed_on(expected, selections, devices, runs)


def blessed_on(
    expected: Path,
    selections: Sequence[Selection],
    devices: Mapping[tuple[str, Tier], str | None],
    runs: Path,
) -> Sides:
    """Return the blessed records of each selection on a device; a problem where there are none.

    Parameters
    ----------
    runs
        The folder whose records may become the baseline, for that sentence.
    """
    stored: dict[tuple[str, Tier], dict[str | None, Side]] = {}
    for checked in blessed_checks(expected, *(item.source.name for item in selections)):
        device = device_name(checked.evidence)
        side = side_of("blessed records", checked.selection, checked.evidence)
        stored.setdefault(key_of(checked.selection), {})[device] = side
    sides = {}
    for item in selections:
        key = key_of(item)
        by_device, device = stored.get(key, {}), devices[key]
        if item.tier is Tier.SMOKE:  # its values belong to no device
            device = next(iter(by_device), None)
        # Where all of them are refused, as of a configuration since changed, none names a device.
        baseline = by_device.get(device) or by_device.get(None)
        command = BLESS_COMMAND.format(tier=item.tier.value, runs=runs)
        if baseline is None:
            sides[key] = _nothing_blessed(device, by_device, command)
        else:
            again = tuple(f"{why}; to replace the baseline: {command}" for why in baseline.problems)
            sides[key] = replace(baseline, problems=again)
    return sides


def _nothing_blessed(device: str | None, others: Iterable[str | None], command: str) -> Side:
    known = ", ".join(sorted(map(str, others)))
    sentence = (
        f"nothing is blessed on {device or 'the device of these records'}"
        + (f" (but on {known})" if known else "")
        + f"; to make these records the baseline: {command}"
    )
    return Side(name="blessed records", problems=(sentence,))


def key_of(selection: Selection) -> tuple[str, Tier]:
    """Return what names the two sides of a selection."""
    return selection.source.name, selection.tier
