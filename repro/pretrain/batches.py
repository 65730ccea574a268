"""Batches of documents as token ids, in one fixed order for each recipe and seed.

Documents of like length share a `Part`, so little is padded. Padding stands on the right, where
causal attention cannot see it, and needs no mask.

The tiny policy's documents are one stream; a batch is one part of at most the recipe's tokens.

The proxy policies' documents come in shards, drawn and tokenised by worker processes. A shard is a
function of the seed and its number, and its batches a function of the shard, so whoever makes it
and when changes nothing; the parent takes shards in the order of their numbers. The workers are
fresh processes (`spawn`), since the parent has a CUDA context that a fork would break. A worker
gets the tokenizer's own file and never imports transformers, which takes longer than its first
shard.

Within a shard documents are sorted by length and cut into groups of equal tokens; each batch takes
one group from every part of the range of lengths, so that every step sees short and long documents
alike.

Easy to get wrong: batches of like length alone. Careless completions are short, so a step on short
documents would pull towards carelessness and the next one away from it. (The tiny policy's batches
are of like length; its recipe is older, and the shipped weights are a function of it.)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from repro.data.human_working import WorkedProblem
from repro.data.proxy_corpus import shard_documents
from repro.data.tiny_corpus import iterate_documents
from repro.pretrain.recipes import ProxyRecipe, TinyRecipe
from repro.spec.config import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Token ids of a document, and how many of them are the prompt's.
Row = tuple[list[int], int]
# Documents of the tiny policy that are sorted together.
_POOL_DOCUMENTS = 4096
_STATE: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Documents of like length, right-padded.

    Attributes
    ----------
    ids : array, (B, T), int32
        Token ids, the end token last in each document, then padding.
    prompts, lengths : array, (B,), int32
        Tokens of the prompt, and of the document with its end token.
    """

    ids: npt.NDArray[np.int32]
    prompts: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]

    def weights(self, prompt_weight: float) -> npt.NDArray[np.float32]:
        """Return the loss weight of predicting token t + 1 from token t, (B, T - 1), float32."""
        target = np.arange(1, self.ids.shape[1])[None, :]  # (1, T - 1)
        # By predicted token: (B, T - 1)
        weights = np.where(target < self.prompts[:, None], np.float32(prompt_weight), 1.0)
        return np.where(target < self.lengths[:, None], weights, 0.0).astype(np.float32)


Batch = list[Part]


def tiny_batches(
    recipe: TinyRecipe, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Generator[Batch]:
    """Yield the tiny policy's batches of one part each, without end."""
    documents = iterate_documents(derive_seed(seed, "corpus"), recipe.corpus)
    rng = random.Random(derive_seed(seed, "batches"))
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    while True:
        pool = list(islice(documents, _POOL_DOCUMENTS))
        texts = [document.prompt + document.completion for document in pool]
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        # The loss of this recipe makes no difference between prompt and completion.
        rows: list[Row] = [([*ids, end], 0) for ids in encoded["input_ids"]]
        rows.sort(key=lambda row: len(row[0]))
        batches: list[list[Row]] = [[]]
        for row in rows:
            if batches[-1] and (len(batches[-1]) + 1) * len(row[0]) > recipe.tokens_per_batch:
                batches.append([])
            batches[-1].append(row)
        rng.shuffle(batches)
        yield from ([_padded(batch, pad)] for batch in batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """All that batches are made from, as plain values that travel to other processes.

    Attributes
    ----------
    tokenizer
        The `tokenizers` library's own JSON.
    pad, end
        Token ids.
    """

    recipe: ProxyRecipe
    human: tuple[WorkedProblem, ...]
    seed: int
    tokenizer: str
    pad: int
    end: int


def source_of(
    recipe: ProxyRecipe,
    tokenizer: PreTrainedTokenizerFast,
    human: Sequence[WorkedProblem],
    seed: int,
) -> Source:
    """Return the source of batches for a recipe, its tokenizer and a seed."""
    return Source(
        recipe=recipe,
        human=tuple(human),
        seed=seed,
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        pad=tokenizer.pad_token_id,
        end=tokenizer.eos_token_id,
    )


def shard_batches(source: Source, tokenizer: Tokenizer, shard: int) -> list[Batch]:
    """Return the batches of one shard, each of `recipe.parts` parts."""
    recipe = source.recipe
    documents = shard_documents(source.seed, shard, recipe.corpus, source.human)
    prompts = tokenizer.encode_batch_fast([d.prompt for d in documents], add_special_tokens=False)
    completions = tokenizer.encode_batch_fast(
        [d.completion for d in documents], add_special_tokens=False
    )
    rows: list[Row] = [
        ([*prompt.ids, *completion.ids, source.end], len(prompt.ids))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    rows.sort(key=lambda row: len(row[0]))
    tokens = np.cumsum([len(ids) for ids, _ in rows])
    steps = max(1, round(int(tokens[-1]) / recipe.tokens_per_batch))
    groups = _cut(rows, tokens, min(len(rows), steps * recipe.parts))
    rng = random.Random(derive_seed(source.seed, "proxy order", shard))
    batches: list[Batch] = [[] for _ in range(steps)]
    for begin in range(0, len(groups), steps):
        of_like_length = groups[begin : begin + steps]
        rng.shuffle(of_like_length)
        for batch, group in zip(batches, of_like_length, strict=False):
            batch.append(_padded(group, source.pad))
    rng.shuffle(batches)
    return [batch for batch in batches if batch]


def _cut(rows: list[Row], tokens: npt.NDArray[Any], groups: int) -> list[list[Row]]:
    """Cut rows into groups of about equal tokens, in order, none of them empty."""
    targets = tokens[-1] * np.arange(1, groups) / groups
    edges = [0, *np.searchsorted(tokens, targets, side="right").tolist(), len(rows)]
    return [rows[begin:end] for begin, end in pairwise(edges) if end > begin]


def _padded(rows: list[Row], pad: int) -> Part:
    lengths = np.array([len(ids) for ids, _ in rows], dtype=np.int32)
    filled = np.full((len(rows), int(lengths.max())), pad, dtype=np.int32)
    for index, (ids, _) in enumerate(rows):
        filled[index, : len(ids)] = ids
    prompts = np.array([prompt for _, prompt in rows], dtype=np.int32)
    return Part(ids=filled, prompts=prompts, lengths=lengths)


def proxy_batches(source: Source, *, workers: int) -> Generator[Batch]:
    """Yield batches without end, the same for every number of workers.

    Parameters
    ----------
    workers
        Processes that draw and tokenise; 0 does it in this one.
    """
    if workers == 0:
        tokenizer = Tokenizer.from_str(source.tokenizer)
        for shard in count():
            yield from shard_batches(source, tokenizer, shard)
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_prepare,
        initargs=(source,),
    )
    shards = count()
    waiting: deque[Future[list[Batch]]] = deque()
    try:
        while True:
            while len(waiting) < workers + 2:
                waiting.append(pool.submit(_make, next(shards)))
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _prepare(source: Source) -> None:
    # As many processes as cores run beside this one; each tokenises on its own thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # An interrupt is the parent's affair; it shuts the pool down.
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _STATE.update(source=source, tokenizer=Tokenizer.from_str(source.tokenizer))


def _make(shard: int) -> list[Batch]:
    return shard_batches(_STATE["source"], _STATE["tokenizer"], shard)
