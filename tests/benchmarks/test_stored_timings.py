"""How timings are stored, and the clock that they are taken by."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")

from benchmarks import test_lengths as rows
from benchmarks.device_time import Limits, record_rounds

ROOT = Path(__file__).parents[2]


CONFTEST = """
from benchmarks import conftest as shared

shared.HERE = __import__("pathlib").Path(__file__).parent
shared.device_slug = lambda: "made_up"
from benchmarks.conftest import (
    pytest_benchmark_update_commit_info, pytest_benchmark_update_json,
    pytest_benchmark_update_machine_info, pytest_configure,
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


def timed(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a folder of benchmarks in a process of its own, with rounds of about 1 ms."""
    rounds = "1.0e-3 1.01e-3 0.99e-3 1.0e-3 1.0e-3"
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "REPRO_COMMIT": COMMIT}
    command = [sys.executable, "-m", "pytest", str(folder), "-c", "/dev/null"]
    command += ["--rootdir", str(folder), "-p", "no:cacheprovider", "--benchmark-only", *options]
    return subprocess.run(command, cwd=folder, env=environment | {"SECONDS": rounds},
                          capture_output=True, text=True, check=False)  # fmt: skip


def test_a_run_is_stored_by_device_with_the_medians_of_the_clock_and_a_comparison_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_rows.py").write_text(ROWS, encoding="utf-8")
    done = timed(tmp_path, "-o", "addopts=-m 'not nightly'")  # as this project's pyproject.toml
    assert done.returncode == 0, done.stdout
    (path,) = tmp_path.rglob("made_up/*/0001_*.json")
    text = json.loads(path.read_text(encoding="utf-8"))
    (row,) = text["benchmarks"]
    assert row["name"] == "test_operation[row]"
    assert row["params"] == {"op": "row"}  # an object's own text has its address
    assert row["stats"]["median"] == pytest.approx(1.0e-3)
    assert row["stats"]["rounds"] == 5
    assert text["machine_info"]["node"] == "made_up"
    assert (text["commit_info"]["id"], path.name.split("_")[1]) == (COMMIT, COMMIT)
    done = timed(tmp_path, "--benchmark-compare")
    assert "Comparing against benchmarks from" in done.stdout + done.stderr
    assert list(tmp_path.rglob("*.json")) == [path]


def test_the_binding_limit_is_the_larger_share() -> None:
    limits = Limits(copy_rate=4e12, matmul_rate=8e14)
    shares = limits.shares(1e-3, nbytes=2e9, flops=2e11)
    assert shares["percent_of_copy_rate"] == pytest.approx(50)
    assert shares["percent_of_matmul_rate"] == pytest.approx(25)
    assert shares["limit_percent"] == pytest.approx(50)


def test_the_memory_row_fails_where_tensors_exceed_the_plan_by_more_than_its_bar() -> None:
    own = {f"rollout_{kind}_bytes": [1e9, 2e9] for kind in ("allocated", "reserved")}
    own |= {"update_allocated_bytes": [31e9, 1e9], "total": [1.0] * 8}
    ways = {"own": own, "bf16": own, "equal": own}
    benchmark = MagicMock(extra_info={}, stats={"median": 1.0}, disabled=False)
    rows.test_memory("row", "cpu", ways, benchmark)
    assert benchmark.extra_info["update_planned_bytes"] == pytest.approx(30.5e9, rel=0.01)
    own["update_allocated_bytes"] = [1e9, 33e9]
    with pytest.raises(AssertionError, match="update"):
        rows.test_memory("row", "cpu", ways, benchmark)


def test_a_disabled_benchmark_has_the_time_of_one_round() -> None:
    assert record_rounds(MagicMock(disabled=True, stats=None), lambda: 2, rounds=3, device="") == 2
