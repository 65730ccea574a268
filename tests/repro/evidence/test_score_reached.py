"""When a run first reached a score, from what its record holds."""

import sys
from pathlib import Path
from types import SimpleNamespace

from repro.evidence import score_reached
from repro.evidence.score_reached import Reached

STORED = Path(__file__).parents[3] / "expected" / "records" / "mini" / "nvidia_h200"


def made(**series):
    values = {"accuracy_greedy": 41.0, "train_seconds": 1000.0}
    return SimpleNamespace(series=series, facts={"optimizer_steps": 200}, value=values.get)


def test_the_first_test_at_the_score_counts_by_the_mean_seconds_of_a_step():
    record = made(test_steps=[50, 100, 150], test_accuracy_greedy=[30.0, 35.5, 39.0])
    reached = score_reached.score_reached(record, 35)
    assert reached == Reached(seconds=500.0, percent=35.5, steps=100, cold=False)
    # The end of a run is tested, too.
    assert score_reached.score_reached(record, 40).steps == 200  # type: ignore[union-attr]
    assert score_reached.score_reached(record, 42) is None


def test_a_run_that_ended_at_its_score_has_the_seconds_that_it_counted():
    record = made(test_steps=[50], test_accuracy_greedy=[36.0], test_seconds=[321.4])
    reached = score_reached.score_reached(record, 35)
    assert reached.text() == "321 seconds from a cold start to 36.0 % (greedy, held-out), 50 steps"


def test_stored_runs_are_read(monkeypatch, capsys):
    path = STORED / "baseline_coder_0_5b.csv"
    monkeypatch.setattr(sys, "argv", ["score_reached", str(path), "35"])
    assert score_reached.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "bf16_lora_1e4, seed 100: 523 seconds of training to 39.1 % (greedy, held-out), 75"
        in (lines[0])
    )
    assert len(lines) == 6
