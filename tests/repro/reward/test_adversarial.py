"""The corpus of completions that try to hang, crash or deceive the reward.

`adversarial.jsonl` holds the expected status, format and lenient accuracy of each, with a reason.
The status `any unpaid` stands where math-verify may refuse, disagree or run out of time.
"""

import json
import time
from pathlib import Path

import pytest

from repro.reward.score import both_grades, score
from tests.repro.small_runs import request_of

ROWS = [
    json.loads(line)
    for line in Path(__file__).with_name("adversarial.jsonl").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_hostile_completion_is_graded_as_expected_within_its_limit(row, pool):
    start = time.monotonic()
    [graded] = score([request_of(row["completion"], row["gold"])], "task", 0.2, pool)
    seconds = time.monotonic() - start
    status = both_grades([(row["gold"], row["completion"])], pool, "tags")[0][0].status
    if row["status"] == "any unpaid":
        assert status in ("wrong", "timeout"), row["reason"]
    else:
        assert status == row["status"], row["reason"]
    assert graded.format == float(row["format"]), row["reason"]
    if status == "unparsable_gold":
        assert (graded.accuracy, graded.unshaped, graded.lenient) == (None, None, None)
    else:
        paid = float(status == "ok")
        assert graded.accuracy == paid
        assert graded.unshaped == pytest.approx(paid + 0.2 * row["format"])
        assert graded.lenient == float(row["lenient"]), row["reason"]
    # The item's second, its gold's, and two starts of a worker on a busy machine.
    assert seconds < 30


def test_the_whole_corpus_in_one_call_gives_the_same_grades(pool):
    pairs = [(row["gold"], row["completion"]) for row in ROWS]
    together = [strict.status for strict, _ in both_grades(pairs, pool, "tags")]
    # What ran out of time is not remembered, and was tried alone above.
    settled = [i for i, status in enumerate(together) if status != "timeout"]
    apart = [both_grades([pairs[i]], pool, "tags")[0][0].status for i in settled]
    assert apart == [together[i] for i in settled]
    assert len(settled) > 0.9 * len(ROWS)
    assert "error" not in together


def test_no_code_in_an_answer_was_run(pool, tmp_path):
    target = tmp_path / "pwned"
    for text in (
        f"__import__('os').system('touch {target}')",
        f"\\text{{__import__('os').system('touch {target}')}}",
        f"\\write18{{touch {target}}}",
    ):
        assert pool.grade_answers([("x+1", text)])[0].status != "ok"
    assert not target.exists()
