"""A judgement on a terminal, and in XML that survives what a failed run may have said."""

from __future__ import annotations

import io
from xml.etree import ElementTree

from rich.console import Console

from repro.evidence.verdicts.compare import Judgement, Side, compare
from repro.regression.render import junit_text, plain_lines, print_judgement
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


def test_a_terminal_gets_a_table_of_all_that_changed_and_the_verdict_last() -> None:
    file = io.StringIO()
    print_judgement(JUDGEMENT, "files: there", Console(file=file, force_terminal=True, width=200))
    text = file.getvalue()
    assert "+6.0 %" in text
    assert "memory [failed]" in text
    assert text.index("+6.0 %") < text.index("regressed: 1")
    assert "files: there" in text
    assert "update_seconds" not in text


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
