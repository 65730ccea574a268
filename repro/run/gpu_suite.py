"""The command `gpu-tests`: run every GPU test and benchmark, and write down how they ended.

What pytest's JUnit files say counts; nothing is taken from what it prints. Of the tests only files
with a test marked `gpu` are collected: collecting all would need every package of the test group,
and another machine's Python may have just those that the GPU tests import. A file that cannot be
imported is an error, and hides no other.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from repro.evidence.benchmarks import compared_timings, latest_run
from repro.evidence.environment import capture_environment, device_of
from repro.evidence.gpu_tests import (
    GpuTests,
    Outcome,
    bless_gpu_tests,
    read_gpu_tests,
    read_outcome,
    refusals,
)
from repro.evidence.provenance import PACKAGE, source_commit
from repro.run.places import expected_folder, runs_folder
from repro.spec.tier import Tier

_RECORD = "gpu_tests.json"
_BENCHMARKS = "benchmarks"
_MOST_PROCESSES = 12
# A mark in code: before a test, of a module, or in a module's list of marks.
_MARKED = re.compile(r"^\s*(?:@|pytestmark = )?pytest\.mark\.gpu\b", re.MULTILINE)


def main_gpu_tests(args: argparse.Namespace) -> int:
    """Carry out `repro gpu-tests`; return the exit status.

    0 where the run is green and no benchmark has lost against the device's stored ones, or where a
    record was blessed; else 1. A slower benchmark does not block blessing.

    Raises
    ------
    ValueError
        If this machine cannot run them; nothing is written then.
    BlessError
        If the record that is to be blessed does not qualify.
    """
    if args.bless:
        path = bless_gpu_tests(read_gpu_tests(Path(args.bless)), expected_folder(args.expected))
        kept = keep_timings(Path(args.bless).parent / _BENCHMARKS, PACKAGE.parent, path.parent.name)
        print("\n".join(f"wrote {one}" for one in (path, *kept)))  # noqa: T201
        return 0
    root = PACKAGE.parent
    _require_fit(root)
    out = Path(args.out) if args.out else runs_folder(None)[0] / _RECORD
    record = run_gpu_tests(root, out.parent)
    record.write(out)
    losses = _report_losses(root, out.parent, record)
    _report(record, out)
    return 0 if record.green and not losses else 1


def _require_fit(root: Path) -> None:
    lacking = Tier.SYSTEMS.missing()
    if lacking:
        raise ValueError(f"gpu-tests {lacking}")
    if not (root / "tests").is_dir():
        raise ValueError(f"gpu-tests needs a checkout; {root} has no tests")
    for package in ("pytest", "pytest_benchmark"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"gpu-tests needs {package}, which is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("gpu-tests needs kernels on the device; TRITON_INTERPRET is 1")


def run_gpu_tests(root: Path, folder: Path) -> GpuTests:
    """Run the GPU tests and the benchmarks of a checkout; return the record.

    Parameters
    ----------
    folder
        Where pytest's JUnit files go (`gpu_tests.xml`, `gpu_benchmarks.xml`).
    """
    # Asked before the tests run, which may leave files of their own.
    commit, dirty = source_commit()
    import torch  # noqa: F401 - the environment names the version of a torch that is loaded

    environment = capture_environment()
    tests, benchmarks = run_suite(root, folder)
    return GpuTests(
        commit=commit,
        dirty=dirty,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment,
        tests=tests,
        benchmarks=benchmarks,
    )


def gpu_test_files(root: Path) -> list[str]:
    """Return the test files with a test marked `gpu`, as paths from the checkout `root`."""
    return sorted(
        path.relative_to(root).as_posix()
        for path in (root / "tests").rglob("test_*.py")
        if _MARKED.search(path.read_text(encoding="utf-8"))
    )


def run_suite(root: Path, folder: Path) -> tuple[Outcome, Outcome]:
    """Run the GPU tests and the benchmarks; return how each ended.

    Tests that need the device to themselves (marked `alone`) are a start of their own. The others
    spend most of their time compiling kernels, so several processes share the device where
    pytest-xdist is installed. Every start sees all devices, for some tests need two.
    """
    files = gpu_test_files(root)
    alone = [file for file in files if "mark.alone" in (root / file).read_text(encoding="utf-8")]
    together = [file for file in files if file not in alone]
    shared: list[str] = []
    if importlib.util.find_spec("xdist") is not None:
        processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2))
        # Each process would otherwise load the models that a file's tests share.
        shared = ["-n", str(processes), "--dist", "loadgroup"]
    apart = run_pytest(root, ["-m", "gpu", *alone], folder / "alone.xml")
    rest = run_pytest(root, [*shared, "-m", "gpu", *together], folder / "gpu_tests.xml")
    # Not into the checkout: what is measured next would find it changed.
    stored = (folder / _BENCHMARKS).resolve()
    timed = [_BENCHMARKS, "--benchmark-only", f"--benchmark-storage=file://{stored}"]
    return apart + rest, run_pytest(root, timed, folder / "gpu_benchmarks.xml")


def keep_timings(stored: Path, root: Path, device: str) -> list[Path]:
    """Make a run's last benchmarks those that a device's next are compared with; return the files.

    Parameters
    ----------
    stored
        Where `run_suite` left them, by pytest-benchmark's name of the machine; may be missing.
    device
        As folders spell it.
    """
    kept = []
    for folder in sorted(path for path in stored.glob("*") if path.is_dir()):
        last = latest_run(folder)
        if last is not None:
            place = root / _BENCHMARKS / device / folder.name
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            kept.append(Path(shutil.copy(last, place)))
    return kept


def run_pytest(root: Path, arguments: Sequence[str], junit: Path) -> Outcome:
    """Run pytest in `root`, its output to this process's; return how it ended.

    Parameters
    ----------
    junit
        Where its results are written; those of an earlier run are removed first.
    """
    junit.parent.mkdir(parents=True, exist_ok=True)
    junit.unlink(missing_ok=True)
    # Family xunit1 names each test's file.
    options = [f"--junitxml={junit.resolve()}", "-o", "junit_family=xunit1"]
    command = [sys.executable, "-m", "pytest", "--continue-on-collection-errors", *options]
    begun = time.monotonic()
    done = subprocess.run([*command, *arguments], cwd=root, check=False)
    return read_outcome(junit, done.returncode, time.monotonic() - begun)


def _report_losses(root: Path, folder: Path, record: GpuTests) -> list[str]:
    """Print how a run's benchmarks compare with the device's stored ones; return the losses.

    A row that has lost is timed once more, by a process of its own: unchanged kernels have been up
    to 18 % slower in one process than in another.
    """
    now = latest_run(folder / _BENCHMARKS)
    before = latest_run(root / _BENCHMARKS / str(device_of(dict(record.environment))))
    if now is None or before is None:
        lacking = "timed now" if now is None else f"stored for {record.device}"
        print(f"benchmarks are compared with nothing: none is {lacking}")  # noqa: T201
        return []
    rows, missing = compared_timings(now, before)
    losses = {name: sentence for name, sentence in rows.items() if sentence}
    if losses:
        stored = folder / f"{_BENCHMARKS}_again"
        shutil.rmtree(stored, ignore_errors=True)
        options = ["--benchmark-only", f"--benchmark-storage=file://{stored.resolve()}"]
        options.append("--benchmark-save=again")
        run_pytest(root, [*losses, *options], folder / "gpu_benchmarks_again.xml")
        again = latest_run(stored)
        # What the second process has not timed keeps its loss.
        second = {} if again is None else compared_timings(again, before)[0]
        losses = {name: text for name, text in losses.items() if second.get(name, text)}
    lines = [f"{len(losses)} of {len(rows)} benchmarks slower than {before.name}"]
    lines += [*losses.values(), *(f"{name}: stored, and not timed now" for name in missing)]
    print("\n  ".join(lines))  # noqa: T201
    return list(losses)


def _report(record: GpuTests, out: Path) -> None:
    lines = [
        f"GPU tests on {record.device}: {record.tests}",
        f"benchmarks: {record.benchmarks}",
        f"wrote {out}",
    ]
    reasons = refusals(record)
    if reasons:
        lines.append(f"cannot be blessed: {reasons[0]}")
    else:
        lines.append(f"to bless it: python -m repro gpu-tests --bless {out}")
    print("\n".join(lines))  # noqa: T201
