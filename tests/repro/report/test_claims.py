"""The page of claims: counts by kind, each claim's reason."""

from __future__ import annotations

from collections.abc import Callable

from repro.evidence.verdicts.verdict import ONE_PROCESS, POST_HOC
from repro.judge.check import Checked
from repro.report.claims import claims_rows, count_rows
from repro.report.tidy import effect_text
from repro.report.verdict_words import Kind, counted, labelled, of_kind
from repro.run.places import expected_folder
from repro.spec.tier import Tier
from repro.targets import find

EXPECTED = expected_folder(None)
Of = Callable[..., Checked]


def row_of(lines: list[str], label: str) -> list[str]:
    line = next(line for line in lines if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_kinds_are_counted_apart_and_every_claim_once(blessed: list[Checked]) -> None:
    smoke = [item for item in blessed if item.selection.tier is Tier.SMOKE]
    rows = count_rows(smoke, EXPECTED)
    for kind in (Kind.PAPER, Kind.MACHINERY):
        verdicts = [verdict for checked in smoke for verdict in of_kind(checked, kind)]
        assert row_of(rows, kind.value)[1] == counted(verdicts)


def test_each_claim_has_one_row_with_its_verdict(every_blessed: list[Checked]) -> None:
    lines = claims_rows(every_blessed, EXPECTED)
    claims = [
        (checked.selection.target.name, checked.selection.tier, verdict.name)
        for checked in every_blessed
        for verdict in checked.verdicts
        if verdict.about in ("claim", "mechanism") and verdict.status != "not addressed"
    ]
    rows = [line for line in lines if line.startswith("| ") and "| claim |" not in line]
    assert len(rows) == len(set(claims)) > 50
    count = sum(not claim.mechanism for claim in find("table1").claims)
    assert f"Claims of the paper not addressed at this tier: {count}." in lines
    for mark in (POST_HOC, ONE_PROCESS):
        assert sum(mark in line for line in rows) == len({
            (c.selection.target.name, c.selection.tier, v.name)
            for c in every_blessed
            for v in c.verdicts
            if v.about in ("claim", "mechanism") and mark in v.marks
        })  # fmt: skip


def test_a_claim_shows_the_papers_value_its_effect_and_what_it_is_about(blessed_of: Of) -> None:
    checked = blessed_of("table6")
    (verdict,) = [v for v in checked.verdicts if v.about == "claim" and v.name.endswith("_8")]
    row = row_of(claims_rows([checked], EXPECTED), verdict.statement)
    assert row[1] == "1.27 x"
    assert row[2] == f"{effect_text(verdict)}: {labelled(verdict)}"
    bars = claims_rows([blessed_of("rollout_ranks")], EXPECTED)
    assert all(line.split("|")[1].endswith("(bar) ") for line in bars if "| > " in line)
