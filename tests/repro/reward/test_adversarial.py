"""The corpus of completions that try to hang, crash or deceive the reward.

`adversarial.jsonl` holds the expected status, format and lenient accuracy of each, with a reason.
The status `any unpaid` stands where math-verify may refuse, disagree or run out of time, depending
on its version and the machine; what must hold is that nothing is paid.
"""

import json
import time
from pathlib import Path

import pytest

from repro.reward.score import score

ROWS = [
    json.loads(line)
    for line in Path(__file__).with_name("adversarial.jsonl").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_hostile_completion_is_graded_as_expected_within_its_limit(row, pool):
    start = time.monotonic()
    rewards = score([row["completion"]], [row["gold"]], "task", 0.2, pool)
    seconds = time.monotonic() - start
    [status] = rewards.statuses
    if row["status"] == "any unpaid":
        assert status in ("wrong", "timeout"), row["reason"]
    else:
        assert status == row["status"], row["reason"]
    assert rewards.format == [float(row["format"])], row["reason"]
    if status == "unparsable_gold":
        assert rewards.accuracy == rewards.total == rewards.lenient_accuracy == [None]
    else:
        paid = float(status == "ok")
        assert rewards.accuracy == [paid]
        assert rewards.total == [pytest.approx(paid + 0.2 * row["format"])]
        assert rewards.lenient_accuracy == [float(row["lenient"])], row["reason"]
    # The item's second, its gold's, and two starts of a worker on a busy machine.
    assert seconds < 30


def test_the_whole_corpus_in_one_call_gives_the_same_grades(pool):
    texts = [row["completion"] for row in ROWS]
    golds = [row["gold"] for row in ROWS]
    together = score(texts, golds, "task", 0.2, pool)
    # What ran out of time is not remembered, and was tried alone above.
    settled = [i for i, status in enumerate(together.statuses) if status != "timeout"]
    apart = [score([texts[i]], [golds[i]], "task", 0.2, pool).statuses[0] for i in settled]
    assert apart == [together.statuses[i] for i in settled]
    assert len(settled) > 0.9 * len(ROWS)
    assert "error" not in together.statuses


def test_no_code_in_an_answer_was_run(pool, tmp_path):
    target = tmp_path / "pwned"
    for text in (
        f"__import__('os').system('touch {target}')",
        f"\\text{{__import__('os').system('touch {target}')}}",
        f"\\write18{{touch {target}}}",
    ):
        assert pool.grade_answers([("x+1", text)])[0].status != "ok"
    assert not target.exists()
