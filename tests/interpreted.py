"""Programs whose Triton kernels are interpreted, which a process decides once: in their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def require_equal(program: str, *arguments: str) -> None:
    """Run a program under Triton's interpreter; it must end well and print `equal` last."""
    said = _interpreted("-W", "ignore", "-c", program, *arguments)
    assert said.strip().endswith("equal")


def require_passed(file: str) -> None:
    """Run a file's tests that are named `interpreted` under Triton's interpreter; all must pass."""
    assert " passed" in _interpreted("-m", "pytest", "-q", "-x", "-k", "interpreted", file)


def _interpreted(*arguments: str) -> str:
    interpreted = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | interpreted | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-3000:]
    return done.stdout
