"""What stands below a picture: how many seeds each arm has, and where learning rates differ.

Rows of every figure carry their number of seeds and, where training set one, the arm's learning
rate; a caption is made of those, so it cannot say more than was drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from figures.palette import short
from repro.evidence.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRow:
    """A row of a figure: its arm, seeds behind it, and the learning rate (None: unknown)."""

    arm: str
    n: int
    rate: float | None = None


def rate_of(records: Sequence[Record], arm: str) -> float | None:
    """Return the largest learning rate that the arm's runs had, None where none was recorded."""
    rates = [
        value
        for record in records
        if record.arm == arm
        for value in record.series.get("learning_rate", [])
        if value is not None
    ]
    return max(rates, default=None)


def seeds_text(rows: Sequence[ArmRow]) -> str:
    """Return `5 seeds per arm`, and by name the arms that have another number."""
    counts: dict[str, set[int]] = {}
    for row in rows:
        counts.setdefault(row.arm, set()).add(row.n)
    texts = {arm: _range(seed_counts) for arm, seed_counts in counts.items()}
    usual = Counter(texts.values()).most_common(1)[0][0]
    others = [f"{short(arm)} {text}" for arm, text in texts.items() if text != usual]
    seeds = "1 seed" if usual == "1" else f"{usual} seeds"
    return f"{seeds} per arm" + (f" ({', '.join(others)})" if others else "")


def rates_text(rows: Sequence[ArmRow]) -> str:
    """Return which arms had which learning rate; empty where all had the same or none is known."""
    rates = {row.arm: f"{row.rate:.2g}" for row in rows if row.rate is not None}
    if len(set(rates.values())) < 2:
        return ""
    parts = []
    for rate, count in Counter(rates.values()).most_common():
        arms = ", ".join(short(arm) for arm, arm_rate in rates.items() if arm_rate == rate)
        parts.append(f"{rate} for {'most arms' if count > max(2, len(rates) / 2) else arms}")
    return f"learning rates differ: {'; '.join(parts)}"


def caption(rows: Sequence[ArmRow], what: str) -> str:
    """Return the caption: seeds and what is drawn, and below it the rates where they differ."""
    lines = [f"{seeds_text(rows)}; {what}", rates_text(rows)]
    return "\n".join(line for line in lines if line)


def _range(counts: set[int]) -> str:
    return str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
