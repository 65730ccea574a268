"""How timings are stored, and the clock that they are taken by."""

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")

from benchmarks import claims
from benchmarks import test_claims as rows
from benchmarks.claim_tables import unit_of
from benchmarks.device_time import Limits, record_rounds
from repro.evidence.procedure import Measured
from repro.evidence.record import Estimate
from repro.spec.tier import Tier
from repro.targets import TARGETS, speed
from repro.targets.table1 import NVFP4_LORA

ROOT = Path(__file__).parents[2]


CONFTEST = """
from benchmarks import conftest as shared

shared.HERE = __import__("pathlib").Path(__file__).parent
shared.device_slug = lambda: "made_up"
from benchmarks.conftest import (
    pytest_benchmark_update_commit_info, pytest_benchmark_update_json,
    pytest_benchmark_update_machine_info, pytest_configure, pytest_terminal_summary,
)
"""
ROWS = """
import os
import pytest
from benchmarks.device_time import CLOCK, record_rounds

SECONDS = [float(value) for value in os.environ["SECONDS"].split()]

@pytest.mark.benchmark(timer=CLOCK, group="QeRL is fast")
@pytest.mark.parametrize("op", [pytest.param(object(), id="row")])
def test_operation(op, benchmark):
    rounds = iter([SECONDS[0], *SECONDS])
    record_rounds(benchmark, lambda: next(rounds), rounds=len(SECONDS))
    benchmark.extra_info |= {"ratio": 2.5, "paper": "over 1.5 x"}
"""
# What a copy of the tree without git is told.
COMMIT = "c0ffee" + 34 * "0"


def timed(folder, *options):
    """Run a folder of benchmarks in a process of its own, with rounds of about 1 ms."""
    rounds = "1.0e-3 1.01e-3 0.99e-3 1.0e-3 1.0e-3"
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "REPRO_COMMIT": COMMIT}
    command = [sys.executable, "-m", "pytest", str(folder), "-c", "/dev/null"]
    command += ["--rootdir", str(folder), "-p", "no:cacheprovider", "--benchmark-only", *options]
    return subprocess.run(command, cwd=folder, env=environment | {"SECONDS": rounds},
                          capture_output=True, text=True, check=False)  # fmt: skip


def test_a_run_is_stored_by_device_with_the_medians_of_the_clock_and_a_comparison_is_not(tmp_path):
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
    # A table for each claim, in one unit, and no other.
    assert re.search(r"QeRL is fast\s+row +ms +least +most +x 16 bits +the paper", done.stdout)
    assert re.search(r"row +1 +0.99 +1.01 +2.50 +over 1.5 x", done.stdout)
    assert "Outliers" not in done.stdout
    assert "On a CPU" in done.stdout
    done = timed(tmp_path, "--benchmark-compare")
    assert re.search(r"row +ms +least +most +stored .*\s+row +1 +0.99 +1.01 +1 ", done.stdout)
    assert list(tmp_path.rglob("*.json")) == [path]


def test_the_binding_limit_is_the_larger_share():
    shares = Limits(copy_rate=4e12, matmul_rate=8e14).shares(1e-3, nbytes=2e9, flops=2e11)
    assert shares["percent_of_copy_rate"] == pytest.approx(50)
    assert shares["percent_of_matmul_rate"] == pytest.approx(25)
    assert shares["limit_percent"] == pytest.approx(50)


def benchmark_of(seconds=1.0):
    return MagicMock(extra_info={}, stats={"median": seconds}, disabled=False)


def rates(bf16, nvfp4):
    """Return made-up rollouts: every cell of an arm at one rate, three repeats of it."""
    names = [speed.rate(point.name, n).name for point in claims.CELLS for n in point.batches]
    by_arm = {"BF16": bf16, "NVFP4": nvfp4}
    return lambda arm: {m: dict.fromkeys((0, 1, 2), by_arm[arm]) for m in names}


def test_the_headline_fails_where_it_does_not_hold_and_is_a_finding_at_large_batches(monkeypatch):
    monkeypatch.setattr(claims, "rollouts", rates(1000.0, 1400.0))
    point = claims.CELLS[0]
    with pytest.raises(AssertionError, match=r"1\.40 x of 16-bit LoRA"):
        rows.test_rollout("NVFP4", point, 8, benchmark_of())
    # Without a record of this device nothing is blessed.
    shown = benchmark_of()
    rows.test_rollout("NVFP4", point, 256, shown)
    assert shown.group == rows.LARGE
    assert shown.extra_info["ratio"] == pytest.approx(1.4)
    assert "finding: not here" in shown.extra_info["paper"]
    assert shown.extra_info["blessed"] == "not blessed here"
    monkeypatch.setattr(claims, "rollouts", rates(1000.0, 1600.0))
    rows.test_rollout("NVFP4", point, 8, benchmark_of())


def test_a_row_is_red_where_it_is_slower_than_blessed_by_the_projects_rule(monkeypatch):
    monkeypatch.setattr(claims, "device_slug", lambda: "nvidia_h100_80gb_hbm3")

    def verdict(target, metric, *values):
        own = {metric: {(0, n): value for n, value in enumerate(values)}}
        return claims.compared(target, NVFP4_LORA.name, own)[metric].verdict

    metric, of = speed.rate("7b", 8).name, (2900.0, 2600.0, 3300.0)
    found = [verdict("rollout", metric, 0.999 * rate, rate, 1.001 * rate) for rate in of]
    assert found == ["unchanged", "regressed", "improved"]
    # Repeats of drawn lengths are compared in pairs: what they spread by hides nothing.
    for point, seconds in (("spread", (5.6, 6.08, 5.07)), ("equal", (3.94, 4.33, 3.9))):
        metric, slower = f"step_seconds_7b_{point}", [1.06 * own for own in seconds]
        assert verdict("step_lengths", metric, *seconds) == "unchanged"
        assert verdict("step_lengths", metric, *slower) == "regressed"
    monkeypatch.setattr(claims, "rollouts", rates(1277.0, 2600.0))
    with pytest.raises(AssertionError, match="regressed, -11"):
        rows.test_rollout("NVFP4", claims.CELLS[0], 8, benchmark_of())


def test_every_arm_and_cell_of_the_claims_has_what_it_is_compared_with(monkeypatch):
    monkeypatch.setattr(claims, "device_slug", lambda: "nvidia_h100_80gb_hbm3")
    for arm in ("bf16_lora", "nvfp4_lora"):
        rollout = rates(1.0, 1.0)("BF16")
        assert claims.compared("rollout", arm, rollout).keys() == rollout.keys()
        step = {f"{phase}_seconds_7b_spread": {0: 1.0} for phase in ("step", "update")}
        assert claims.compared("step_lengths", arm, step).keys() == step.keys()
    peak = {f"peak_bytes_{claims.CLAIM.name}": {0: 3.44e10}}
    (row,) = claims.compared("memory", "nvfp4_lora", peak).values()
    assert row.verdict == "unchanged"


def test_what_is_measured_is_the_targets_own_points_by_the_suites_own_code(monkeypatch):
    runs = []

    def seeds(own, context):
        runs.extend(own)
        value = Estimate(value=2.0, unit="tokens per second")
        # The largest batch does not fit.
        return [Measured(metrics={f"tokens_per_second_7b_{b}": value for b in (1, 8, 64)})] * 3

    def steps(run, context):
        runs.append(run)
        value = Estimate(value=2.0, unit="seconds")
        return Measured(metrics={"step_seconds_7b_spread": value, "peak_bytes_7b_spread": value},
                        series={"step_seconds_7b_spread": [1.0, 2.0, 3.0]})  # fmt: skip

    monkeypatch.setattr(claims, "measure_seeds", seeds)
    monkeypatch.setattr(claims, "measure_steps", steps)
    monkeypatch.setattr(claims, "missing_library", lambda name: None)
    rates_of = claims.rollouts.__wrapped__("NF4 bitsandbytes")
    assert rates_of["tokens_per_second_7b_8"] == dict.fromkeys((0, 1, 2), 2.0)
    assert rates_of["tokens_per_second_7b_256"] == {}
    assert runs[0].scale.products(runs[0].arm.name) == "bitsandbytes"
    runs.clear()
    claims.rollouts.__wrapped__("BF16")
    assert [run.seed for run in runs] == [0, 1, 2]
    target = next(item for item in TARGETS if item.name == "rollout")
    assert runs[0].scale.points[0] == target.scales[Tier.SYSTEMS].points[0]
    assert runs[0].arm in target.arms
    values = claims.steps.__wrapped__("NVFP4")
    assert values["step_seconds_7b_spread"] == {(0, 0): 1.0, (0, 1): 2.0, (0, 2): 3.0}
    assert values["peak_bytes_7b_spread"] == {(0, 0): 2.0}


def test_the_memory_row_fails_where_a_step_does_not_fit_the_card(monkeypatch):
    name = claims.CLAIM.name

    def step(peak):
        return lambda: {f"step_seconds_{name}": {0: 22.0}, f"peak_bytes_{name}": {0: peak}}

    monkeypatch.setattr(claims, "claimed_step", step(3.5e10))
    rows.test_peak_of_a_32b_step(benchmark_of())
    monkeypatch.setattr(claims, "claimed_step", step(8.1e10))
    with pytest.raises(AssertionError, match=r"81\.0 GB"):
        rows.test_peak_of_a_32b_step(benchmark_of())


def test_an_arm_that_cannot_be_measured_is_skipped_with_a_sentence(monkeypatch):
    monkeypatch.setattr(claims, "missing_library", lambda name: f"needs {name}")
    with pytest.raises(pytest.skip.Exception, match="nf4_lora_bitsandbytes needs bitsandbytes"):
        rows.test_rollout("NF4 bitsandbytes", claims.CELLS[0], 1, benchmark_of())


def test_a_table_has_one_unit():
    assert unit_of([3e-5, 2e-4, 9e-4]) == ("us", 1e6)
    assert unit_of([0.5, 2.0, 30.0]) == ("s", 1.0)


def test_a_disabled_benchmark_has_the_time_of_one_round():
    assert record_rounds(MagicMock(disabled=True, stats=None), lambda: 2, rounds=3) == 2
