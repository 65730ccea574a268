"""The sum of the GPU tests' JUnit files: counts, names of what failed, and a start that died."""

import json
from importlib.metadata import version

import pytest

from repro.evidence import gpu_tests
from repro.evidence.environment import ask_driver_tool
from repro.run.places import expected_folder

PASSES = '<testcase classname="tests.test_a" name="test_passes" />'
MIXED = f"""{PASSES}
<testcase classname="tests.test_a" name="test_fails"><failure message="1 is not 2" /></testcase>
<testcase classname="tests.test_a" name="test_skips"><skipped message="needs two" /></testcase>"""
BROKEN = '<testcase classname="tests.test_b" name=""><error message="no module" /></testcase>'


def start(folder, name, cases):
    """Write what pytest leaves in a JUnit file."""
    text = f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
    (folder / f"{name}.xml").write_text(text, encoding="utf-8")


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(gpu_tests, "ask_driver_tool", lambda fields: [{"name": "NVIDIA H200"}])
    monkeypatch.setattr(gpu_tests, "source_commit", lambda: ("c" * 40, False))


def test_results_are_counted_and_a_start_without_any_is_a_failure(tmp_path):
    start(tmp_path, "alone", MIXED)
    start(tmp_path, "together", BROKEN)
    assert gpu_tests.main(tmp_path) == 1
    record = json.loads((tmp_path / "gpu_tests.json").read_text(encoding="utf-8"))
    assert (record["commit"], record["device"]) == ("c" * 40, "NVIDIA H200")
    assert record["versions"]["torch"] == version("torch")
    assert record["tests"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert record["benchmarks"] == {"passed": 0, "failed": 1, "skipped": 0}
    assert ["fails" in record["failed"][0], len(record["failed"])] == [True, 3]


def test_a_run_that_passes_is_fine_and_its_record_makes_a_line(tmp_path):
    for name in gpu_tests.STARTS:
        start(tmp_path, name, PASSES)
    assert gpu_tests.main(tmp_path) == 0
    kept = tmp_path / "systems" / "nvidia_h200" / "gpu_tests.json"
    kept.parent.mkdir(parents=True)
    (tmp_path / "gpu_tests.json").rename(kept)
    (line,) = gpu_tests.gpu_tests_rows(tmp_path)
    assert "`ccccccc` on NVIDIA H200" in line
    assert "2 passed, 0 failed, 0 skipped; benchmarks 1 passed" in line


def test_no_device_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_tests, "ask_driver_tool", ask_driver_tool)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="nvidia-smi"):
        gpu_tests.main(tmp_path)


def test_the_committed_records_have_no_failure():
    for path in expected_folder(None).glob(f"systems/*/{gpu_tests.NAME}"):
        assert not json.loads(path.read_text(encoding="utf-8"))["failed"], path
