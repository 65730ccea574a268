"""The pool: agreement with arithmetic, threads, deaths, limits, and leaving nothing behind."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest

import repro
from repro.reward.grader import GraderError, GraderPool

# Computed while it is parsed, which no bound on powers can help.
TOWER = ("\\binom{n}{2}", "\\binom{10000000000}{5000000000}")


def _number_pairs(count, seed):
    """Return golds and answers in many spellings, and whether they are equal, by fractions."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        gold = rng.choice([rng.randrange(400), rng.randrange(-9, 10**6)])
        value = Fraction(gold) + rng.choice([0, 0, 0, 1, -1, Fraction(1, 2), Fraction(1, 100)])
        spelled = f"{float(value):.2f}" if value.denominator > 1 else str(value)
        if value.denominator == 1:
            spelled = rng.choice([spelled, f"{int(value):,}", f"{spelled}.0", f"${spelled}$"])
        pairs.append((str(gold), spelled, value == gold))
    return pairs


def _is_running(pid):
    """Say whether a process exists and is not merely waiting to be reaped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def _soon(condition, seconds):
    """Wait until a condition holds, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def test_two_thousand_number_pairs_agree_with_exact_fractions(pool):
    pairs = _number_pairs(2000, seed=0)
    grades = pool.grade_answers([(gold, answer) for gold, answer, _ in pairs])
    assert [grade.status == "ok" for grade in grades] == [equal for *_, equal in pairs]
    assert {equal for *_, equal in pairs} == {True, False}


def test_a_late_worker_is_replaced_and_the_rest_of_its_batch_is_graded():
    with GraderPool(0.7) as pool:
        start = time.monotonic()
        statuses = [g.status for g in pool.grade_answers([("18", "18"), TOWER, ("18", "19")])]
        assert statuses == ["ok", "timeout", "wrong"]
        # The pair is tried on two workers, and the gold alone on a third.
        assert pool.workers_killed == 2
        assert pool.workers_started == 3
        assert time.monotonic() - start < 60
        # What was late on two workers is remembered.
        assert pool.grade_answers([TOWER])[0].status == "timeout"
        assert pool.workers_killed == 2
        assert pool.counters == {"ok": 1, "timeout": 2, "wrong": 1}


@pytest.mark.parametrize(
    "power", ["(x+1)^{999}", "(x+1)^{-9999}", "((x+1)^{30})^{40}", "(x+1)(x+1)^{500}"]
)
def test_a_power_that_the_gold_lacks_is_not_multiplied_out(power, pool):
    killed = pool.workers_killed
    pairs = [("x+1", power), ("(x+1, 2)", f"({power}, 2)"), ("y = x+1", f"y = {power}")]
    assert {grade.status for grade in pool.grade_answers(pairs)} == {"wrong"}
    assert pool.workers_killed == killed


def test_a_gold_over_the_limit_is_dropped():
    with GraderPool(0.4) as pool:
        # Computed while it is parsed.
        gold = "\\binom{10000000000}{5000000000}+x"
        grades = pool.grade_answers([(gold, "x"), (gold, None)])
        assert [grade.status for grade in grades] == ["unparsable_gold"] * 2


def test_the_order_of_gold_and_answer_matters(pool):
    # math-verify reads an interval as the solution of an inequality, and not the reverse.
    assert pool.grade_answers([("x > 1", "(1, \\infty)")])[0].status == "ok"
    assert pool.grade_answers([("(1, \\infty)", "x > 1")])[0].status == "wrong"


def test_workers_killed_from_outside_are_survived():
    pairs = [(gold, answer) for gold, answer, _ in _number_pairs(600, seed=3)]
    pairs[300:300] = [("x+2", "\\sqrt{" * 60 + "x" + "}" * 60)]
    with GraderPool(5.0) as quiet:
        expected = [grade.status for grade in quiet.grade_answers(pairs)]
    with GraderPool(5.0) as pool:
        pool.grade_answers([("1", "2")])
        collected = []
        thread = threading.Thread(
            target=lambda: collected.extend(g.status for g in pool.grade_answers(pairs))
        )
        thread.start()
        for pause in (0.03, 1.0):  # the second kills the worker that replaced the first
            time.sleep(pause)
            if pool.worker is not None:
                os.kill(pool.worker.process.pid, signal.SIGKILL)
        thread.join(60)
        assert collected == expected
        assert pool.workers_started >= 2


def test_no_worker_is_started_before_it_is_needed_and_none_is_left():
    with GraderPool(5.0) as pool:
        assert pool.workers_started == 0
        pool.grade_answers([("18", "18")])
        pid = pool.worker.process.pid
        assert _is_running(pid)
    assert not _is_running(pid)


# A shell that starts tests in the background may have them ignore Ctrl-C; the parent must not.
SCRIPT = """
import signal, sys, threading
from repro.reward.grader import GraderPool
signal.signal(signal.SIGINT, signal.default_int_handler)
with GraderPool({seconds}) as pool:
    pool.grade_answers([("18", "18")])
    print(pool.worker.process.pid, flush=True)
    {then}
"""
BUSY = f"pool.grade_answers([{TOWER!r}])"
IDLE = "sys.stdin.read()"


def _parent(then, seconds):
    """Start an interpreter with a pool; return it and its worker's process id."""
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(seconds=seconds, then=then)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(repro.__file__).parents[1])},
    )
    pid = int(parent.stdout.readline())
    assert _is_running(pid)
    return parent, pid


@pytest.mark.parametrize("then", [IDLE, BUSY], ids=["idle", "busy"])
def test_a_worker_does_not_outlive_a_parent_that_is_killed(then):
    parent, pid = _parent(then, seconds=0.5)
    time.sleep(0.2)
    parent.kill()
    parent.wait(10)
    # The timer of a busy worker ends it at its limit.
    assert _soon(lambda: not _is_running(pid), 10)


def test_ctrl_c_while_grading_ends_parent_and_worker_at_once():
    parent, pid = _parent(BUSY, seconds=60.0)
    time.sleep(0.3)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=10)
    assert "KeyboardInterrupt" in errors
    assert _soon(lambda: not _is_running(pid), 5)


def test_a_worker_that_cannot_start_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with GraderPool(1.0) as pool, pytest.raises(GraderError, match="does not start"):
        pool.grade_answers([("18", "18")])
