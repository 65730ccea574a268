"""Where a step's time went: the phases of its line add up to the time between two lines."""

import itertools
from types import SimpleNamespace

import pytest

from repro.rl import clock
from repro.spec.arm import LossConfig
from repro.spec.config import EvaluationConfig


@pytest.mark.parametrize("updates", [1, 2])
def test_every_phase_of_a_step_is_on_its_line_and_in_no_series(go, updates, monkeypatch):
    lines = []
    # Each reading of the clock is a second later: phases then count their marks.
    seconds = itertools.count(0.0)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    result, _, _ = go(
        updates_per_rollout=updates,
        loss=LossConfig(beta=0.01),
        checkpoint_every=2,
        evaluation=EvaluationConfig(every=3),
        call={"on_step": lambda step, values: lines.append(values), "evaluate": float},
    )
    # Of a rollout: sampling, grading, reference, an update and an optimiser step each, the
    # refresh; rows, receipts and what stands between two rollouts.
    marks = {"rollout": 1, "grading": 1, "logprobs": 1, "update": 2 * updates + 1, "other": 3}
    due = {f"seconds_{name}": count / updates for name, count in marks.items()}
    # An evaluation begins at a mark of its own and counts nowhere.
    after = due | {"seconds_other": 4 / updates}
    evaluated = {1: [3], 2: [4, 5]}[updates]
    spent = [{n: v for n, v in line.items() if n.startswith("seconds")} for line in lines]
    assert spent == [after if step in evaluated else due for step in range(6)]
    assert not any(name.startswith("seconds") for name in result.series)
    assert result.facts["seconds"].keys() == {
        "rollout_seconds", "update_seconds", "evaluation_seconds"
    }  # fmt: skip
