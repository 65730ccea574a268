"""Tokenizers of the small recipes."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from repro.data.proxy_tokenizer import build_proxy_tokenizer
from repro.data.tiny_tokenizer import build_tokenizer
from tests.repro.pretrain.small import PROXY, TINY


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(TINY.corpus.generator)


@pytest.fixture(scope="session")
def proxy_tokenizer() -> PreTrainedTokenizerFast:
    return build_proxy_tokenizer(PROXY.corpus)
