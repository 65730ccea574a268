"""The tiny policy's tokenizer: whole words of the generator, single digits, bytes for all else.

The vocabulary is written down, not trained: every word that the generator's sentences can hold is
one token, digits stand alone so that a number has one spelling, and each tag is one token. Text
outside this world (a question of a real data set) falls back to UTF-8 bytes, so everything encodes
and `decode(encode(text)) == text` holds for any text.

The model is a unigram with equal scores, which makes the segmentation the one with fewest tokens. A
word's token includes the space before it; where a number follows, the space after it too, so that
no space is ever a token of its own inside the generator's sentences.

Easy to get wrong: padding with the end token (its loss is then masked away and the policy never
learns to stop), and a decoder that tidies spaces, after which text no longer round-trips.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from repro.data.generator import GeneratorConfig
from repro.data.tiny_corpus import ENDINGS, STEP_JOINT, WORKING_PREFIX

END_TOKEN = "<|end|>"
PAD_TOKEN = "<|pad|>"
UNKNOWN_TOKEN = "<unk>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_OPERATORS = (" + ", " - ", " * ", " = ")
_MODEL_MAX_LENGTH = 512


def _words_of(template: str) -> Iterator[str]:
    """Yield the pieces of a sentence template: words with their spaces, and punctuation."""
    for match in re.finditer(r"\{\w+\}|( ?[A-Za-z]+(?: (?=\{n\}))?|[.?])", template):
        if match.group(1):
            yield match.group(1)


def vocabulary(config: GeneratorConfig) -> list[str]:
    """Return the pieces of the vocabulary without the byte tokens, in a fixed order."""
    templates = (
        config.starts
        + config.additions
        + config.subtractions
        + config.multiplications
        + config.distractors
        + config.questions
    )
    pieces: dict[str, None] = dict.fromkeys((PAD_TOKEN, END_TOKEN, UNKNOWN_TOKEN, *TAGS))
    pieces |= dict.fromkeys("0123456789")
    pieces |= dict.fromkeys((*_OPERATORS, " ", "\n"))
    pieces |= dict.fromkeys(("\n<answer>", WORKING_PREFIX.removeprefix("<think>"), STEP_JOINT))
    pieces |= dict.fromkeys(ending.split("{n}")[0] for ending in ENDINGS.values())
    for name in config.names:
        pieces |= dict.fromkeys((name, f" {name}"))
    pieces |= dict.fromkeys(f" {thing}" for thing in config.things)
    for template in templates:
        pieces |= dict.fromkeys(_words_of(template))
        # A sentence's first word also follows another sentence, and then has a space before it.
        pieces |= dict.fromkeys(f" {word}" for word in re.findall(r"^[A-Z][a-z]+", template))
    return list(pieces)


def build_tokenizer(config: GeneratorConfig) -> PreTrainedTokenizerFast:
    """Build the tokenizer for a generator's sentences.

    Returns
    -------
    PreTrainedTokenizerFast
        With a padding token that is not the end token, and no chat template.
    """
    pieces = vocabulary(config)
    scored = [(piece, -1.0) for piece in pieces]
    scored += [(f"<0x{byte:02X}>", -1.0) for byte in range(256)]
    model = models.Unigram(scored, unk_id=pieces.index(UNKNOWN_TOKEN), byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([PAD_TOKEN, END_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        clean_up_tokenization_spaces=False,
        model_max_length=_MODEL_MAX_LENGTH,
        padding_side="left",
    )
