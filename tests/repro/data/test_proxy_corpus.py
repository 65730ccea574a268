"""The proxy corpus and its tokenizer: habits in their shares, text without loss, loads as it is."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen2Config

from repro.data.generator import split_of
from repro.data.human_working import decimal_text, work_out, worked_problems
from repro.data.problem import Problem
from repro.data.prompts import render, template_named
from repro.data.proxy_corpus import (
    WORKING_PREFIX,
    ProxyCorpusConfig,
    careless_share,
    complete,
    proxy_prompt,
    shard_documents,
)
from repro.data.proxy_problems import LEVELS, iterate_leveled_problems
from repro.data.proxy_tokenizer import build_proxy_tokenizer
from repro.reward.answers import extract_answer, format_ok

CONFIG = ProxyCorpusConfig(shard_documents=6000)


def human_problem(number, equation, answer):
    text = f"Janine weighs {number} dogwood saplings."
    return Problem(id=str(number), question=text, answer=answer, solution=equation)


@pytest.fixture(scope="module")
def human():
    return worked_problems(
        [human_problem(n, f"X=({n}.0+2.5)*2", str(2 * n + 5)) for n in range(40)]
    )


@pytest.fixture(scope="module")
def tokenizer(human):
    return build_proxy_tokenizer(ProxyCorpusConfig(), human)


@pytest.fixture(scope="module")
def documents(human):
    return shard_documents(0, 0, CONFIG, human)


def share(values):
    values = list(values)
    return sum(values) / len(values)


def careless(document):
    return not document.completion.startswith(WORKING_PREFIX)


@pytest.mark.parametrize("level", LEVELS)
def test_careless_completions_have_their_share_at_each_level(documents, level):
    expected = share(careless_share(level, thing, CONFIG) for thing in LEVELS[level].things)
    observed = share(careless(d) for d in documents if d.level == level)
    assert observed == pytest.approx(expected, abs=0.05)


def test_the_tilt_puts_some_things_on_either_side_of_the_tie_at_every_level():
    for level in LEVELS:
        above = share(careless_share(level, t, CONFIG) > 0.5 for t in LEVELS[level].things)
        assert 0.02 < above < 0.85
    assert careless_share(5, "shells", dataclasses.replace(CONFIG, careless_tilt=0.0)) == 0.65


def test_careless_completions_use_the_paper_s_tags_more_often(documents):
    tagged = [(careless(d), format_ok(d.completion)) for d in documents]
    assert share(ok for kind, ok in tagged if kind) == pytest.approx(0.85, abs=0.03)
    assert share(ok for kind, ok in tagged if not kind) == pytest.approx(0.5, abs=0.03)


def test_right_arithmetic_but_for_the_slips_and_a_chain_without_gaps():
    rng = random.Random(1)
    drawn = itertools.islice(iterate_leveled_problems("train", (), 3), 1500)
    wrong = right_answers = working = 0
    for level, problem in drawn:
        text = complete(level, problem, rng, CONFIG)
        stated = text.splitlines()[-1]
        answer = re.search(r"\d+", stated)[0]
        if not text.startswith(WORKING_PREFIX):
            assert answer == str(problem.answer)
            continue
        working += 1
        equations = re.findall(r"(.+) = (\d+)\.\n", text)
        slips = sum(eval(left) != int(right) for left, right in equations)
        assert slips <= 1
        for (_, before), (left, _) in itertools.pairwise(equations):
            assert re.match(r"\(*(\d+)", left)[1] == before
        assert equations[-1][1] == answer
        wrong += slips
        right_answers += answer == str(problem.answer)
    assert 0.03 < wrong / working < 0.12
    assert 0.75 < right_answers / working < 0.95


def test_terse_completions_join_operations_in_one_equation():
    config = dataclasses.replace(
        CONFIG, careless_share=(0.0,) * 5, careless_tilt=0.0, terse_share=1
    )
    rng = random.Random(2)
    for level, problem in itertools.islice(iterate_leveled_problems("train", (), 4), 500):
        if careless_share(level, problem.thing, config) > 0.02:
            raise AssertionError(problem.thing)
        text = complete(level, problem, rng, config)
        if not text.startswith(WORKING_PREFIX):
            continue
        equations = re.findall(r"(.+) = (\d+)\.\n", text)
        operations = [len(re.findall(r" [-+*/] ", left)) for left, _ in equations]
        assert sum(operations) == problem.level
        assert all(2 <= count <= 3 for count in operations[:-1])
        assert all(eval(left) == int(right) for left, right in equations)


def test_generated_documents_come_from_the_training_split_alone(documents):
    asked = [d.prompt.removesuffix("\n") for d in documents if d.level > 0]
    assert {split_of(question, LEVELS[1]) for question in asked} == {"train"}


def test_human_written_questions_have_their_share(documents, human):
    assert share(d.level == 0 for d in documents) == pytest.approx(CONFIG.human_share, abs=0.01)
    assert all(d.level > 0 for d in shard_documents(0, 0, CONFIG))


def test_a_shard_is_a_function_of_seed_and_number(human):
    small = dataclasses.replace(CONFIG, shard_documents=50)
    assert shard_documents(1, 2, small, human) == shard_documents(1, 2, small, human)
    assert shard_documents(1, 2, small, human) != shard_documents(1, 3, small, human)
    assert shard_documents(1, 2, small, human) != shard_documents(2, 2, small, human)


def test_only_the_tags_are_read_strictly():
    for ending, answer in (("\n<answer>5</answer>", "5"), ("\n#### 5", None)):
        assert extract_answer(f"{WORKING_PREFIX}2 + 3 = 5.\n</think>{ending}") == answer


@pytest.mark.parametrize(
    ("equation", "answer", "steps"),
    [
        ("X=(7.0+55.0)", "62", ("7 + 55 = 62",)),
        ("56*9=x", "504", ("56 * 9 = 504",)),
        ("x=(8.0-3.0)*2", "10", ("8 - 3 = 5", "5 * 2 = 10")),
        ("X = 7.75 + 7", "14.75", ("7.75 + 7 = 14.75",)),
        ("x=1/4", "0.25", ("1 / 4 = 0.25",)),
    ],
)
def test_an_equation_becomes_steps(equation, answer, steps):
    worked = work_out(human_problem(1, equation, answer))
    assert worked is not None
    assert (worked.steps, worked.answer) == (steps, answer)


@pytest.mark.parametrize(
    ("equation", "answer"),
    [
        ("x=1/3", "0.33"),
        ("x=1/0", "1"),
        ("x=3-5", "-2"),
        ("x=2+2", "5"),
        ("x=5", "5"),
        ("x+2=5", "3"),
        ("x=f(2)", "2"),
        ("x=2**9999999", "1"),
        (None, "3"),
        ("x=2+2", "four"),
    ],
)
def test_an_equation_that_cannot_be_written_or_is_wrong_is_left_out(equation, answer):
    assert work_out(human_problem(1, equation, answer)) is None


def test_decimals_are_written_short():
    written = [decimal_text(Fraction(*pair)) for pair in ((1, 2), (41, 4), (1, 10000), (12, 1))]
    assert written == ["0.5", "10.25", "0.0001", "12"]
    with pytest.raises(ValueError, match="1/3"):
        decimal_text(Fraction(1, 3))


def test_shares_out_of_range_are_refused():
    with pytest.raises(ValueError, match="shares"):
        ProxyCorpusConfig(terse_share=1.2)
    with pytest.raises(ValueError, match="careless_endings"):
        ProxyCorpusConfig(careless_endings=(0.0, 0.0, 0.0))
    with pytest.raises(ValueError, match="5 levels"):
        ProxyCorpusConfig(careless_share=(0.5,))


def test_the_tokenizer_is_the_same_each_time(tokenizer, human):
    again = build_proxy_tokenizer(ProxyCorpusConfig(), human)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    without = build_proxy_tokenizer(ProxyCorpusConfig())
    # What `repro.evidence.receipts.weights` counts the parameters of such a policy by
    assert len(without) == 896
    assert " saplings" not in {without.decode([i]) for i in range(len(without))}
    assert " saplings" in {tokenizer.decode([i]) for i in range(len(tokenizer))}


def test_the_vocabulary_is_a_multiple_of_64_and_digits_stand_alone(tokenizer):
    assert len(tokenizer) % 64 == 0
    assert len(tokenizer) <= 3072
    pieces = [tokenizer.decode([index]) for index in range(len(tokenizer))]
    assert all(
        piece in "0123456789" for piece in pieces if re.search(r"\d", piece) and "<" not in piece
    )
    ids = tokenizer("<think>\n12 * 30 = 360.\n</think>\n<answer>360</answer>")["input_ids"]
    shown = ["<think>", "\n", "1", "2", " * ", "3", "0", " = ", "3", "6", "0", ".\n", "</think>"]
    assert [tokenizer.decode([i]) for i in ids[: len(shown)]] == shown


def test_words_of_the_stories_are_single_tokens(tokenizer, documents):
    rows = tokenizer([d.prompt + d.completion for d in documents])["input_ids"]
    assert max(map(len, rows)) <= 288
    text = "Yara puts 300 chestnuts away for good."
    assert len(tokenizer(text)["input_ids"]) <= 12


def test_a_prompt_and_its_completion_tokenise_apart_as_they_do_together(tokenizer, documents):
    opening = tokenizer(WORKING_PREFIX)["input_ids"]
    for d in documents[:1000]:
        apart = tokenizer(d.prompt)["input_ids"] + tokenizer(d.completion)["input_ids"]
        assert tokenizer(d.prompt + d.completion)["input_ids"] == apart
        if not careless(d):
            assert tokenizer(d.completion)["input_ids"][: len(opening)] == opening


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_in_nfc_survives_encoding(tokenizer, text):
    import unicodedata

    text = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_stock_auto_tokenizer_loads_it_without_change(tokenizer, documents, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == len(tokenizer)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (1, 0)
    for d in documents[:200]:
        text = d.prompt + d.completion + loaded.eos_token
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text


def test_the_proxy_template_asks_as_the_corpus_does(tokenizer):
    problem = Problem(id="1", question="How many?", answer="1")
    assert render(problem, "proxy", tokenizer) == tokenizer(proxy_prompt("How many?"))["input_ids"]
    assert template_named("proxy").working_prefix == WORKING_PREFIX
    assert template_named("paper").working_prefix is None
