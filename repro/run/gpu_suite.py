"""The command `gpu-tests`: run every GPU test and benchmark, and write down how they ended.

What pytest's JUnit files say counts; nothing is taken from what it prints. How a test file ended
that was green is kept beside the record, as for the benchmarks, and a start after an interruption
or a failure runs the others alone, as long as sources, device and packages are the same: a mended
test does not start all over. Of the tests only files with a test marked `gpu` are collected:
collecting all would need every package of the test group, and another machine's Python may have
just those that the GPU tests import. A file that cannot be imported is an error, and hides no
other.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

from repro.evidence.benchmarks import compared_timings, latest_run
from repro.evidence.environment import capture_environment, device_of
from repro.evidence.gpu_coverage import covered_files, gpu_test_files, is_test_file
from repro.evidence.gpu_tests import (
    GpuTests,
    Outcome,
    bless_gpu_tests,
    outcomes_by_file,
    read_gpu_tests,
    read_outcome,
    refusals,
)
from repro.evidence.provenance import PACKAGE, source_commit
from repro.run.device_queue import visible_devices
from repro.run.places import expected_folder, runs_folder
from repro.spec.config import digest_of
from repro.spec.tier import Tier
from repro.spec.whole_files import replace_text

_RECORD = "gpu_tests.json"
_PARTS = "gpu_tests.parts.json"
_BENCHMARKS = "benchmarks"
_MOST_PROCESSES = 12
# How a start of pytest ended as a whole, and how each part of it did.
Ended: TypeAlias = tuple[Outcome, Mapping[str, Outcome]]


def main_gpu_tests(args: argparse.Namespace) -> int:
    """Carry out `repro gpu-tests`; return the exit status.

    0 where the run is green and no benchmark has lost against the device's stored ones, or where a
    record was blessed; else 1. A loss keeps nobody from blessing: it may be meant.

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
    losses = _tell_losses(root, out.parent, record)
    _tell(record, out)
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
    files = covered_files(root)
    import torch  # noqa: F401 - the environment names the version of a torch that is loaded

    environment = capture_environment()
    machine = [environment.get("gpu"), environment.get("packages")]
    tests, benchmarks = run_suite(root, folder, Parts(folder / _PARTS, files, machine))
    return GpuTests(
        commit=commit,
        dirty=dirty,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment,
        tests=tests,
        benchmarks=benchmarks,
        files=files,
    )


class Parts:
    """The parts of a run that were green, kept for a start that goes on: test files, benchmarks.

    Parameters
    ----------
    path
        Of the JSON file.
    files
        Digest of each covered file, by its path.
    machine
        What else decides how a part ends: device and packages.
    """

    def __init__(self, path: Path, files: Mapping[str, str], machine: object) -> None:
        self._path, self._machine = path, machine
        self._tests = {name: digest for name, digest in files.items() if is_test_file(name)}
        self._sources = {name: files[name] for name in files.keys() - self._tests.keys()}
        self._lock = Lock()
        self._green: dict[str, dict[str, Any]] = {}
        if path.is_file():
            self._green = json.loads(path.read_text(encoding="utf-8"))

    def run(self, title: str, names: Sequence[str], start: Callable[..., Ended]) -> Outcome:
        """Return how parts ended together: some as kept, the others by one start.

        Parameters
        ----------
        title
            Of these parts, for the line that says what is not started again.
        names
            Test files, or another word each.
        start
            Given the names that are left; returns how the start ended as a whole, and how each
            part did that it can tell apart.
        """
        reused = [Outcome(**self._green[name]["outcome"]) for name in names if self._is_green(name)]
        left = [name for name in names if not self._is_green(name)]
        if reused:
            by_earlier = sum(reused[1:], start=reused[0])
            print(f"{title}: {by_earlier}, by an earlier start", flush=True)  # noqa: T201
            if not left:
                return by_earlier
        whole, each = start(left)
        with self._lock:
            self._green |= {
                name: {"state": self._state(name), "outcome": dataclasses.asdict(outcome)}
                for name, outcome in each.items()
                if outcome.green
            }
            replace_text(self._path, json.dumps(self._green, indent=1) + "\n")
        return sum(reused, start=whole)

    def _is_green(self, name: str) -> bool:
        return name in self._green and self._green[name]["state"] == self._state(name)

    def _state(self, name: str) -> str:
        """Digest of all that decides how a part ends: of the test files only its own counts."""
        return digest_of([self._sources, self._tests.get(name), self._machine])


def run_suite(root: Path, folder: Path, parts: Parts) -> tuple[Outcome, Outcome]:
    """Run the GPU tests and the benchmarks; return how each ended.

    Tests that need the device to themselves (marked `alone`) are a start of their own. The others
    spend most of their time compiling kernels, so several processes share the device where
    pytest-xdist is installed. Where there are two devices, the tests that run alone have the first,
    and all else goes to the second meanwhile.
    """
    files = gpu_test_files(root)
    alone = [file for file in files if "mark.alone" in (root / file).read_text(encoding="utf-8")]
    together = [file for file in files if file not in alone]
    shared: list[str] = []
    if importlib.util.find_spec("xdist") is not None:
        processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2))
        # Each process would otherwise load the models that a file's tests share.
        shared = ["-n", str(processes), "--dist", "loadgroup"]
    devices: Sequence[str | None] = visible_devices(None)[:2]
    first, second = devices if len(devices) == 2 else (None, None)

    def tests(
        title: str, names: list[str], junit: str, options: list[str], device: str | None
    ) -> Outcome:
        def start(left: Sequence[str]) -> Ended:
            path = folder / junit
            whole = run_pytest(root, [*options, "-m", "gpu", *left], path, device)
            return whole, outcomes_by_file(path, whole)

        return parts.run(title, names, start)

    def timed(_: Sequence[str]) -> Ended:
        # Not into the checkout: what is measured next would find it changed.
        stored = (folder / _BENCHMARKS).resolve()
        arguments = [_BENCHMARKS, "--benchmark-only", f"--benchmark-storage=file://{stored}"]
        whole = run_pytest(root, arguments, folder / "gpu_benchmarks.xml", second)
        return whole, {_BENCHMARKS: whole}

    with ThreadPoolExecutor(max_workers=1) as executor:
        apart = executor.submit(tests, "tests that run alone", alone, "alone.xml", [], first)
        if first is None:
            apart.result()
        rest = tests("tests", together, "gpu_tests.xml", shared, second)
        benchmarks = parts.run("benchmarks", [_BENCHMARKS], timed)
        return apart.result() + rest, benchmarks


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


def run_pytest(
    root: Path, arguments: Sequence[str], junit: Path, device: str | None = None
) -> Outcome:
    """Run pytest in `root`, its output to this process's; return how it ended.

    Parameters
    ----------
    junit
        Where its results are written; those of an earlier run are removed first.
    device
        The one that it sees, as `CUDA_VISIBLE_DEVICES` names it; None leaves it all.
    """
    junit.parent.mkdir(parents=True, exist_ok=True)
    junit.unlink(missing_ok=True)
    # Family xunit1 names each test's file.
    options = [f"--junitxml={junit.resolve()}", "-o", "junit_family=xunit1"]
    command = [sys.executable, "-m", "pytest", "--continue-on-collection-errors", *options]
    begun = time.monotonic()
    environment = os.environ | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
    done = subprocess.run([*command, *arguments], cwd=root, check=False, env=environment)
    return read_outcome(junit, done.returncode, time.monotonic() - begun)


def _tell_losses(root: Path, folder: Path, record: GpuTests) -> list[str]:
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


def _tell(record: GpuTests, out: Path) -> None:
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
