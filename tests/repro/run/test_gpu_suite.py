"""The command `gpu-tests`: real small runs of pytest, and refusals where there is no device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from repro.__main__ import main
from repro.evidence.benchmarks import latest_run
from repro.evidence.gpu_tests import Outcome
from repro.run import gpu_suite
from repro.run.gpu_suite import run_pytest

THREE = """
import pytest

pytestmark = pytest.mark.gpu

def test_that_passes():
    pass

def test_that_fails():
    assert 1 + 1 == 3

@pytest.mark.skip(reason="needs two CUDA devices; found 1")
def test_that_skips():
    pass
"""
GREEN = Outcome(passed=2, failed=0, errors=0, skipped=0, seconds=1.0)
RED = Outcome(passed=2, failed=1, errors=0, skipped=0, failures=["a::b"], seconds=1.0)


def start(folder: Path, text: str) -> Outcome:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (folder / "test_made_up.py").write_text(text)
    arguments = ["-m", "gpu", "-p", "no:cacheprovider", "test_made_up.py"]
    return run_pytest(folder, arguments, folder / "out" / "results.xml")


def test_a_real_run_is_counted_and_named(tmp_path: Path) -> None:
    outcome = start(tmp_path, THREE)
    assert (outcome.passed, outcome.failed, outcome.errors, outcome.skipped) == (1, 1, 0, 1)
    assert outcome.failures == ["test_made_up.py::test_that_fails"]
    assert outcome.seconds > 0


def test_a_file_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    outcome = start(tmp_path, "import no_such_package\n")
    assert outcome.passed == 0
    assert outcome.errors >= 1
    assert not outcome.green


def test_a_killed_process_is_an_error(tmp_path: Path) -> None:
    text = "import os, pytest\n@pytest.mark.gpu\ndef test_it():\n    os._exit(7)\n"
    outcome = start(tmp_path, text)
    assert outcome.failures == ["pytest ended with status 7 and left no results"]


def test_results_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    start(tmp_path, THREE)
    outcome = start(tmp_path, "import os\nos._exit(7)\n")
    assert (outcome.passed, outcome.errors) == (0, 1)


GROUPED = """
import os
import pytest

{mark}

@pytest.mark.parametrize("index", range(6))
def test_it(index):
    with open({log!r}, "a") as file:
        file.write(__name__ + " " + os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


def test_tests_that_share_a_model_run_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="several processes need pytest-xdist")
    log = tmp_path / "log"
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = xdist_group\n")
    (tmp_path / "conftest.py").write_text("from tests.groups import pytest_xdist_make_scheduler\n")
    mark = 'pytestmark = pytest.mark.xdist_group("large")'
    for name, line in (("test_grouped", mark), ("test_free", "")):
        (tmp_path / f"{name}.py").write_text(GROUPED.format(mark=line, log=str(log)))
    arguments = ["-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    outcome = run_pytest(tmp_path, arguments, tmp_path / "results.xml")
    assert outcome.passed == 12
    ran = [line.split() for line in log.read_text().splitlines()]
    assert len({worker for name, worker in ran if name == "test_grouped"}) == 1
    assert len({worker for _, worker in ran}) == 2


def test_without_a_device_the_command_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("repro.spec.tier.cuda_devices", lambda: ())
    out = tmp_path / "record.json"
    assert main(["gpu-tests", "--out", str(out)]) == 2
    assert "gpu-tests needs a CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_under_tritons_interpreter_the_command_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_suite.Tier, "missing", lambda tier: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["gpu-tests"]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command take this machine for one with an H200."""
    monkeypatch.setattr(gpu_suite.Tier, "missing", lambda tier: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    environment = {"gpu": [{"name": "NVIDIA H200"}], "source_sha256": "a" * 64}
    monkeypatch.setattr(gpu_suite, "capture_environment", lambda: environment)
    monkeypatch.setattr(gpu_suite, "source_commit", lambda: ("1a2b3c4", False))
    monkeypatch.setattr("repro.evidence.gpu_tests.digest_of_commit", lambda commit: "a" * 64)


@pytest.mark.parametrize(("benchmarks", "status"), [(GREEN, 0), (RED, 1)])
@pytest.mark.usefixtures("device")
def test_the_record_is_written_green_or_not_and_only_a_green_one_is_blessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, benchmarks: Outcome, status: int
) -> None:
    started: list[list[str]] = []

    def pretend(root: Path, arguments: list[str], junit: Path) -> Outcome:
        started.append(arguments)
        return benchmarks if "--benchmark-only" in arguments else GREEN

    monkeypatch.setattr(gpu_suite, "run_pytest", pretend)
    out, expected = tmp_path / "runs" / "record.json", tmp_path / "expected"
    (expected / "paper").mkdir(parents=True)
    assert main(["gpu-tests", "--out", str(out)]) == status
    alone, together, timed = started
    assert "tests/repro/measure/test_clean_on_gpu.py" in alone
    assert "tests/kernels/test_ops.py" in together
    assert not set(alone) & set(together) - {"-m", "gpu"}
    stored = (out.parent / "benchmarks").resolve()
    assert timed == ["benchmarks", "--benchmark-only", f"--benchmark-storage=file://{stored}"]
    assert json.loads(out.read_text())["benchmarks"]["failed"] == benchmarks.failed
    blessing = ["gpu-tests", "--bless", str(out), "--expected", str(expected)]
    assert main(blessing) == (0 if status == 0 else 2)
    blessed = expected / "systems" / "nvidia_h200" / "gpu_tests.json"
    assert blessed.is_file() == (status == 0)


def timings(path: Path, medians: dict[str, float]) -> None:
    path.parent.mkdir(parents=True)
    rows = [
        {
            "fullname": name,
            "stats": {"median": median, "iqr": 1e-6},
            "extra_info": {"waits_for_host": name == "quantize"},
        }
        for name, median in medians.items()
    ]
    path.write_text(json.dumps({"benchmarks": rows}))


@pytest.mark.parametrize(
    ("median", "again", "status"), [(1.2e-3, 1.15e-3, 1), (1.2e-3, 1e-3, 0), (1.05e-3, None, 0)]
)
@pytest.mark.usefixtures("device")
def test_a_benchmark_that_lost_fails_the_command_and_not_the_record(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    median: float,
    again: float | None,
    status: int,
) -> None:
    root, out = tmp_path / "checkout", tmp_path / "runs" / "record.json"
    (root / "tests").mkdir(parents=True)
    monkeypatch.setattr(gpu_suite, "PACKAGE", root / "repro")
    earlier = root / "benchmarks" / "nvidia_h200" / "machine" / "0001_old.json"
    timings(earlier, {"linear": 1e-3, "gone": 1e-3, "quantize": 1e-3})

    def pretend(root: Path, folder: Path) -> tuple[Outcome, Outcome]:
        stored = folder / "benchmarks" / "machine" / "0001_new.json"
        timings(stored, {"linear": median, "added": 1.0, "quantize": 2e-3})
        return GREEN, GREEN

    def pretend_again(root: Path, arguments: list[str], junit: Path) -> Outcome:
        assert again is not None, "timed once more without a loss"
        assert arguments[0] == "linear"
        timings(out.parent / "benchmarks_again" / "machine" / "0001_again.json", {"linear": again})
        return GREEN

    monkeypatch.setattr(gpu_suite, "run_suite", pretend)
    monkeypatch.setattr(gpu_suite, "run_pytest", pretend_again)
    assert main(["gpu-tests", "--out", str(out)]) == status
    said = capsys.readouterr().out
    assert f"{status} of 1 benchmarks slower than 0001_old.json" in said
    assert ("linear: 1000.0 to 1200.0 us (+20 %)" in said) == bool(status)
    assert "gone: stored, and not timed now" in said
    expected = tmp_path / "expected"
    (expected / "paper").mkdir(parents=True)
    assert main(["gpu-tests", "--bless", str(out), "--expected", str(expected)]) == 0


def test_blessed_timings_take_the_place_of_a_devices_earlier_ones(tmp_path: Path) -> None:
    stored, machine = tmp_path / "runs" / "benchmarks", "Linux-CPython-3.12-64bit"
    assert gpu_suite.keep_timings(stored, tmp_path, "nvidia_h200") == []
    other = tmp_path / "benchmarks" / "nvidia_h200" / "Linux-CPython-3.11-64bit" / "0001_old.json"
    earlier = tmp_path / "benchmarks" / "nvidia_h200" / machine / "0001_old.json"
    for path in (other, earlier, stored / machine / "0001_new.json"):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    (stored / machine / "0002_newer.json").write_text("{}")
    kept = gpu_suite.keep_timings(stored, tmp_path, "nvidia_h200")
    assert kept == [earlier.parent / "0002_newer.json"]
    assert sorted(earlier.parent.iterdir()) == kept
    assert other.exists()


def test_the_last_of_the_stored_runs_is_the_one_of_the_latest_time(tmp_path: Path) -> None:
    for folder, name, when in (("3.11", "0002_f", "2026-11-24"), ("3.12", "0001_a", "2026-11-25")):
        path = tmp_path / folder / f"{name}.json"
        path.parent.mkdir()
        path.write_text(json.dumps({"datetime": when}))
    assert latest_run(tmp_path) == tmp_path / "3.12" / "0001_a.json"
    assert latest_run(tmp_path / "nothing") is None


def test_words_about_the_mark_are_no_mark(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    marked = "import pytest\n@pytest.mark.gpu\ndef test_it():\n    pass\n"
    for name, text in (("a", marked), ("b", "TEXT = 'pytest.mark.gpu'\n")):
        (tmp_path / "tests" / f"test_{name}.py").write_text(text)
    assert gpu_suite.gpu_test_files(tmp_path) == ["tests/test_a.py"]
