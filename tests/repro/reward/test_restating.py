"""What a copy of the question earns, on real sets."""

import json
import re
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3].parent / "shared" / "data"
FILES = ("gsm8k/train", "gsm8k/test", "svamp/test", "mawps/train", "mawps/test")
ARITHMETIC = re.compile(r"[0-9.()]+(?:\s?[-+*/^=]\s?[0-9.()]+)+")
MOST = 0.002


def copies(question):
    """Return what can be copied from a question as an answer: it, its end, and its arithmetic."""
    end = re.split(r"(?<=[.?!])\s+", question.strip())[-1]
    return {
        question.strip(),
        end,
        *(match.group().strip() for match in ARITHMETIC.finditer(question)),
    }


@pytest.mark.skipif(not SHARED.is_dir(), reason="no folder of real problems beside the repository")
@pytest.mark.parametrize("name", FILES)
def test_a_copy_of_a_real_question_is_paid_in_less_than_a_fifth_of_a_percent(name, pool):
    # A question may hold U+2028, at which `str.splitlines` would cut it in two.
    with (SHARED / f"{name}.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    pairs = [(row["answer"], copy) for row in rows for copy in sorted(copies(row["question"]))]
    grades = pool.grade_answers(pairs)
    paid = [pair for pair, grade in zip(pairs, grades, strict=True) if grade.status == "ok"]
    assert len(paid) < MOST * len(rows), paid[:5]
