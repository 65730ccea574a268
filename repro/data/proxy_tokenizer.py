"""The proxy policies' tokenizer: byte-level BPE trained on their own text, single digits.

The pipeline is Qwen2's (NFC, its splitting rule, bytes), because transformers builds a
`Qwen2Tokenizer` for every checkpoint of model type `qwen2` and keeps of its files only vocabulary,
merges and added tokens. Its rule splits off every digit, so a number has one spelling; bytes cover
all text, so any question encodes and, in Unicode's NFC form, `decode(encode(text)) == text`.

Tags, operators with their spaces and the openings of the endings are added tokens: each is one
token wherever it stands, and a prompt and its completion tokenise apart as they do together.

Vocabulary and merges depend on the corpus's configuration, and on the human-written training
problems where they are given, and on no seed: every policy of one corpus reads alike.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from repro.data.human_working import WorkedProblem
from repro.data.proxy_corpus import ProxyCorpusConfig, proxy_prompt, shard_documents
from repro.data.tiny_corpus import ENDINGS
from repro.data.tiny_tokenizer import END_TOKEN, PAD_TOKEN, TAGS, byte_level

VOCABULARY = 3072
_ROUNDED_TO = 64
_TEXT_SEED = 0
_TEXT_DOCUMENTS = 4096
# A human-written text counts this often: there are few, and their words matter as much.
_HUMAN_WEIGHT = 4
_OPERATORS = (" + ", " - ", " * ", " / ", " = ")


def _added_pieces() -> list[str]:
    openings = [ending.split("{n}")[0] for ending in ENDINGS.values()]
    return list(dict.fromkeys((*TAGS, *_OPERATORS, *openings)))


def build_proxy_tokenizer(
    corpus: ProxyCorpusConfig, human: Sequence[WorkedProblem] = ()
) -> PreTrainedTokenizerFast:
    """Train the tokenizer of a corpus; the same arguments give the same one.

    Returns
    -------
    PreTrainedTokenizerFast
        Of 3072 tokens with human-written problems; without them the text has no more words to
        merge and the vocabulary is smaller, a multiple of 64. The padding token is not the end
        token; there is no chat template.
    """
    sample = dataclasses.replace(corpus, shard_documents=_TEXT_DOCUMENTS)
    texts = [d.prompt + d.completion for d in shard_documents(_TEXT_SEED, 0, sample)]
    texts += [proxy_prompt(worked.problem.question) for worked in human] * _HUMAN_WEIGHT
    vocab, merges = _train(texts)
    tokenizer = byte_level(vocab, merges)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in _added_pieces()])
    # Spare tokens round the vocabulary up for the embedding's rows; no text gives them.
    spare = -len(tokenizer) % _ROUNDED_TO
    tokenizer.add_tokens(
        [AddedToken(f"<|spare{index}|>", special=True) for index in range(spare)],
        special_tokens=True,
    )
    return tokenizer


def _train(texts: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges of byte-level BPE, tags and operators cut out of the text."""
    splitter = byte_level({PAD_TOKEN: 0, END_TOKEN: 1}, [])
    trained = Tokenizer(BPE())
    trained.normalizer = splitter.backend_tokenizer.normalizer
    trained.pre_tokenizer = splitter.backend_tokenizer.pre_tokenizer
    pieces = _added_pieces()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY - len(pieces),
        min_frequency=2,
        special_tokens=[PAD_TOKEN, END_TOKEN],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(_without(texts, pieces), trainer)
    model = json.loads(trained.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def _without(texts: Sequence[str], pieces: Sequence[str]) -> list[str]:
    parts = list(texts)
    for piece in sorted(pieces, key=len, reverse=True):
        parts = [part for text in parts for part in text.split(piece) if part]
    return parts
