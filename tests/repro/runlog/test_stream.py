"""metrics.jsonl: a line a step, whole, in order and once, whatever stopped the run before."""

import json
import math

from repro.runlog.run_logger import StepLines, read_lines


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_each_step_is_on_the_disk_before_the_next(tmp_path):
    lines = StepLines(tmp_path / "new" / "metrics.jsonl")
    for step in (1, 2, 3):
        lines.write(step, {"reward": step / 10})
        assert steps_in(lines.path) == list(range(1, step + 1))


def test_a_resumed_run_goes_on_without_a_step_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = StepLines(path)
    for step in range(1, 6):
        first.write(step, {"reward": 0.5})
    again = StepLines(path)  # its checkpoint was of step 3
    assert again.last_before == 5
    for step in range(4, 8):
        again.write(step, {"reward": 0.5})
    assert steps_in(path) == list(range(1, 8))


def test_half_a_line_is_no_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    StepLines(path).write(1, {"reward": 1.0})
    path.write_text(path.read_text() + '{"step": 2, "rew')
    assert [line["step"] for line in read_lines(path)] == [1]
    StepLines(path).write(2, {"reward": 2.0})
    assert [line["reward"] for line in read_lines(path)] == [1.0, 2.0]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    lines = StepLines(tmp_path / "metrics.jsonl")
    lines.write(1, {"a": math.nan, "b": math.inf, "c": None, "d": 3})
    assert read_lines(lines.path) == [{"step": 1, "a": None, "b": None, "c": None, "d": 3}]
