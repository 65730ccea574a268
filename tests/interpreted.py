"""Tests whose Triton kernels are interpreted, which a process decides once: in one of their own."""

from __future__ import annotations

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="run by tests/kernels/test_interpreted.py with TRITON_INTERPRET=1"
)
