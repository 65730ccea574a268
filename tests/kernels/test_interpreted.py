"""Triton's kernels without a GPU: all tests that are named `interpreted`, in one process."""

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from tests.interpreted import INTERPRETED

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = (
    "tests/kernels/test_ops.py",
    "tests/kernels/test_packed_attention.py",
    "tests/kernels/test_quantize_exact.py",
    "tests/repro/rollout/test_adapter_ranks.py",
    "tests/repro/rollout/test_kernel_ops.py",
)


def is_broken():
    """Tell whether loops fail: before 3.7, bounds are arrays of one, which NumPy 2.4 refuses."""
    major, minor = (int(part) for part in version("triton").split(".")[:2])
    try:
        int(np.zeros(1, dtype=np.int32))
    except TypeError:
        return (major, minor) < (3, 7)
    return False


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="this process is interpreted already")
def test_every_file_passes():
    if is_broken():
        pytest.skip("this Triton's interpreter cannot take loop bounds under this NumPy (>= 2.4)")
    interpreted = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-k", "interpreted", *FILES],
        cwd=ROOT,
        env=os.environ | interpreted | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-3000:]
    assert all(Path(file).name in done.stdout for file in FILES)
