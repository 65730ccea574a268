"""How many statements have which verdict, by what they are about.

Claims of the paper, questions that it leaves open, claims about the machinery and performance
targets are counted apart. Tiers are counted apart, too, and devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from repro.evidence.verdicts.verdict import Verdict
from repro.judge.check import Checked
from repro.report.numbers import device_heads
from repro.report.tables import NOTHING
from repro.report.tidy import rendered
from repro.report.verdict_words import CLAIMS, Kind, all_bars, counted, of_kind

KINDS = (*CLAIMS, Kind.BAR)


def _verdicts(checked: Checked, kind: Kind, expected: Path) -> list[Verdict]:
    return all_bars(checked, expected) if kind is Kind.BAR else of_kind(checked, kind)


def counts_of(checked: Checked, expected: Path) -> tuple[str, ...]:
    """Return the counts of a check's verdicts, a text per kind of `KINDS`."""
    return tuple(counted(_verdicts(checked, kind, expected)) for kind in KINDS)


def count_rows(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return how many verdicts of each kind there are, a column per tier and device."""
    recorded = [checked for checked in checks if checked.evidence.count]
    names = device_heads(dict.fromkeys(checked.evidence.device for checked in recorded))
    places: dict[str, list[Checked]] = {}
    for checked in recorded:
        place = f"{checked.selection.tier.value}, {names[checked.evidence.device]}"
        places.setdefault(place, []).append(checked)
    counts = {
        place: {
            kind.value: counted(v for one in group for v in _verdicts(one, kind, expected))
            for kind in KINDS
        }
        for place, group in places.items()
    }
    kinds = [kind.value for kind in KINDS]
    return rendered("counts.md", places=counts, kinds=kinds) if counts else NOTHING
