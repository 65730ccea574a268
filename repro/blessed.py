"""Checks of the blessed records under `expected/`, so that README's table is never pasted."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from repro.check import Checked, check_selection
from repro.evidence.record import parse_record
from repro.selection import Selection
from repro.spec.tier import Tier
from repro.targets import TARGETS, runs_of


def blessed_checks(expected: Path) -> list[Checked]:
    """Return a check of each target that has blessed records, at each tier that has them."""
    checks = []
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        found = {
            (tier, target.name): unpack(path, runs)
            for tier in Tier
            for target in TARGETS
            for path in sorted((expected / tier.value).rglob(f"{target.name}.records.json"))
        }
        for target in TARGETS:
            source = runs_of(target)
            for tier in Tier:
                if (tier, source.name) in found and target.speaks_at(tier):
                    selection = Selection(target=target, source=source, tier=tier)
                    checks.append(check_selection(selection, runs, expected))
    return checks


def unpack(path: Path, runs: Path) -> int:
    """Write the compacted records of a file to their places under `runs`; return their number."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    for index, item in enumerate(raw["records"]):
        parse_record(item, f"{path}: records[{index}]").write(runs)
    return len(raw["records"])
