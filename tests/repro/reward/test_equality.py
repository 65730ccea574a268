"""What counts as equal: the rows of the table and the corpus beside it, through real workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

from repro.reward.grader import GraderPool
from tests.repro.reward.equality_table import ROWS, Example

DOCUMENT = Path(__file__).parents[3] / "docs" / "grading.md"
CORPUS: list[dict[str, Any]] = [
    json.loads(line)
    for line in Path(__file__).with_name("equality.jsonl").read_text("utf-8").splitlines()
]


def _cases(row: str) -> list[Example]:
    """Return a row's examples and what the corpus has of it."""
    [own] = [one for one in ROWS if one.name == row]
    more = [
        Example(gold=line["gold"], answer=line["answer"], paid=line["paid"])
        for line in CORPUS
        if line["row"] == row
    ]
    return [*own.examples, *more]


NAMES = [row.name for row in ROWS]


def test_every_row_has_paid_and_refused_examples_and_more_of_both_in_the_corpus() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert {line["row"] for line in CORPUS} == set(NAMES)
    for row in ROWS:
        cases = _cases(row.name)
        assert {case.paid for case in cases} == {True, False}, row.name
        assert len(cases) > len(row.examples), row.name


@pytest.mark.parametrize("row", NAMES)
def test_the_grader_decides_as_the_table_says(row: str, pool: GraderPool) -> None:
    cases = _cases(row)
    grades = pool.grade_answers([(case.gold, case.answer) for case in cases])
    wrong = [
        (case.gold, case.answer, grade.status)
        for case, grade in zip(cases, grades, strict=True)
        if grade.status != ("ok" if case.paid else "wrong")
    ]
    assert not wrong


@pytest.fixture(scope="module")
def math_verify_alone() -> Callable[[str, str], bool]:
    """Return math-verify's own verdict on two texts, each in a box."""

    @lru_cache(maxsize=2048)
    def parsed(text: str) -> list[Any]:
        targets = [LatexExtractionConfig(boxed_match_priority=0)]
        return list(parse(f"\\boxed{{{text}}}", targets))

    return lambda gold, answer: bool(verify(parsed(gold), parsed(answer)))


def test_the_rows_that_pay_more_than_math_verify_alone_are_those_that_say_so(
    math_verify_alone: Callable[[str, str], bool],
) -> None:
    beyond = {
        row.name
        for row in ROWS
        for case in _cases(row.name)
        if case.paid and not math_verify_alone(case.gold, case.answer)
    }
    assert beyond == {row.name for row in ROWS if row.beyond_math_verify}


def test_math_verify_alone_pays_for_much_that_the_table_refuses(
    math_verify_alone: Callable[[str, str], bool],
) -> None:
    # Else the rows would guard against nothing.
    refused = [case for row in NAMES for case in _cases(row) if not case.paid]
    paid = [case for case in refused if math_verify_alone(case.gold, case.answer)]
    assert len(paid) > 0.25 * len(refused)


def table_text() -> str:
    """Return the table in Markdown, as docs/grading.md has it."""
    lines = ["| row | rule | gold | paid | refused |", "|---|---|---|---|---|"]
    for row in ROWS:
        shown = [
            ", ".join(_code(example.answer) for example in row.examples if example.paid is paid)
            for paid in (True, False)
        ]
        mark = " †" if row.beyond_math_verify else ""
        gold = _code(row.examples[0].gold)
        lines.append(f"| {row.name}{mark} | {row.rule} | {gold} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _code(text: str) -> str:
    """Return a text as code in a cell, where a bar would end the cell."""
    return "`" + text.replace("|", "\\|") + "`"


def test_the_document_holds_the_table() -> None:
    text = DOCUMENT.read_text("utf-8")
    _, _, rest = text.partition("<!-- table: tests/repro/reward/equality_table.py -->\n")
    table, _, _ = rest.partition("\n<!-- end -->")
    assert table == table_text()
