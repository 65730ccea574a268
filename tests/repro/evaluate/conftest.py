"""Graders and a tokenizer that questions are asked with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerFast

from repro.data.proxy_corpus import ProxyCorpusConfig
from repro.data.proxy_tokenizer import build_proxy_tokenizer
from repro.reward.grader import GraderPool


@pytest.fixture(scope="package")
def pool() -> Iterator[GraderPool]:
    with GraderPool(workers=1) as pool:
        yield pool


@pytest.fixture(scope="package")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_proxy_tokenizer(ProxyCorpusConfig())
