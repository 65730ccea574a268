"""Triton's kernels without a GPU: all tests that are named `interpreted`, in one process."""

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from tests.interpreted import INTERPRETED

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = (
    "tests/kernels/test_ops.py",
    "tests/kernels/test_nucleus.py",
    "tests/kernels/test_packed_attention.py",
    "tests/kernels/test_quantize_exact.py",
    "tests/repro/rollout/test_adapter_ranks.py",
    "tests/repro/rollout/test_kernel_ops.py",
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="this process is interpreted already")
def test_every_file_passes():
    # Before Triton 3.7 bounds of loops are arrays of one, which NumPy 2.4 makes no number of.
    if Version(version("triton")) < Version("3.7") and Version(version("numpy")) >= Version("2.4"):
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
