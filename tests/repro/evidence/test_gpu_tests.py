"""The record of the GPU tests, which files it covers, when it may be blessed and when it is old."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from repro.evidence import gpu_tests
from repro.evidence.bless import BlessError
from repro.evidence.gpu_tests import (
    GpuTests,
    Outcome,
    bless_gpu_tests,
    gpu_tests_rows,
    read_gpu_tests,
    read_outcome,
    stale_sentence,
)
from repro.evidence.record import RecordError

GREEN = Outcome(passed=214, failed=0, errors=0, skipped=2, seconds=60.0)
SOURCE = "a" * 64


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a made-up checkout: a folder with tests."""
    (tmp_path / "checkout" / "tests").mkdir(parents=True)
    return tmp_path / "checkout"


@pytest.fixture
def expected(tmp_path: Path) -> Path:
    return tmp_path / "expected"


@pytest.fixture(autouse=True)
def one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checkout, and every commit of it, be of one source."""
    monkeypatch.setattr(gpu_tests, "source_digest", lambda: SOURCE)
    monkeypatch.setattr(gpu_tests, "digest_of_commit", lambda commit: SOURCE)


def record_at(**changes: Any) -> GpuTests:
    record = GpuTests(
        commit="1a2b3c4d5e6f",
        dirty=None,
        date="2026-11-22T10:00:00+00:00",
        environment={"gpu": [{"name": "NVIDIA H200"}], "source_sha256": SOURCE},
        tests=GREEN,
        benchmarks=GREEN,
    )
    return dataclasses.replace(record, **changes)


def junit(folder: Path, *cases: str) -> Path:
    path = folder / "results.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    green = dataclasses.replace(GREEN, failures=[])
    record = record_at(tests=green, benchmarks=green)
    record.write(path)
    assert read_gpu_tests(path) == record
    older = json.loads(path.read_text())
    older["tests"]["skips"] = {"needs two": ["a::b"]}
    path.write_text(json.dumps(older))
    assert read_gpu_tests(path) == record


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 99}, "schema is 99; needs 2"),
        ({"surprise": 1}, "surprise"),
        ({"tests": {"passed": 1}}, "no record of GPU tests"),
    ],
)
def test_a_record_that_was_changed_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "record.json"
    record_at().write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RecordError, match=words):
        read_gpu_tests(path)


def test_results_are_counted_and_failures_named(tmp_path: Path) -> None:
    cases = (
        '<testcase file="a.py" name="one"/>',
        '<testcase file="a.py" name="two"><failure message="no"/></testcase>',
        '<testcase file="a.py" name="three"><skipped message="needs two GPUs"/></testcase>',
        '<testcase file="b.py" name="four"><skipped message="needs two GPUs"/></testcase>',
        '<testcase classname="" name="c"><error message="collection failure"/></testcase>',
    )
    outcome = read_outcome(junit(tmp_path, *cases), 1, 2.04)
    assert (outcome.passed, outcome.failed, outcome.errors, outcome.skipped) == (1, 1, 1, 2)
    assert outcome.failures == ["a.py::two", "c"]
    assert str(outcome) == "1 passed, 1 failed, 1 errors, 2 skipped"
    assert outcome.seconds == 2.0
    assert not outcome.green


@pytest.mark.parametrize(("status", "errors"), [(0, 0), (1, 1), (3, 1), (-11, 1)])
def test_an_exit_status_that_no_result_explains_is_an_error(
    tmp_path: Path, status: int, errors: int
) -> None:
    outcome = read_outcome(junit(tmp_path, '<testcase file="a.py" name="one"/>'), status, 1.0)
    assert outcome.errors == errors
    assert outcome.green == (errors == 0)
    # A process that died leaves an error, not nothing.
    absent = read_outcome(tmp_path / "absent.xml", status, 1.0)
    assert (absent.errors, absent.green) == (1, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tests": dataclasses.replace(GREEN, failed=1)}, "tests: 214 passed, 1 failed"),
        ({"tests": dataclasses.replace(GREEN, passed=0)}, "tests: 0 passed"),
        ({"tests": dataclasses.replace(GREEN, errors=2)}, "2 errors"),
        ({"benchmarks": dataclasses.replace(GREEN, passed=0)}, "benchmarks: 0 passed"),
        ({"environment": {"gpu": []}}, "names no device"),
        ({"dirty": True}, "source tree with changes"),
        (
            {"environment": {"gpu": [{"name": "NVIDIA H200"}], "source_sha256": "b" * 64}},
            "not shown to be that of commit 1a2b3c4d5e6f",
        ),
    ],
)
def test_a_record_with_a_blemish_is_not_blessed(
    expected: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(BlessError, match=words):
        bless_gpu_tests(record_at(**change), expected)
    assert not expected.exists()


def test_a_record_is_stale_once_the_source_is_another_and_blesses_under_its_devices_name(
    root: Path, expected: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "nox -s gpu" in str(stale_sentence(expected, root))
    assert len(gpu_tests_rows(expected, root)) == 1
    path = bless_gpu_tests(record_at(), expected)
    assert path == expected / "systems" / "nvidia_h200" / "gpu_tests.json"
    assert stale_sentence(expected, root) is None
    current = gpu_tests_rows(expected, root)
    assert "`1a2b3c4` on NVIDIA H200, 2026-11-22: GPU tests 214 passed, 0 failed" in current[0]
    monkeypatch.setattr(gpu_tests, "source_digest", lambda: "b" * 64)
    assert "passed at 1a2b3c4 on NVIDIA H200 (2026-11-22:" in str(stale_sentence(expected, root))
    old = gpu_tests_rows(expected, root)
    assert (old[0], old[1] == current[1]) == (current[0], False)
    # An installed package has no tests that could be old.
    assert stale_sentence(expected, tmp_path) is None
    # A page changes with the first change of the source, not with the next ones.
    monkeypatch.setattr(gpu_tests, "source_digest", lambda: "c" * 64)
    assert gpu_tests_rows(expected, root) == old


def test_a_current_record_of_any_device_is_enough(
    root: Path, expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bless_gpu_tests(record_at(), expected)
    monkeypatch.setattr(gpu_tests, "source_digest", lambda: "b" * 64)
    monkeypatch.setattr(gpu_tests, "digest_of_commit", lambda commit: "b" * 64)
    other = {"gpu": [{"name": "NVIDIA A100"}], "source_sha256": "b" * 64}
    bless_gpu_tests(record_at(environment=other, date="2026-11-20T00:00:00"), expected)
    assert stale_sentence(expected, root) is None
