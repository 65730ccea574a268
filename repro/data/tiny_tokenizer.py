"""The tiny policy's tokenizer: whole words of the generator, single digits, bytes for all else.

The vocabulary is written down, not trained: every word that the generator's sentences can hold is
one token, digits stand alone so that a number has one spelling, and each tag is one token. Text
outside this world (a question of a real data set) falls back to the bytes of its UTF-8 form, so
everything encodes and, for text in Unicode's NFC form, `decode(encode(text)) == text`.

A word's token includes the space before it; where a number follows, the space after it too, so that
no space is ever a token of its own inside the generator's sentences.

The words are *added tokens* upon Qwen2's own byte-level pipeline with no merges, for a reason:
transformers' `AutoTokenizer` builds a `Qwen2Tokenizer` for every checkpoint of model type `qwen2`,
whatever class its files name, and keeps of `tokenizer.json` only vocabulary, merges and added
tokens. A tokenizer of another kind would load without a word and split text wrongly.
"""

from __future__ import annotations

import re

from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from repro.data.generator import DEFAULT_GENERATOR
from repro.data.tiny_corpus import ENDINGS, STEP_JOINT, WORKING_PREFIX

END_TOKEN = "<|end|>"
PAD_TOKEN = "<|pad|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_OPERATORS = (" + ", " - ", " * ", " = ")
_MAX_LENGTH = 2048
# Words of a sentence's template with their spaces, and punctuation; empty for what is filled in.
_WORDS = re.compile(r"\{\w+\}|( ?[A-Za-z]+(?: (?=\{n\}))?|[.?])")


def vocabulary() -> list[str]:
    """Return the words, tags and endings of the vocabulary, in a fixed order."""
    config = DEFAULT_GENERATOR
    templates = (
        config.starts
        + config.additions
        + config.subtractions
        + config.multiplications
        + config.distractors
        + config.questions
    )
    pieces: dict[str, None] = dict.fromkeys(TAGS)
    pieces |= dict.fromkeys(_OPERATORS)
    pieces |= dict.fromkeys(("\n<answer>", WORKING_PREFIX.removeprefix("<think>"), STEP_JOINT))
    pieces |= dict.fromkeys(ending.split("{n}")[0] for ending in ENDINGS.values())
    for name in config.names:
        pieces |= dict.fromkeys((name, f" {name}"))
    pieces |= dict.fromkeys(f" {thing}" for thing in config.things)
    for template in templates:
        pieces |= dict.fromkeys(filter(None, _WORDS.findall(template)))
        # A sentence's first word also follows another sentence, and then has a space before it.
        pieces |= dict.fromkeys(f" {word}" for word in re.findall(r"^[A-Z][a-z]+", template))
    # Single bytes are in the vocabulary already.
    return [piece for piece in pieces if len(piece) > 1]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer for the generator's sentences.

    Its padding is not its end token, whose loss would be masked away with it.
    """
    vocab = {PAD_TOKEN: 0, END_TOKEN: 1}
    vocab |= {letter: 2 + index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        # Bytes cover all text; the class would add an unknown token that cannot occur.
        unk_token=None,  # type: ignore[arg-type]
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
        model_max_length=_MAX_LENGTH,
        padding_side="left",
    )
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in vocabulary()])
    return tokenizer
