"""What every benchmark shares: the device, and a refusal to time under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Return "cuda" where there is a device that the kernels serve, else "cpu"."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("nothing is timed under Triton's interpreter")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        return "cuda"
    return "cpu"
