"""Programs whose Triton kernels are interpreted, which a process decides once: in their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def require_equal(program: str, *arguments: str) -> None:
    """Run a program under Triton's interpreter; it must end well and print `equal` last."""
    interpreted = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env=os.environ | interpreted,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("equal")
