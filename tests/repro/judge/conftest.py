"""A folder of expectations to bless into."""

import shutil

import pytest

from repro.run.places import expected_folder


@pytest.fixture
def expected(tmp_path):
    """Return a folder of expectations with the paper's alone."""
    shutil.copytree(expected_folder(None) / "paper", tmp_path / "expected" / "paper")
    return tmp_path / "expected"
