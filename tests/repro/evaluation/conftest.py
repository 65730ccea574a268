"""Graders that questions are graded by."""

import pytest

from repro.reward.grader import GraderPool


@pytest.fixture(scope="package")
def pool():
    with GraderPool() as pool:
        yield pool
