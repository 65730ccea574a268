"""Graders and a tokenizer that questions are asked with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerFast

from repro.data.generator import DEFAULT_GENERATOR
from repro.data.tiny_tokenizer import build_tokenizer
from repro.reward.grader import GraderPool


@pytest.fixture(scope="package")
def pool() -> Iterator[GraderPool]:
    with GraderPool(workers=1) as pool:
        yield pool


@pytest.fixture(scope="package")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(DEFAULT_GENERATOR)
