"""Differences between arms that the paper prints, to stand beside a target's own.

Other models and other problems: what can be compared is the side of zero and the pattern down the
rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from repro.evidence.paper import paper_cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """Values that the paper prints: which ones, and what they are.

    Attributes
    ----------
    file, column, quantity
        Which cells of `expected/paper/<file>.json`.
    words
        What is said of them; `plot` where they were read off one.
    arms
        (the cell's arm, this suite's) where they are not the same; none where they are.
    unit
        Of the differences.
    """

    file: str
    column: str
    quantity: str
    words: str
    unit: str = "points"
    arms: tuple[tuple[str, str], ...] = ()


def _table(name: str, quantity: str, *sizes: str) -> tuple[Printed, ...]:
    return tuple(Printed(file=name, column=s, quantity=quantity, words=s) for s in sizes)


# Fig. 14 has no step 0; at its step 5 the first stage runs, which has no added noise.
_PRINTED: Mapping[str, tuple[Printed, ...]] = {
    "table1": _table("table1", "accuracy", "3B", "7B"),
    "table2": _table("table2", "Avg", "7B", "14B", "32B"),
    "dose_coder_0_5b": (
        Printed(
            file="figure5", column="step 0", quantity="entropy", unit="nats",
            words="7B, Fig. 5 at step 0 (plot)",
        ),
        Printed(
            file="figure14", column="step 5", quantity="entropy", unit="nats",
            words="14B, Fig. 14 at step 5 (plot)",
            arms=(("bf16_lora", "bf16_lora"), ("nvfp4_lora_aqn", "nvfp4_lora")),
        ),
    ),
}  # fmt: skip


def differences(
    expected: Path, target: str, contrasts: Sequence[tuple[str, ...]]
) -> dict[Printed, dict[tuple[str, ...], float]]:
    """Return the paper's differences for the contrasts of two arms, by where it prints them."""
    cells = {}
    for place in _PRINTED.get(target, ()):
        values = _values(expected, place)
        known: dict[tuple[str, ...], float] = {
            arms: values[arms[0]] - values[arms[1]]
            for arms in contrasts
            if len(arms) == 2 and set(arms) <= set(values)
        }
        if known:
            cells[place] = known
    return cells


def _values(expected: Path, place: Printed) -> dict[str, float]:
    """Return {this suite's arm: value} of the cells at one place."""
    values = {
        cell.arm: cell.value
        for cell in paper_cells(expected, place.file)
        if cell.arm and (cell.column, cell.quantity) == (place.column, place.quantity)
    }
    if not place.arms:
        return values
    return {own: values[arm] for arm, own in place.arms if arm in values}
