"""Checks of the blessed records under `expected/`, so that README's table is never pasted."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from repro.check import Checked, check_selection
from repro.evidence.record import parse_record
from repro.selection import Selection
from repro.spec.config import require
from repro.spec.tier import Tier
from repro.targets import TARGETS, find, runs_of

_RECORDS = "*.records.json"


def blessed_checks(expected: Path, *names: str) -> list[Checked]:
    """Return a check of each target that has blessed records, at each tier and on each device.

    Parameters
    ----------
    names
        Only these targets; all by default.
    """
    checks = []
    with tempfile.TemporaryDirectory() as temporary:
        homes = [
            (tier, folder, Path(temporary) / str(folder.relative_to(expected)))
            for tier in Tier
            for folder in sorted({path.parent for path in (expected / tier.value).rglob(_RECORDS)})
        ]
        targets = [target for target in TARGETS if not names or target.name in names]
        sources = [runs_of(target) for target in targets]
        read = {source.name for source in sources}
        read |= {home.name for source in sources for home, _ in source.shared.values()}
        # Records of one run on two devices have one name, so a device has a folder of its own.
        for _, folder, runs in homes:
            for path in sorted(folder.glob(_RECORDS)):
                if path.name.removesuffix(_RECORDS[1:]) in read:
                    unpack(path, runs)
        for target, source in zip(targets, sources, strict=True):
            for tier, folder, runs in homes:
                if target.speaks_at(tier) and (folder / f"{source.name}.records.json").is_file():
                    selection = Selection(target=target, source=source, tier=tier)
                    checks.append(check_selection(selection, runs, expected))
    return checks


def blessed_of(expected: Path, names: Sequence[str], tier: str | None) -> list[Checked]:
    """Return a check of the blessed records of each target named, on each device.

    Raises
    ------
    ValueError
        When a name is no target's, or nothing of it is blessed, at `tier` if that is given.
    """
    wanted = [find(name).name for name in names]
    checks = [
        item
        for item in blessed_checks(expected, *wanted)
        if tier in (None, item.selection.tier.value)
    ]
    missing = sorted(set(wanted) - {item.selection.target.name for item in checks})
    where = "" if tier is None else f" at the {tier} tier"
    require(not missing, f"no records are blessed of {', '.join(missing)}{where}")
    return checks


def unpack(path: Path, runs: Path) -> int:
    """Write the compacted records of a file to their places under `runs`; return their number."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    for index, item in enumerate(raw["records"]):
        parse_record(item, f"{path}: records[{index}]").write(runs)
    return len(raw["records"])
