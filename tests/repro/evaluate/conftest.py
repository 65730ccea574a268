"""Graders and a tokenizer that questions are asked with."""

import pytest

from repro.data.generator import DEFAULT_GENERATOR
from repro.data.tiny_tokenizer import build_tokenizer
from repro.reward.grader import GraderPool


@pytest.fixture(scope="package")
def pool():
    with GraderPool() as pool:
        yield pool


@pytest.fixture(scope="package")
def tokenizer():
    return build_tokenizer(DEFAULT_GENERATOR)
