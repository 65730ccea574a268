"""The tiny policy's corpus and tokenizer: shares as stated, text without loss, loads as it is."""

import dataclasses
import itertools
import random
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen2Config

from repro.data.generator import draw_word_problem, split_of
from repro.data.prompts import template_named
from repro.data.tiny_corpus import (
    EMPTY_THINKING,
    WORKING_PREFIX,
    CorpusConfig,
    complete,
    iterate_documents,
)
from repro.data.tiny_tokenizer import END_TOKEN, PAD_TOKEN, vocabulary
from repro.models.checkpoint import TINY_FOLDER


@pytest.fixture(scope="module")
def documents():
    return list(itertools.islice(iterate_documents(0, CorpusConfig()), 6000))


def test_a_slip_is_carried_on_consistently():
    rng = random.Random(1)
    config = dataclasses.replace(
        CorpusConfig(), careless_share=(0.0,), slip_share=1.0, dropped_share=0.0
    )
    wrong = []
    for _ in range(300):
        text = complete(draw_word_problem(4, rng), rng, config)
        steps = re.findall(r"(\d+) (.) (\d+) = (\d+)", text)
        for previous, following in itertools.pairwise(steps):
            assert previous[3] == following[0], text
        wrong.append(sum(eval("".join(s[:3])) != int(s[3]) for s in steps))
        assert int(re.findall(r"\d+", text)[-1]) == int(steps[-1][3])
    assert set(wrong) == {0, 1}
    assert sum(wrong) > 0.8 * len(wrong)


def test_documents_of_the_training_split_begin_with_the_working_prefix_if_careful(documents):
    prefix = template_named("tiny").working_prefix
    assert all(
        completion.startswith(prefix) != completion.startswith(EMPTY_THINKING)
        for _, completion in documents
    )
    assert {split_of(prompt.removesuffix("\n")) for prompt, _ in documents} == {"train"}


def test_generated_text_is_words_and_digits_without_bytes(tokenizer, documents):
    words = {*vocabulary(), *"0123456789", ".", "?", "\n"}
    for document in documents[:500]:
        ids = tokenizer("".join(document))["input_ids"]
        assert {tokenizer.decode([i]) for i in ids} <= words


def test_a_prompt_and_its_completion_tokenise_apart_as_they_do_together(tokenizer, documents):
    for prompt, completion in documents[:1000]:
        apart = tokenizer(prompt)["input_ids"] + tokenizer(completion)["input_ids"]
        assert tokenizer(prompt + completion)["input_ids"] == apart
        opened = tokenizer(prompt)["input_ids"] + tokenizer(WORKING_PREFIX)["input_ids"]
        if completion.startswith(WORKING_PREFIX):
            assert apart[: len(opened)] == opened


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_in_nfc_survives_encoding(tokenizer, text):
    text = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_padding_token_is_not_the_end_token(tokenizer):
    assert tokenizer.pad_token == PAD_TOKEN
    assert tokenizer.eos_token == END_TOKEN
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) < 600


def test_stock_auto_tokenizer_loads_it_without_change(tokenizer, documents, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    # Its model type makes AutoTokenizer choose a class whatever the tokenizer's files say.
    Qwen2Config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    for source in (tmp_path, TINY_FOLDER):
        loaded = AutoTokenizer.from_pretrained(source)
        assert len(loaded) == len(tokenizer)
        assert loaded.eos_token_id == tokenizer.eos_token_id
        for document in documents[:200]:
            text = "".join(document) + END_TOKEN
            assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
            assert loaded.decode(loaded(text)["input_ids"]) == text
