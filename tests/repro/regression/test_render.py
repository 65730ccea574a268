"""A judgement on a terminal, and in XML that survives what a failed run may have said."""

from __future__ import annotations

from xml.etree import ElementTree

from repro.evidence.verdicts.compare import Judgement, Side, compare
from repro.regression.render import junit_text, plain_lines
from repro.spec.tier import Tier
from repro.targets.steps import TABLE3
from tests.repro.recorded_steps import step_records, times

JUDGEMENT = Judgement(
    comparisons=(
        compare(
            TABLE3,
            Tier.SYSTEMS,
            Side(name="old", records=step_records()),
            Side(name="new", records=step_records(times(1.06, "step_seconds_7b_b2"))),
        ),
    ),
    problems=("memory [failed]: \x1b[31mout of\nmemory\x00",),
)


def test_a_terminal_gets_every_row_that_is_not_unchanged() -> None:
    comparison = compare(
        TABLE3,
        Tier.SYSTEMS,
        Side(name="old", records=step_records()),
        Side(name="new", records=step_records(times(3.0, "seconds_7b_b2"))),
    )
    judgement = Judgement(comparisons=(comparison,))
    changed = [row for row in judgement.rows if row.verdict != "unchanged"]
    lines = plain_lines(judgement, "files: there", None)
    assert sum(row.metric in line for row, line in zip(changed, lines[2:], strict=False)) == len(
        changed
    )
    assert len(lines) >= len(changed) + 3


def test_plain_lines_stay_lines_whatever_a_reason_holds() -> None:
    lines = plain_lines(JUDGEMENT, "files: there")
    assert lines[2].startswith("memory [failed]: ")
    assert not any(sign in line for line in lines for sign in "\n\x1b\x00")
    assert lines[-1] == "files: there"


def test_junit_parses_whatever_a_reason_holds() -> None:
    root = ElementTree.fromstring(junit_text(JUDGEMENT))
    (error,) = root.iter("error")
    assert error.get("message", "").startswith("memory [failed]: ?[31mout of")
    assert (root.get("failures"), root.get("errors")) == ("1", "1")
    (failed,) = (case for case in root.iter("testcase") if case.find("failure") is not None)
    assert (failed.get("classname"), failed.get("name")) == (
        "table3.nvfp4_lora",
        "step_seconds_7b_b2",
    )
