"""Problems and their JSONL: what is read, and errors that name the place."""

import dataclasses
import hashlib
import json

import pytest

from repro.data.own import read_splits
from repro.data.problem import (
    DataError,
    Problem,
    digest_of_problems,
    problem_from_row,
    require_answers,
)

GOOD = {"id": "a/1", "question": "1 + 1?", "answer": "2", "solution": None, "source": "hand"}


def problems_in(path):
    return read_splits(path)["all"]


BROKEN = [
    (b'{"id": "a/2", "question": "q"}', "`answer` is missing"),
    (b'{"id": "a/2", "question": "", "answer": "2"}', "`question` is ''"),
    (b'{"id": "a/2", "question": "  ", "answer": "2"}', "`question` is '  '"),
    (b'{"id": "a/2", "question": "q", "answer": ""}', "`answer` is ''"),
    (b'{"id": "a/2", "question": "q", "answer": [2]}', "`answer` is [2]"),
    (b'{"id": "a/2", "question": "q", "answer": true}', "`answer` is True"),
    (b'{"id": "a/2", "question": "q", "answer": NaN}', "`answer` is nan"),
    (b'{"id": "a/2", "question": "q", "answer": null}', "`answer` is None"),
    (b'{"id": [7], "question": "q", "answer": "2"}', "`id` is [7]"),
    (b'{"id": "a/1", "question": "q", "answer": "2"}', "already on line 1"),
    (b'["a/2", "q", "2"]', "must be an object"),
    (b'{"id": "a/2", "question": "q", "ans', "JSON object a line, in UTF-8"),
    (b'{"id": "a/2", "question": "caf\xe9", "answer": "2"}', "in UTF-8"),
    (b'{"id": "a/2", "question": "\\ud800", "answer": "2"}', "in UTF-8"),
    (b'{"id": "a/2", "question": "q", "answer": "2", "solution": "\\udfff"}', "in UTF-8"),
    (b"[" * 100_000, "line 3: "),
]


@pytest.mark.parametrize(("line", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_line_is_an_error_with_file_line_finding_and_need(tmp_path, line, message):
    path = tmp_path / "train.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(DataError) as caught:
        require_answers(problems_in(path))
    text = str(caught.value)
    assert f"{path}, line 3" in text
    assert message in text
    assert any(word in text for word in ("must be", "needed", "save the file", "expected"))
    assert len(text) < 500


def test_what_other_programs_write_is_accepted_and_levels_are_read_as_math_writes_them(tmp_path):
    path = tmp_path / "train.jsonl"
    row = GOOD | {"subsets": ["addsub"], "question": "one\u2028line"}
    text = json.dumps(row, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n")
    [problem] = problems_in(path)
    assert problem == Problem(id="a/1", question="one\u2028line", answer="2", source="hand")
    path.write_text(json.dumps(GOOD | {"solution": " 1 + 1 = 2\n"}))
    assert problems_in(path)[0].solution == " 1 + 1 = 2\n"
    levels = {"Level 5": 5, "5": 5, "Level 12": 12, "Level ?": None, 3: 3, None: None}
    for level, read in levels.items():
        path.write_text(json.dumps(GOOD | {"level": level}))
        assert problems_in(path)[0].level == read


@pytest.mark.parametrize(
    ("role", "value"),
    [("level", "hard"), ("level", True), ("level", "Level 5b"), ("solution", 3), ("source", None)],
)
def test_a_column_that_only_has_a_roles_name_is_the_users_own(role, value):
    row = GOOD | {role: value}
    assert getattr(problem_from_row(row, where="here"), role) == ("" if role == "source" else None)
    with pytest.raises(DataError, match=f"`{role}` is {value!r}"):
        problem_from_row(row, where="here", columns={role: role})


def test_commas_behind_the_hashes_leave_only_a_number_of_thousands():
    numbers = ("$1,234,567", "-1,200.50", "1,200 m^2", r"\frac{1,200}{7}", "1,200/3,401")
    for said in (*numbers, "(1,200)", "{1,100}", "[0,100]", "1,2,300", "10,200,5"):
        row = {"question": "How many?", "answer": f"So many.\n#### {said}"}
        gold = said.replace(",", "") if said in numbers else said
        assert problem_from_row(row, where="a.jsonl, line 1").answer == gold


def test_a_problem_knows_its_line_and_is_the_same_without_it(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n" + json.dumps(GOOD))
    [problem] = problems_in(path)
    assert problem.where == f"{path}, line 2"
    bare = dataclasses.replace(problem, where="")
    assert problem == bare
    assert digest_of_problems([problem]) == digest_of_problems([bare])


def test_the_digest_moves_with_content_and_order_and_is_sha256():
    first = Problem(id="a", question="q", answer="1")
    second = Problem(id="b", question="q", answer="1")
    digests = {
        digest_of_problems([first, second]),
        digest_of_problems([second, first]),
        digest_of_problems([first]),
        digest_of_problems([Problem(id="a", question="q", answer="1", level=1)]),
    }
    assert len(digests) == 4
    row = '{"answer": "1", "id": "a", "level": null, "question": "q", "solution": null, '
    row += '"source": ""}\n'
    assert digest_of_problems([first]) == hashlib.sha256(row.encode()).hexdigest()
