"""One grader pool for the tests of a file."""

import pytest

from repro.reward.grader import GraderPool


@pytest.fixture(scope="module")
def pool():
    """Return a pool of one worker with a short limit."""
    with GraderPool(seconds_per_item=0.6) as pool:
        yield pool


@pytest.fixture
def kept_graders():
    """Leave pools as they are: how their workers start and end is what these tests are of."""
