"""What a folder of runs holds: a selection per target and tier, those with other settings, too.

Runs with other settings (`--steps`, `--set`, `--model`, ...) lie under a name of their own. Their
settings are read back from their records, so that whoever asks for a folder needs no flags.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from repro.evidence.store import Entry, RunsFolder
from repro.run.select import Selection
from repro.spec.checks import require
from repro.spec.settings import plain_values
from repro.spec.tier import parse_tier
from repro.spec.variants import with_overrides
from repro.targets import TARGETS


def recorded_selections(tier: str | None, runs: Path) -> list[Selection]:
    """Return every target, at one tier or all, of which a folder has records; then the variants.

    Those whose settings cannot be read back are left out, with a line on the standard error.
    """
    source = RunsFolder(runs)
    places = [place for place in source.targets() if tier in (None, place[0])]
    chosen = [
        Selection(target=target, tier=offered)
        for target in TARGETS
        for offered in target.runs.tiers()
        if (offered.value, target.runs.name) in places
    ]
    known = {target.name for target in TARGETS}
    for offered, name in (place for place in places if place[1] not in known):
        try:
            chosen.append(as_recorded(source.entries(offered, name)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            print(f"left out: {source.place(offered, name)}: {error}", file=sys.stderr)  # noqa: T201
    return chosen


def as_recorded(entries: Sequence[Entry]) -> Selection:
    """Return the variant of a target that records are of, its settings read from one of each arm.

    Raises `ValueError` if a record cannot be read, or no such variant can be made.
    """
    name, tier = entries[0].target, parse_tier(entries[0].tier)
    bases = [item for item in TARGETS if name.startswith(f"{item.name}_") and tier in item.scales]
    require(bool(bases), "no target has such runs; those of `train` state no claims")
    base = max(bases, key=lambda item: len(item.name))
    scale: dict[str, Any] = {}
    arm: dict[str, Any] = {}
    for entry in {entry.arm: entry for entry in entries}.values():
        config = entry.read().config
        scale = _changes(base.scales[tier], config["scale"])
        arm |= _changes(base.arm(entry.arm), config["arm"])
    changed = with_overrides(base, tier, {"scale": scale, "arm": arm})
    return Selection(target=dataclasses.replace(changed, name=name), tier=tier)


def _changes(value: Any, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in which a record differs, nested; absent ones have their default."""
    changes: dict[str, Any] = {}
    for item in dataclasses.fields(value):
        own, other = getattr(value, item.name), recorded.get(item.name, item.default)
        if dataclasses.is_dataclass(own) and isinstance(other, Mapping):
            if nested := _changes(own, other):
                changes[item.name] = nested
        elif plain_values(own) != plain_values(other):
            changes[item.name] = other
    return changes
