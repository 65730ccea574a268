"""Golds that can never be paid."""

from __future__ import annotations

from repro.reward.golds import unpayable
from repro.reward.grader import GraderPool

PAYABLE = ["18", "\\$18.90", "18\\text{ cm}^2", "3\\frac{1}{2}", "2516_8", "\\text{(A)}", "Monday"]
PAYABLE += ["x+1", "(3,4)", "1<x<2", "y=2x+1", "12:30", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"]
BROKEN = ["\\frac{1}{", "...", "answer here", "It is $5$. Or $6$", "x\x00", "</answer>", "}{"]


def test_golds_of_every_kind_can_be_paid(pool: GraderPool) -> None:
    assert unpayable(PAYABLE, pool) == []


def test_broken_golds_and_placeholders_can_never_be_paid(pool: GraderPool) -> None:
    golds = [gold for broken in BROKEN for gold in ("18", broken)]
    assert unpayable(golds, pool) == list(range(1, len(golds), 2))
