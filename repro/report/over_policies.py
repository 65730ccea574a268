"""Statements about policies of several pre-training seeds: the effect in each, and their mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from repro.evidence.comparison import blocks_of, values_and_bound
from repro.judge.check import Checked
from repro.report.verdicts import labelled

_PAIRED_BY = "pre-training seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """A statement, and what was measured of it.

    Attributes
    ----------
    each
        The quotient in each policy, in the order of pre-training seeds.
    mean, low, high
        Over policies; the interval holds for all statements of the target.
    paper
        The paper's quotient; None where it has no size.
    """

    statement: str
    each: tuple[float, ...]
    mean: float
    low: float
    high: float
    paper: float | None
    verdict: str


def over_policies(checks: Sequence[Checked]) -> dict[str, list[PolicyRow]]:
    """Return, by target, the statements about quotients that are paired by policy and measured."""
    by_target = {checked.selection.target.name: _rows(checked) for checked in checks}
    return {name: rows for name, rows in by_target.items() if rows}


def _rows(checked: Checked) -> list[PolicyRow]:
    verdicts = {verdict.name: verdict for verdict in checked.verdicts}
    drawn = []
    for claim in checked.selection.target.claims:
        verdict = verdicts.get(claim.name)
        if verdict is None or claim.paired_by != _PAIRED_BY or not claim.is_ratio:
            continue
        if verdict.effect is None or verdict.low is None or verdict.high is None:
            continue
        values, _ = values_and_bound(claim, blocks_of(claim, checked.evidence.values(claim.metric)))
        drawn.append(
            PolicyRow(
                statement=claim.statement.rpartition(": ")[2],
                each=tuple(math.exp(value) for value in values),
                mean=verdict.effect,
                low=verdict.low,
                high=verdict.high,
                paper=verdict.paper,
                verdict=labelled(verdict),
            )
        )
    return drawn
