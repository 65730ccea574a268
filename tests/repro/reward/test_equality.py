"""What counts as equal: the table of docs/grading.md and the corpus, through real workers."""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

DOCUMENT = Path(__file__).parents[3] / "docs" / "grading.md"
# Behind the name of a row that pays answers which math-verify alone refuses.
BEYOND = " †"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A gold, an answer, and whether the strict reading pays it."""

    gold: str
    answer: str
    paid: bool


def _table():
    _, _, rest = DOCUMENT.read_text("utf-8").partition("<!-- table -->\n")
    _, _, *rows = rest.partition("\n<!-- end -->")[0].splitlines()
    for row in rows:
        name, _, *cells = re.split(r"(?<!\\)\|", row.strip("| "))
        [gold], paid, refused = ([code.replace("\\|", "|") for code in re.findall("`(.*?)`", cell)]
                                 for cell in cells)  # fmt: skip
        examples = [Example(gold=gold, answer=answer, paid=True) for answer in paid]
        examples += [Example(gold=gold, answer=answer, paid=False) for answer in refused]
        yield name.strip(), examples


TABLE = dict(_table())
ROWS = {name.removesuffix(BEYOND): examples for name, examples in TABLE.items()}
CORPUS = [
    json.loads(line)
    for line in Path(__file__).with_name("equality.jsonl").read_text("utf-8").splitlines()
]


def _cases(row):
    more = [
        Example(gold=line["gold"], answer=answer, paid=kind == "paid")
        for line in CORPUS
        if line["row"] == row
        for kind in ("paid", "refused")
        for answer in line[kind]
    ]
    return [*ROWS[row], *more]


def test_every_row_has_paid_and_refused_examples_and_more_of_both_in_the_corpus():
    assert len(ROWS) > 30
    assert {line["row"] for line in CORPUS} == set(ROWS)
    for row, examples in ROWS.items():
        assert {example.paid for example in examples} == {True, False}, row
        assert len(_cases(row)) > len(examples), row


@pytest.mark.parametrize("row", ROWS)
def test_the_grader_decides_as_the_table_says(row, pool):
    cases = _cases(row)
    grades = pool.grade_answers([(case.gold, case.answer) for case in cases])
    wrong = [
        (case.gold, case.answer, grade.status)
        for case, grade in zip(cases, grades, strict=True)
        if grade.status != ("ok" if case.paid else "wrong")
    ]
    assert not wrong


def test_the_rows_that_pay_more_than_math_verify_alone_are_those_that_say_so():
    @lru_cache(maxsize=2048)
    def parsed(text):
        targets = [LatexExtractionConfig(boxed_match_priority=0)]
        return list(parse(f"\\boxed{{{text}}}", targets))

    beyond = {
        row
        for row in ROWS
        for case in _cases(row)
        if case.paid and not verify(parsed(case.gold), parsed(case.answer))
    }
    assert beyond == {name.removesuffix(BEYOND) for name in TABLE if name.endswith(BEYOND)}
