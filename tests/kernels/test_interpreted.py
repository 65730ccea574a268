"""Triton's kernels without a GPU: all tests that are named `interpreted`, in one process."""

import importlib.util
from importlib.metadata import version

import numpy as np
import pytest

from tests.interpreted import INTERPRETED, require_passed

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
    require_passed(*FILES)
