"""The command `gpu-tests`: run every GPU test and benchmark, and write down how they ended.

Each part is one process of pytest, whose JUnit file is read afterwards; nothing is taken from what
it prints. A part that was green is kept beside the record, and a start that was interrupted goes on
after it, as long as sources, device and packages are the same. Of the tests only files with a test
marked `gpu` are collected: collecting all would need every package of the test group, and another
machine's Python may have just those that the GPU tests import. A file that cannot be imported is an
error, and hides no other.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from repro.evidence.environment import capture_environment
from repro.evidence.gpu_coverage import covered_files, gpu_test_files
from repro.evidence.gpu_tests import (
    GpuTests,
    Outcome,
    bless_gpu_tests,
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
_MOST_PROCESSES = 12


def main_gpu_tests(args: argparse.Namespace) -> int:
    """Carry out `repro gpu-tests`; return 0 where the run is green or was blessed, else 1.

    Raises
    ------
    ValueError
        If this machine cannot run them; nothing is written then.
    BlessError
        If the record that is to be blessed does not qualify.
    """
    if args.bless:
        path = bless_gpu_tests(read_gpu_tests(Path(args.bless)), expected_folder(args.expected))
        print(f"wrote {path}")  # noqa: T201
        return 0
    root = PACKAGE.parent
    _require_fit(root)
    out = Path(args.out) if args.out else runs_folder(None)[0] / _RECORD
    record = run_gpu_tests(root, out.parent)
    record.write(out)
    _tell(record, out)
    return 0 if record.green else 1


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
    state = digest_of([files, environment.get("gpu"), environment.get("packages")])
    tests, benchmarks = run_suite(root, folder, Parts(folder / _PARTS, state))
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
    """The parts of a run that were green, kept for a start that goes on.

    Parameters
    ----------
    path
        Of the JSON file.
    state
        Digest of all that decides how a part ends; parts of another are not taken.
    """

    def __init__(self, path: Path, state: str) -> None:
        self._path, self._state = path, state
        self._lock = Lock()
        self._green: dict[str, dict[str, Any]] = {}
        if path.is_file():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self._green = kept["green"] if kept["state"] == state else {}

    def once(self, name: str, start: Callable[[], Outcome]) -> Outcome:
        """Return how a part ended: as kept where it was green, else by a start of its own."""
        if name in self._green:
            outcome = Outcome(**self._green[name])
            print(f"{name}: {outcome}, by an earlier start", flush=True)  # noqa: T201
            return outcome
        outcome = start()
        if outcome.green:
            with self._lock:
                self._green[name] = dataclasses.asdict(outcome)
                kept = {"state": self._state, "green": self._green}
                replace_text(self._path, json.dumps(kept, indent=1) + "\n")
        return outcome


def run_suite(root: Path, folder: Path, parts: Parts) -> tuple[Outcome, Outcome]:
    """Run the GPU tests and the benchmarks; return how each ended.

    Tests that need the device to themselves (marked `alone`) are a start of their own. The others
    spend most of their time compiling kernels, so several processes share the device where
    pytest-xdist is installed. Where there are two devices, the tests that run alone have the first,
    and all else goes to the second meanwhile.
    """
    files = gpu_test_files(root)
    alone = [file for file in files if "mark.alone" in (root / file).read_text(encoding="utf-8")]
    together = ["-m", "gpu", *(file for file in files if file not in alone)]
    if importlib.util.find_spec("xdist") is not None:
        processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2))
        # Each process would otherwise load the models that a file's tests share.
        together = ["-n", str(processes), "--dist", "loadgroup", *together]
    devices: Sequence[str | None] = visible_devices(None)[:2]
    first, second = devices if len(devices) == 2 else (None, None)

    def rest() -> tuple[Outcome, Outcome]:
        timed = ["benchmarks", "--benchmark-only"]
        return (
            parts.once(
                "tests", lambda: run_pytest(root, together, folder / "gpu_tests.xml", second)
            ),
            parts.once(
                "benchmarks", lambda: run_pytest(root, timed, folder / "gpu_benchmarks.xml", second)
            ),
        )

    with ThreadPoolExecutor(max_workers=1) as executor:
        tests_alone = executor.submit(
            parts.once,
            "tests that run alone",
            lambda: run_pytest(root, ["-m", "gpu", *alone], folder / "alone.xml", first),
        )
        if first is None:
            tests_alone.result()
        tests, benchmarks = rest()
        return tests_alone.result() + tests, benchmarks


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
