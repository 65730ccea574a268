"""Batches: every document once, of like length, little padding; the loss is blind to it."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from repro.data.tiny_corpus import CorpusConfig, iterate_documents
from repro.data.tiny_tokenizer import build_tokenizer
from repro.pretrain.batches import Batch, batches_of
from repro.pretrain.training import mean_loss, new_model
from repro.spec.config import derive_seed
from tests.repro.pretrain.small import TINY


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(TINY.corpus.generator)


def test_batches_hold_whole_documents_of_like_length_and_the_end_token(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    real = padded = 0
    for batch in islice(batches_of(TINY, tokenizer, 0), 200):
        assert batch.ids.size <= TINY.tokens_per_batch
        for row, length in zip(batch.ids.tolist(), batch.lengths, strict=True):
            assert row.index(end) == length - 1
            assert pad not in row[:length]
            assert set(row[length:]) <= {pad}
            real += int(length)
        padded += batch.ids.size
    assert real / padded > 0.95


def test_every_document_is_seen_once(tokenizer: PreTrainedTokenizerFast) -> None:
    seen: list[str] = []
    for batch in batches_of(TINY, tokenizer, 7):
        seen += [tokenizer.decode(row, skip_special_tokens=True) for row in batch.ids.tolist()]
        if len(seen) >= 4096:
            break
    documents = islice(iterate_documents(derive_seed(7, "corpus"), CorpusConfig()), 4096)
    assert sorted(seen) == sorted(d.prompt + d.completion for d in documents)


def test_padding_has_neither_loss_nor_influence(tokenizer: PreTrainedTokenizerFast) -> None:
    model = new_model(TINY, tokenizer, 0)
    rows = [[9, 30, 270, 271, 40, 1], [50, 60, 1]]
    padded = [rows[0], rows[1] + [tokenizer.pad_token_id] * 3]
    batch = Batch(ids=np.array(padded, dtype=np.int32), lengths=np.array([6, 3], dtype=np.int32))
    total = torch.zeros(())
    for row in rows:
        logprobs = model(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        total = total - logprobs[torch.arange(len(row) - 1), row[1:]].sum()
    torch.testing.assert_close(mean_loss(model, batch), total / (5 + 2))
