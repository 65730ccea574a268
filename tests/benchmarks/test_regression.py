"""A comparison of benchmarks fails on a loss of 10 % beyond both runs' noise, and else not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")

from benchmarks.device_time import DeviceClock, Limits
from benchmarks.regression import LossBeyondNoise

ROOT = Path(__file__).parents[2]


def stats(median: float, iqr: float) -> dict[str, float]:
    return {"median": median, "iqr": iqr}


@pytest.mark.parametrize(
    ("now", "before", "fails"),
    [
        (stats(1.15, 0.01), stats(1.0, 0.01), True),
        (stats(1.09, 0.001), stats(1.0, 0.001), False),
        (stats(1.15, 0.2), stats(1.0, 0.01), False),
        (stats(1.15, 0.01), stats(1.0, 0.2), False),
        (stats(2.0, 0.2), stats(1.0, 0.3), True),
        (stats(0.5, 0.0), stats(1.0, 0.0), False),
    ],
)
def test_a_loss_counts_beyond_ten_percent_and_beyond_both_runs_scatter(
    now: dict[str, float], before: dict[str, float], fails: bool
) -> None:
    assert bool(LossBeyondNoise().fails(now, before)) is fails


CONFTEST = """
from benchmarks import conftest as shared

shared.HERE = __import__("pathlib").Path(__file__).parent
shared.device_slug = lambda: "made_up"
from benchmarks.conftest import (
    pytest_benchmark_update_commit_info, pytest_benchmark_update_json,
    pytest_benchmark_update_machine_info, pytest_configure, pytest_sessionstart,
)
"""
ROWS = """
import os
import pytest
from benchmarks.device_time import CLOCK, record_rounds

SECONDS = [float(value) for value in os.environ["SECONDS"].split()]

@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("op", [pytest.param(object(), id="row")])
def test_operation(op, benchmark):
    rounds = iter([SECONDS[0], *SECONDS])
    record_rounds(benchmark, lambda: next(rounds), rounds=len(SECONDS), device="cpu")
"""
# What a copy of the tree without git is told.
COMMIT = "c0ffee" + 34 * "0"


# Forks a process for each run that it is asked for, so that torch is imported once for all. It says
# how each ended.
SERVER = """
import json, os, sys
import pytest
import benchmarks.conftest

for line in sys.stdin:
    folder, seconds, arguments = json.loads(line)
    child = os.fork()
    if not child:
        os.environ["SECONDS"] = seconds
        os.chdir(folder)
        output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        ended = pytest.main(arguments)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(ended)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass
class Ended:
    """The exit status of a run, and what it printed."""

    returncode: int
    output: str


Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Return what runs a folder of benchmarks in a process of its own, with these seconds."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "REPRO_COMMIT": COMMIT}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip

        def start(folder: Path, seconds: list[float], *options: str) -> Ended:
            arguments = [str(folder), "-c", "/dev/null", "--rootdir", str(folder)]
            arguments += ["-p", "no:cacheprovider", "--benchmark-only", *options]
            asked = [str(folder), " ".join(map(str, seconds)), arguments]
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(json.dumps(asked) + "\n")
            server.stdin.flush()
            ended = int(server.stdout.readline())
            return Ended(ended, (folder / "output").read_text(encoding="utf-8"))

        yield start


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Path:
    """Return a folder of benchmarks with one stored run, of 1 ms."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_rows.py").write_text(ROWS, encoding="utf-8")
    done = run(folder, [1.0e-3, 1.01e-3, 0.99e-3, 1.0e-3, 1.0e-3])
    assert done.returncode == 0, done.output
    return folder


def test_a_run_is_stored_by_device_with_the_medians_of_the_clock(stored: Path) -> None:
    (path,) = stored.rglob("made_up/*/0001_*.json")
    text = json.loads(path.read_text(encoding="utf-8"))
    (row,) = text["benchmarks"]
    assert row["name"] == "test_operation[row]"
    assert row["params"] == {"op": "row"}  # an object's own text has its address
    assert row["stats"]["median"] == pytest.approx(1.0e-3)
    assert row["stats"]["rounds"] == 5
    assert text["machine_info"]["node"] == "made_up"
    assert (text["commit_info"]["id"], path.name.split("_")[1]) == (COMMIT, COMMIT)


@pytest.mark.parametrize(
    ("seconds", "fails"),
    [
        ([1.15e-3, 1.16e-3, 1.14e-3, 1.15e-3, 1.15e-3], True),
        ([1.02e-3, 1.03e-3, 1.01e-3, 1.02e-3, 1.02e-3], False),
        ([0.8e-3, 1.3e-3, 1.15e-3, 0.85e-3, 1.3e-3], False),
    ],
    ids=["loss", "less than a tenth", "noise"],
)
def test_a_comparison_fails_on_a_loss_and_passes_for_noise(
    stored: Path, seconds: list[float], fails: bool, run: Run
) -> None:
    done = run(stored, seconds, "--benchmark-compare")
    assert "Comparing against benchmarks from" in done.output
    assert ("Performance has regressed" in done.output) is fails, done.output
    assert (done.returncode != 0) is fails
    assert len(list(stored.rglob("*.json"))) == 1, "a comparison stores nothing"


def test_a_comparison_without_a_stored_run_says_so_and_passes(tmp_path: Path, run: Run) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_rows.py").write_text(ROWS, encoding="utf-8")
    done = run(tmp_path, [1e-3] * 5, "--benchmark-compare")
    assert done.returncode == 0, done.output
    assert "Can't compare" in done.output


def test_the_clock_moves_by_what_is_added_alone() -> None:
    clock = DeviceClock()
    assert clock() == clock() == 0.0
    clock.add(0.25)
    assert clock() == 0.25


def test_the_binding_limit_is_the_larger_share() -> None:
    limits = Limits(copy_rate=4e12, matmul_rate=8e14)
    shares = limits.shares(1e-3, nbytes=2e9, flops=2e11)
    assert shares["percent_of_copy_rate"] == pytest.approx(50)
    assert shares["percent_of_matmul_rate"] == pytest.approx(25)
    assert shares["limit_percent"] == pytest.approx(50)
