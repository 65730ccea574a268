"""A folder of expectations to bless into."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from repro.run.places import expected_folder


@pytest.fixture
def expected(tmp_path: Path) -> Path:
    """Return a folder of expectations with the paper's alone."""
    shutil.copytree(expected_folder(None) / "paper", tmp_path / "expected" / "paper")
    return tmp_path / "expected"
