"""Checks of the blessed records under `expected/`, from which README's table is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from repro.evidence.origins import grouped_by
from repro.evidence.store import blessed_sources
from repro.evidence.verdicts.verdict import with_discovery_rate
from repro.judge.check import Checked, check_selection
from repro.run.select import Selection
from repro.spec.checks import require
from repro.spec.tier import REAL_CHECKPOINTS, Tier, parse_tier
from repro.targets import TARGETS, find


def blessed_checks(expected: Path, *names: str) -> list[Checked]:
    """Return a check of each target, or those named, at each tier and device with blessed records.

    If no name is given, verdicts have their false-discovery rate over the study.
    """
    checks = []
    sources = blessed_sources(expected)
    for target in TARGETS if not names else [item for item in TARGETS if item.name in names]:
        runs = target.runs
        homes = {runs.home(arm.name)[0].name for arm in runs.arms}
        # A target that shares every arm has no records of its own.
        needed = homes if homes and runs.name not in homes else {runs.name}
        for source in sources:
            if all(map(source.has, needed)):
                selection = Selection(target=target, tier=Tier(source.tier))
                checks.append(check_selection(selection, source, expected))
    return checks if names else with_study(checks)


def untested_checks(expected: Path, recorded: Sequence[Checked]) -> list[Checked]:
    """Return the checks, all not run, of targets on real checkpoints that have no record."""
    known = {(one.selection.target.name, one.selection.tier) for one in recorded}
    selections = [
        Selection(target=target, tier=tier)
        for tier in REAL_CHECKPOINTS
        for target in TARGETS
        if tier in target.runs.scales and (target.name, tier) not in known
    ]
    return [check_selection(one, expected / "no records", expected) for one in selections]


def blessed_of(expected: Path, names: Sequence[str], tier: str | None) -> list[Checked]:
    """Return a check of the blessed records of each target named, on each device.

    A target of which nothing is blessed raises, as does a tier that there is not.
    """
    only = None if tier is None else parse_tier(tier)
    target_names = [find(name).name for name in names]
    checks = [
        item
        for item in blessed_checks(expected, *target_names)
        if only in (None, item.selection.tier)
    ]
    missing = sorted(set(target_names) - {item.selection.target.name for item in checks})
    where = "" if only is None else f" at the {only.value} tier"
    require(not missing, f"no records are blessed of {', '.join(missing)}{where}")
    return checks


def with_study(checks: Sequence[Checked]) -> list[Checked]:
    """Return the checks in order, verdicts with their false-discovery rate by tier and device.

    Holm's correction is over the statements of one target. Over a study, all that is judged at one
    tier on one kind of device, some small p values are luck; the rate says how many to expect.
    """
    final = list(checks)
    places = [(one.selection.tier, one.evidence.device) for one in checks]
    for indices in grouped_by(range(len(checks)), places.__getitem__).values():
        rated = iter(with_discovery_rate([v for i in indices for v in final[i].verdicts]))
        for i in indices:
            own = [next(rated) for _ in final[i].verdicts]
            final[i] = dataclasses.replace(final[i], verdicts=own)
    return final
