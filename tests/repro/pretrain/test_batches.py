"""Batches: every document once, little padding, the same whoever makes them."""

from __future__ import annotations

import dataclasses
import itertools
from itertools import islice

import numpy as np
from tokenizers import Tokenizer

from repro.data.human_working import worked_problems
from repro.data.proxy_corpus import ProxyCorpusConfig, shard_documents
from repro.data.proxy_tokenizer import build_proxy_tokenizer
from repro.data.tiny_corpus import CorpusConfig, iterate_documents
from repro.pretrain.batches import proxy_batches, shard_batches, source_of, tiny_batches
from repro.spec.config import derive_seed
from tests.repro.pretrain.small import PROXY, TINY, human_problems


def test_the_tiny_policy_s_batches_hold_whole_documents_of_like_length_and_the_end_token(
    tiny_tokenizer,
):
    pad, end = tiny_tokenizer.pad_token_id, tiny_tokenizer.eos_token_id
    real = padded = 0
    for (part,) in islice(tiny_batches(TINY, tiny_tokenizer, 0), 200):
        assert part.ids.size <= TINY.tokens_per_batch
        for row, length in zip(part.ids.tolist(), part.lengths, strict=True):
            assert row.index(end) == length - 1
            assert pad not in row[:length]
            assert set(row[length:]) <= {pad}
            real += int(length)
        padded += part.ids.size
    assert real / padded > 0.95


def test_every_document_of_the_tiny_policy_s_corpus_is_seen_once(tiny_tokenizer):
    seen = []
    for (part,) in tiny_batches(TINY, tiny_tokenizer, 7):
        rows = part.ids.tolist()
        seen += [tiny_tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        if len(seen) >= 4096:
            break
    documents = islice(iterate_documents(derive_seed(7, "corpus"), CorpusConfig()), 4096)
    assert sorted(seen) == sorted(d.prompt + d.completion for d in documents)


def test_a_shard_s_batches_hold_each_document_once_and_every_length_in_each(proxy_tokenizer):
    recipe = dataclasses.replace(
        PROXY, parts=4, tokens_per_batch=6000, corpus=ProxyCorpusConfig(shard_documents=600)
    )
    source = source_of(recipe, proxy_tokenizer, (), 3)
    batches = shard_batches(source, Tokenizer.from_str(source.tokenizer), 5)
    assert all(len(batch) == 4 for batch in batches)
    decoded, real, padded = [], 0, 0
    for part in itertools.chain(*batches):
        for row, length in zip(part.ids, part.lengths, strict=True):
            assert row[length - 1] == proxy_tokenizer.eos_token_id
            assert set(row[length:].tolist()) <= {proxy_tokenizer.pad_token_id}
            decoded.append(proxy_tokenizer.decode(row[: length - 1].tolist()))
        real, padded = real + int(part.lengths.sum()), padded + part.ids.size
    documents = shard_documents(3, 5, recipe.corpus)
    assert sorted(decoded) == sorted(d.prompt + d.completion for d in documents)
    assert real / padded > 0.9
    sizes = [sum(int(part.lengths.sum()) for part in batch) for batch in batches]
    assert max(sizes) < 1.1 * min(sizes)
    means = [[part.lengths.mean() for part in batch] for batch in batches]
    assert all(mean[-1] > 1.5 * mean[0] for mean in np.sort(means, axis=1))


def test_batches_do_not_depend_on_who_makes_them():
    human = worked_problems(human_problems(4))
    tokenizer = build_proxy_tokenizer(PROXY.corpus, human)

    def first(workers):
        batches = proxy_batches(source_of(PROXY, tokenizer, human, 9), workers=workers)
        taken = list(itertools.islice(batches, 12))
        batches.close()
        return taken

    alone, shared = first(0), first(2)
    for one, other in zip(alone, shared, strict=True):
        for part, same in zip(one, other, strict=True):
            assert np.array_equal(part.ids, same.ids)
            assert np.array_equal(part.prompts, same.prompts)
