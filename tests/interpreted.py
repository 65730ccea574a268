"""Tests whose Triton kernels are interpreted, which a process decides once: in one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="run by tests/kernels/test_interpreted.py with TRITON_INTERPRET=1"
)


def require_passed(*files: str) -> None:
    """Run files' tests that are named `interpreted` under Triton's interpreter; all must pass."""
    interpreted = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-k", "interpreted", *files],
        cwd=ROOT,
        env=os.environ | interpreted | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-3000:]
    for file in files:
        assert Path(file).name in done.stdout
