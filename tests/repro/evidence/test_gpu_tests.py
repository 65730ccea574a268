"""The record of the GPU tests, which files it covers, when it may be blessed and when it is old."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from repro.evidence import gpu_tests
from repro.evidence.bless import BlessError
from repro.evidence.gpu_coverage import covered_files, digest_of_content, gpu_test_files
from repro.evidence.gpu_tests import (
    GpuTests,
    Outcome,
    bless_gpu_tests,
    changed_files,
    read_gpu_tests,
    read_outcome,
    stale_sentence,
)
from repro.evidence.provenance import PACKAGE
from repro.evidence.record import RecordError
from repro.report.gpu_block import gpu_tests_rows

GREEN = Outcome(passed=214, failed=0, errors=0, skipped=2, seconds=60.0)
MARKED = "import pytest\nfrom repro.alone import x\n@pytest.mark.gpu\ndef test_it():\n    pass\n"
CHECKOUT = {
    "kernels/linear.py": "",
    "kernels/cuda/linear.cu": "",
    "kernels/tuned/h200.json": "{}",
    "kernels/README.md": "",
    "repro/models/policy.py": "def load():\n    import torch\n",
    "repro/models/values.py": "",
    "repro/spec/config.py": "",
    "repro/evidence/verdict.py": "WORDS = 'mark.gpu'",
    "repro/alone.py": "",
    "repro/report.py": "",
    "benchmarks/test_kernels.py": "",
    "benchmarks/nvidia_h200/memory.json": "{}",
    "docs/systems.md": "",
    "tests/conftest.py": "",
    "tests/kernels/test_linear.py": MARKED,
    "tests/kernels/test_words.py": "TEXT = 'pytest.mark.gpu'",
}
COVERED = {
    "kernels/linear.py",
    "kernels/cuda/linear.cu",
    "kernels/tuned/h200.json",
    "repro/models/policy.py",
    "repro/models/values.py",
    "repro/spec/config.py",
    "repro/alone.py",
    "benchmarks/test_kernels.py",
    "tests/conftest.py",
    "tests/kernels/test_linear.py",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a made-up checkout, each of its rooms with a file or two."""
    for name, text in CHECKOUT.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "checkout"


@pytest.fixture
def expected(tmp_path: Path) -> Path:
    return tmp_path / "expected"


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let git know no commit: made-up files are of none."""
    monkeypatch.setattr(gpu_tests, "files_of_commit", lambda commit, paths: None)


def record_at(root: Path, **changes: Any) -> GpuTests:
    record = GpuTests(
        commit="1a2b3c4d5e6f",
        dirty=False,
        date="2026-11-22T10:00:00+00:00",
        environment={"gpu": [{"name": "NVIDIA H200", "driver_version": "580.1"}]},
        tests=GREEN,
        benchmarks=GREEN,
        files=covered_files(root),
    )
    return dataclasses.replace(record, **changes)


def junit(folder: Path, *cases: str) -> Path:
    path = folder / "results.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def test_covered_are_kernels_rooms_that_use_the_device_and_what_gpu_tests_import(
    root: Path,
) -> None:
    assert set(covered_files(root)) == COVERED


def test_a_room_counts_from_the_moment_it_uses_the_device(root: Path) -> None:
    (root / "repro" / "evidence" / "clock.py").write_text("import torch\n")
    assert covered_files(root).keys() - COVERED == {
        "repro/evidence/clock.py",
        "repro/evidence/verdict.py",
    }


def test_words_about_the_mark_are_no_mark(root: Path) -> None:
    assert gpu_test_files(root) == ["tests/kernels/test_linear.py"]


def test_this_checkouts_gpu_tests_and_kernels_are_covered() -> None:
    names = covered_files(PACKAGE.parent).keys()
    assert {"tests/kernels/test_ops.py", "kernels/ops.py", "benchmarks/conftest.py"} <= names
    assert not {"repro/report.py", "repro/evidence/gpu_tests.py"} & names


def test_a_record_is_read_as_it_was_written(root: Path, tmp_path: Path) -> None:
    record = record_at(root, tests=dataclasses.replace(GREEN, skips={"needs two": ["a::b"]}))
    record.write(tmp_path / "record.json")
    again = read_gpu_tests(tmp_path / "record.json")
    assert again == dataclasses.replace(
        record,
        tests=dataclasses.replace(record.tests, failures=[]),
        benchmarks=dataclasses.replace(record.benchmarks, failures=[]),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 99}, "schema is 99; needs 1"),
        ({"surprise": 1}, "surprise"),
        ({"files": {}}, "was edited"),
        ({"tests": {"passed": 1}}, "no record of GPU tests"),
    ],
)
def test_a_record_that_was_changed_is_refused(
    root: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "record.json"
    record_at(root).write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RecordError, match=words):
        read_gpu_tests(path)


def test_results_are_counted_named_and_grouped_by_reason(tmp_path: Path) -> None:
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
    assert outcome.skips == {"needs two GPUs": ["a.py::three", "b.py::four"]}
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


def test_a_process_that_died_leaves_an_error_not_nothing(tmp_path: Path) -> None:
    outcome = read_outcome(tmp_path / "absent.xml", -6, 1.0)
    assert outcome.errors == 1
    assert outcome.failures == ["pytest ended with status -6 and left no results"]


def test_a_green_record_is_blessed_under_its_devices_name(root: Path, expected: Path) -> None:
    path = bless_gpu_tests(record_at(root), expected)
    assert path == expected / "systems" / "nvidia_h200" / "gpu_tests.json"
    assert read_gpu_tests(path).files == covered_files(root)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tests": dataclasses.replace(GREEN, failed=1)}, "tests: 214 passed, 1 failed"),
        ({"tests": dataclasses.replace(GREEN, passed=0)}, "tests: 0 passed"),
        ({"tests": dataclasses.replace(GREEN, errors=2)}, "2 errors"),
        ({"benchmarks": dataclasses.replace(GREEN, passed=0)}, "benchmarks: 0 passed"),
        ({"environment": {"gpu": []}}, "names no device"),
        ({"dirty": True}, "source tree with changes"),
        ({"dirty": None}, "not shown to be those of commit 1a2b3c4d5e6f"),
    ],
)
def test_a_record_with_a_blemish_is_not_blessed(
    root: Path, expected: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(BlessError, match=words):
        bless_gpu_tests(record_at(root, **change), expected)
    assert not expected.exists()


def test_a_copy_without_git_is_blessed_where_git_shows_that_it_is_the_commit(
    root: Path, expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_at(root, dirty=None)
    committed = {name: (root / name).read_bytes() for name in record.files}
    monkeypatch.setattr(gpu_tests, "files_of_commit", lambda commit, paths: committed)
    assert bless_gpu_tests(record, expected).is_file()
    changed = dict(record.files) | {"kernels/linear.py": digest_of_content(b"other")}
    with pytest.raises(BlessError, match="not shown"):
        bless_gpu_tests(dataclasses.replace(record, files=changed), expected)


def test_a_record_of_the_present_files_is_not_stale(root: Path, expected: Path) -> None:
    bless_gpu_tests(record_at(root), expected)
    assert stale_sentence(expected, root) is None


def test_changed_new_and_removed_files_are_named(root: Path, expected: Path) -> None:
    bless_gpu_tests(record_at(root), expected)
    (root / "kernels" / "linear.py").write_text("x = 1\n")
    (root / "kernels" / "new.cu").write_text("")
    (root / "repro" / "spec" / "config.py").unlink()
    assert stale_sentence(expected, root) == (
        "GPU tests last passed at 1a2b3c4 on NVIDIA H200 (2026-11-22: 214 passed, 0 failed); "
        "3 files they cover changed since: kernels/linear.py, kernels/new.cu, repro/spec/config.py"
    )


def test_documents_and_reports_may_change(root: Path, expected: Path) -> None:
    bless_gpu_tests(record_at(root), expected)
    for name in CHECKOUT.keys() - COVERED:
        (root / name).write_text("changed = 1\n")
    assert stale_sentence(expected, root) is None


def test_a_test_that_lost_its_mark_is_a_change(root: Path) -> None:
    record = record_at(root)
    (root / "tests" / "kernels" / "test_linear.py").write_text("def test_it():\n    pass\n")
    assert "tests/kernels/test_linear.py" in changed_files(record, root)


def test_of_many_changed_files_the_first_are_named(root: Path, expected: Path) -> None:
    bless_gpu_tests(record_at(root), expected)
    for number in range(8):
        (root / "kernels" / f"a{number}.py").write_text("")
    sentence = stale_sentence(expected, root)
    assert sentence is not None
    assert "8 files they cover" in sentence
    assert sentence.endswith("kernels/a4.py and 3 more")


def test_a_current_record_of_any_device_is_enough(root: Path, expected: Path) -> None:
    bless_gpu_tests(record_at(root), expected)
    (root / "kernels" / "linear.py").write_text("x = 1\n")
    other = {"gpu": [{"name": "NVIDIA A100"}]}
    bless_gpu_tests(record_at(root, environment=other, date="2026-11-20T00:00:00"), expected)
    assert stale_sentence(expected, root) is None


def test_without_a_record_the_sentence_says_how_to_make_one(root: Path, expected: Path) -> None:
    sentence = stale_sentence(expected, root)
    assert sentence is not None
    assert "nox -s gpu" in sentence
    assert gpu_tests_rows(expected, root) == [
        "No run is on record yet: `nox -s gpu` on a machine with a CUDA GPU writes one."
    ]


def test_an_installed_package_is_never_stale(tmp_path: Path, expected: Path) -> None:
    assert stale_sentence(expected, tmp_path) is None
    with pytest.raises(ValueError, match="has no tests"):
        covered_files(tmp_path)


def test_readmes_block_turns_old_with_the_first_change_and_stays_so(
    root: Path, expected: Path
) -> None:
    bless_gpu_tests(record_at(root), expected)
    current = gpu_tests_rows(expected, root)
    assert current[0] == (
        "- `1a2b3c4` on NVIDIA H200, 2026-11-22: GPU tests 214 passed, 0 failed, 2 skipped; "
        "benchmarks 214 passed, 0 failed, 2 skipped."
    )
    (root / "kernels" / "linear.py").write_text("x = 1\n")
    old = gpu_tests_rows(expected, root)
    assert old[0] == current[0]
    assert "Older than the source" in old[1]
    (root / "repro" / "models" / "policy.py").write_text("import torch\nx = 1\n")
    assert gpu_tests_rows(expected, root) == old
