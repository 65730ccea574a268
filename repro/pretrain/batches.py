"""Batches of documents as token ids, in one fixed order for each recipe and seed.

Documents of like length share a batch, so little is padded. Padding stands on the right, where
causal attention cannot see it, and needs no mask.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from repro.data.tiny_corpus import iterate_documents
from repro.pretrain.recipes import Recipe
from repro.spec.config import derive_seed

# Documents that are sorted together.
_POOL_DOCUMENTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Documents of like length, right-padded.

    Attributes
    ----------
    ids : array, (B, T), int32
        Token ids, the end token last in each document, then padding.
    lengths : array, (B,), int32
        Tokens of each document with its end token.
    """

    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]


def batches_of(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> Generator[Batch]:
    """Yield batches of at most the recipe's tokens each, padding included, without end."""
    documents = iterate_documents(derive_seed(seed, "corpus"), recipe.corpus)
    rng = random.Random(derive_seed(seed, "batches"))
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    while True:
        pool = list(islice(documents, _POOL_DOCUMENTS))
        texts = [document.prompt + document.completion for document in pool]
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        rows = sorted(([*ids, end] for ids in encoded["input_ids"]), key=len)
        batches: list[list[list[int]]] = [[]]
        for row in rows:
            if batches[-1] and (len(batches[-1]) + 1) * len(row) > recipe.tokens_per_batch:
                batches.append([])
            batches[-1].append(row)
        rng.shuffle(batches)
        yield from (_padded(batch, pad) for batch in batches)


def _padded(rows: list[list[int]], pad: int) -> Batch:
    lengths = np.array([len(ids) for ids in rows], dtype=np.int32)
    filled = np.full((len(rows), int(lengths.max())), pad, dtype=np.int32)
    for index, ids in enumerate(rows):
        filled[index, : len(ids)] = ids
    return Batch(ids=filled, lengths=lengths)
