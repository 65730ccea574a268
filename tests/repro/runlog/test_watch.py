"""Training that teaches nothing says so, once, and ends where that is asked for."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from repro.evidence.procedure import WARNING
from repro.evidence.record import find_record, run_folder
from repro.reward.custom import reward_named
from repro.run.carry_out import carry_out
from repro.runlog.run_logger import VARIABLE, LogOptions, RunLogger, read_lines
from repro.runlog.trackers import TRACKERS, name_of
from repro.runlog.watch import LENIENT, MIXED, Watch
from repro.spec.variants import with_steps
from repro.targets import find
from tests.repro.runlog.conftest import small_of
from tests.repro.small_runs import context_of


def rollout(mixed=0, reward=(0.0, 0.0), right=0.25, all_cut_off=False):
    return SimpleNamespace(
        mixed=mixed,
        graded=[SimpleNamespace(reward=one) for one in reward],
        lenient_sampled=right,
        all_cut_off=all_cut_off,
    )


def line(form, right, tokens, mixed=3):
    return {"format": form, LENIENT: right, "completion_tokens": tokens, MIXED: mixed}


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        ((0.0, 0.0), "every reward is 0"),
        ((None, None), "no completion has a reward"),
        ((1.0, 1.0), "no reward differs from the others of its group"),
        ((), "dynamic sampling kept no group"),
    ],
)
def test_five_idle_steps_are_one_warning_with_accuracy_and_completions(reward, why):
    watch = Watch()
    said = [
        watch.rollout(rollout(0, reward), 1, ["one", "two\nlines", "x" * 300]) for _ in range(9)
    ]
    (warning,) = [sentence for sentence in said if sentence]
    assert said.index(warning) == 4
    assert f"for 5 steps: {why}; accuracy by the lenient reading is 25.0%" in warning
    assert "\n  1. one\n  2. two lines\n  3. xxx" in warning
    assert ("--template" in warning) == (1.0 not in reward)  # not of a constant reward
    assert len(warning) < 800


def test_a_run_shorter_than_that_is_warned_of_at_its_end():
    watch = Watch(whole=2)
    cut = rollout(0, (1.0, 0.0), all_cut_off=True)
    assert watch.rollout(cut, 1, []) is None
    assert "every completion is cut at the length limit" in str(watch.rollout(cut, 1, []))


def test_one_lesson_starts_the_count_again():
    watch = Watch(stop_idle=5)
    for mixed in (0, 0, 0, 0, 1, 0, 0, 0, 0):
        assert watch.rollout(rollout(mixed), 1, []) is None
    with pytest.raises(ValueError, match=r"nothing for 5 steps.*--stop-idle 5"):
        watch.rollout(rollout(0), 1, [])


def test_a_resumed_run_goes_on_counting_and_says_nothing_twice():
    four = [line(0.1, 0.2, 90, mixed) for mixed in (2, 0, 0, 0, 0)]
    assert Watch(earlier=four).rollout(rollout(), 1, []) is not None
    assert Watch(earlier=[*four, four[-1]]).rollout(rollout(), 1, []) is None
    with pytest.raises(ValueError, match="for 5 steps"):
        Watch(5, four).rollout(rollout(), 1, [])
    learnt = [line(0.0, 0.2, 240)] * 3 + [line(0.9, 0.2, 50)] * 3
    assert Watch(earlier=learnt).step(learnt[-1]) is None


@pytest.mark.parametrize(
    ("end", "is_said"),
    [
        ((0.85, 0.17, 53), True),
        ((0.85, 0.05, 100), True),
        ((0.85, 0.30, 53), False),  # it learns to answer, too
        ((0.85, 0.17, 200), False),  # it still reasons
        ((0.10, 0.17, 53), False),
        ((0.85, None, 53), False),
    ],
)
def test_format_learnt_for_reasoning_lost_is_one_warning(end, is_said):
    watch = Watch()
    said = [watch.step(line(0.03, 0.17, 240)) for _ in range(3)]
    said += [watch.step(line(*end)) for _ in range(5)]
    warnings = [sentence for sentence in said if sentence]
    assert len(warnings) == int(is_said)
    for warning in warnings:
        assert "format rose from 3% to 85%" in warning
        assert "from 240 to" in warning


@pytest.fixture
def constant(tmp_path, monkeypatch):
    """Return the name of a reward that never differs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"constant_{tmp_path.name}"
    source = "def reward(completions, answers):\n    return [0.0] * len(completions)\n"
    Path(f"{name}.py").write_text(source, encoding="utf-8")
    return f"{name}:reward"


def test_an_idle_run_goes_on_with_a_warning_or_stops_where_asked(constant, tmp_path, monkeypatch):
    run, told = small_of(with_steps(find("table1"), 6)), []
    arm = dataclasses.replace(run.arm, reward_function=reward_named(constant))
    run = dataclasses.replace(run, arm=arm)

    def progress(text, values):
        if WARNING in values:
            told.append(text)

    def go(records):
        return carry_out([run], records, context_of(run_folder(run, records), progress=progress))

    monkeypatch.setenv(VARIABLE, "")
    go(tmp_path / "on")
    assert [text.split(":")[0] for text in told] == [name_of(run)]
    folder = run_folder(run, tmp_path / "on")
    assert "for 5 steps: every reward is 0" in (folder / "warnings.txt").read_text()
    assert [one[MIXED] for one in read_lines(folder / "metrics.jsonl")] == [0] * 6
    assert find_record(run, tmp_path / "on") is not None
    monkeypatch.setenv(VARIABLE, '{"stop_idle": 3}')
    with pytest.raises(ValueError, match=r"taught nothing for 3 steps.*--stop-idle 3"):
        go(tmp_path / "off")


def test_a_tracker_that_fails_is_left_after_one_warning(tmp_path, monkeypatch):
    tracker = mock.Mock()
    tracker.log.side_effect = [None, RuntimeError("connection lost")]
    monkeypatch.setitem(TRACKERS, "failing", lambda *run: tracker)
    told = []
    options = LogOptions(trackers=("failing",))
    warn = lambda text, values: told.append(text)  # noqa: E731
    with RunLogger(small_of(find("table1")), tmp_path, options, warn) as logger:
        for step in range(1, 5):
            logger.step(step, {"reward": 0.5})
    assert tracker.log.call_count == 2
    assert [one["step"] for one in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    (text,) = told
    assert "failed at step 2 (RuntimeError: connection lost)" in text
    assert (tmp_path / "warnings.txt").read_text() == f"{text}\n"
