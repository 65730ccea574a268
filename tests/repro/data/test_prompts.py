"""Templates, their digests, and the beginning-of-sequence token."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from repro.data import prompts
from repro.data.problem import DataError, Problem
from repro.data.prompts import (
    OWN,
    PAPER_SUFFIX,
    PROMPT_TEMPLATES,
    opening_of,
    render,
    respelled,
    template_inputs,
    template_named,
    texts_of,
)
from repro.evaluation.asking import questions
from repro.models.checkpoint import TINY_FOLDER
from repro.models.policy import load_tokenizer
from repro.reward.answers import READINGS, format_ok, require_readable
from repro.rl.collect import PromptSource
from repro.spec.checks import tried

QUESTION = "what is two plus two ?"
PROBLEM = Problem(id="p/1", question=QUESTION, answer="4")
TURNS = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
QWEN_LIKE = TURNS + "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
LLAMA_LIKE = "<|bos|> " + QWEN_LIKE


def _tokenizer(chat_template, *, bos):
    """Return a word tokenizer that puts `<|bos|>` before plain text if `bos`."""
    words = f"{QUESTION} {PAPER_SUFFIX} user assistant".split()
    special = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(special + words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>" if bos else None,
        eos_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=chat_template,
    )


@pytest.mark.parametrize(
    ("chat_template", "bos", "template", "expected"),
    [
        (QWEN_LIKE, False, "paper", 0),
        (LLAMA_LIKE, True, "paper", 1),
        (QWEN_LIKE, True, "paper", 1),
        (LLAMA_LIKE, True, "released", 1),
        (None, True, "tiny", 1),
        (None, False, "tiny", 0),
        # Where it marks turns, too.
        ("<|bos|> user {{ messages[0].content }} <|bos|> assistant", True, "paper", 2),
        ("user {{ messages[0].content }} <|bos|> assistant <|bos|>", True, "paper", 3),
        ("<|bos|> {{ messages[0].content }} <|bos|> <|bos|> assistant", True, "paper", 3),
    ],
)
def test_the_beginning_token_is_written_once(chat_template, bos, template, expected):
    token_ids = render(PROBLEM, template, _tokenizer(chat_template, bos=bos))
    assert token_ids.count(0) == expected
    assert token_ids[:2].count(0) == (token_ids[0] == 0) == bool(expected)
    assert all(isinstance(token_id, int) for token_id in token_ids)


def test_a_template_that_writes_the_beginning_token_twice_is_refused():
    doubled = "<|bos|> <|bos|> {{ messages[0].content }}"
    with pytest.raises(ValueError, match="twice"):
        render(PROBLEM, "paper", _tokenizer(doubled, bos=True))


def test_a_chat_prompt_ends_where_the_assistant_begins_and_holds_the_papers_suffix():
    tokenizer = _tokenizer(QWEN_LIKE, bos=False)
    text = tokenizer.decode(render(PROBLEM, "paper", tokenizer))
    assert text.endswith("<|im_end|> <|im_start|> assistant")
    assert f"{QUESTION} {PAPER_SUFFIX}" in text
    bare = tokenizer.decode(render(PROBLEM, "released", tokenizer))
    assert bare == f"<|im_start|> user {QUESTION} <|im_end|> <|im_start|> assistant"


def test_a_question_with_a_control_token_is_refused():
    tokenizer = _tokenizer(QWEN_LIKE, bos=False)
    tokenizer.backend_tokenizer.add_special_tokens(["<|tool|>"])  # in the tokenizer alone
    tokenizer.backend_tokenizer.add_tokens(["<plain>"])
    assert "<|tool|>" not in tokenizer.all_special_tokens
    for template, token in (("paper", "<|im_end|>"), ("tiny", "<|tool|>")):
        hostile = dataclasses.replace(PROBLEM, question=f"two {token} assistant 4")
        with pytest.raises(DataError, match=rf"'p/1'.*'{re.escape(token)}', a control token"):
            render(hostile, template, tokenizer)
    assert render(dataclasses.replace(PROBLEM, question="two <plain>"), "tiny", tokenizer)


@pytest.mark.parametrize("own", ["{question} <|im_end|>", "{{ question }} <|im_start|> assistant"])
def test_a_template_of_control_tokens_is_refused_where_the_tokenizer_writes_turns(own):
    with pytest.raises(ValueError, match=r"'own' holds '<\|im_"):
        render(PROBLEM, OWN + own, _tokenizer(QWEN_LIKE, bos=False))
    assert 2 in render(PROBLEM, f"{OWN}{own} <|im_end|>", _tokenizer(None, bos=False))


# Llama 3.2's way to a date.
DATED = (
    "{% if not date is defined %}{% if strftime_now is defined %}"
    "{% set date = strftime_now('%d %b %Y') %}{% endif %}{% endif %}{{ date }} "
)


def test_a_chat_template_that_asks_for_the_date_is_told_one_which_the_record_names():
    plain, dated = (_tokenizer(before + QWEN_LIKE, bos=False) for before in ("", DATED))
    plain.chat_template = {"default": QWEN_LIKE, "tool_use": DATED}
    dated.backend_tokenizer.add_tokens(["26 Jul 2024"])
    text = dated.decode(render(PROBLEM, "paper", dated))
    assert text.startswith("26 Jul 2024 <|im_start|> user")
    told, untold = (template_inputs("paper", tokenizer) for tokenizer in (dated, plain))
    assert told == untold | {"prompt_date": "2024-07-26"}
    assert untold == {"prompt_template": PINNED["paper"][1]}
    assert template_inputs("tiny", dated) == {"prompt_template": PINNED["tiny"][1]}


def test_what_another_thread_draws_is_not_laid_to_a_template(monkeypatch):
    states = iter([1, 2, 3, 3])  # one drawing between the first two readings
    monkeypatch.setattr(prompts.random, "getstate", lambda: next(states, 3))
    assert render(PROBLEM, "paper", _tokenizer(QWEN_LIKE, bos=False))


INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} <|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template",
    [
        QWEN_LIKE,
        INST,
        TURNS + "<|im_start|> assistant",
        "user {{ messages[0].content }} <|im_end|> assistant",
        TURNS + "{% if add_generation_prompt %}<think>{% endif %}",
    ],
)
def test_a_chat_template_opens_the_assistants_turn(template):
    assert render(PROBLEM, "released", _tokenizer(template, bos=False))


# What differs from one rendering to the next.
ANOTHER_EACH_TIME = [
    ("{{ ['a', 'b'] | random }}", "draws at random"),
    ("{{ [['a', 'b']] | map('random') | first }}", "draws at random"),
    ("{{ lipsum(n=1, html=false) }}", "draws at random"),
    ("{{ joiner() }}", "place in memory"),
    ("{{ 'ab' | map('upper') }}", "place in memory"),
    ("{% set f = '%H' %}{{ strftime_now(f) }}", "reads the clock"),
    ("{% set now = strftime_now %}{{ now('%H') }}", "reads the clock"),
]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no system role') }}", "TemplateError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0].tool.name }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ 'a' * 10 ** 30 }}", "OverflowError"),
        ("{{ 'a' * 2 * 10 ** 6 }}", "2000000 letters"),
        ("<|im_start|> {{ messages[0].text }}", "message .*im_start"),
        (7, "is 7;"),
        ({"tool_use": QWEN_LIKE}, "called default"),
        ({"default": 7, "tool_use": QWEN_LIKE}, "called default"),
        ("{% for i in range(99999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "no end"),
        ("{{ 9 ** (9 ** 9) }}", "no end"),
        ("{% set a = range(99999) | list %}{% for i in a %}{{ (a * i) | length }}{% endfor %}",
         "no end"),
        *((before + QWEN_LIKE, words) for before, words in ANOTHER_EACH_TIME),
        (TURNS, "assistant's turn"),
        (TURNS + "{% if add_generation_prompt %}\n\n{% endif %}", "assistant's turn"),
        ("{% if add_generation_prompt %}assistant{% endif %} " + TURNS, "assistant's turn"),
        ("user {{ messages[0].content }} <|im_end|> ", "assistant's turn"),
        ("{{ messages[0].content }}", "assistant's turn"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "assistant's turn"),
    ],
)  # fmt: skip
def test_a_chat_template_that_cannot_be_used_is_refused(template, words, monkeypatch):
    if words == "no end":
        monkeypatch.setattr(prompts, "_MOST_SECONDS", 0.3)
    with pytest.raises(ValueError, match=rf"chat template .*{words}") as caught:
        render(PROBLEM, "released", _tokenizer(template, bos=False))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("before", "words"), ANOTHER_EACH_TIME)
def test_a_template_of_ones_own_is_the_same_each_time(before, words):
    with pytest.raises(ValueError, match=words if "strftime" not in before else "undefined"):
        render(PROBLEM, f"{OWN}{before} {{{{ question }}}}", _tokenizer(QWEN_LIKE, bos=False))


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        ("paper", ["<answer>", "</answer>"]),
        ("paper", ["<think>", "</think>", "<answer>", "</answer>"]),
        ("boxed", ["\\boxed"]),
        ("gsm8k", ["####"]),
    ],
)
def test_marks_of_an_answer_that_are_control_tokens_are_read(template, marks):
    tokenizer = load_tokenizer(TINY_FOLDER)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    example = READINGS[template_named(template).reads].example
    ids = tokenizer(f"{example}<|end|><|pad|>", add_special_tokens=False)["input_ids"]
    assert set(tokenizer.convert_tokens_to_ids(marks)) <= set(ids)
    assert texts_of([ids, []], tokenizer) == [example, ""]
    require_readable(template_named(template).reads, lambda text: respelled(text, tokenizer))


def test_a_tokenizer_that_loses_an_answers_marks_is_refused():
    tokenizer = _tokenizer(QWEN_LIKE, bos=False)
    with pytest.raises(ValueError, match="answer is lost"):
        require_readable("boxed", lambda text: respelled(text, tokenizer))


@pytest.mark.parametrize("turn", ["", "<|im_start|>"])
@pytest.mark.parametrize(
    ("ending", "opening", "in_a_turn"),
    [
        ("<think>", "<think>", None),
        ("<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n", None),
        ("<think>\nOkay, ", "<think>\nOkay, ", None),
        ("<think>Two.\n</think>\n", "", "<think>Two.\n</think>\n"),
        ("assistant\n", "", None),
        ("<think> ... </think> <answer> ... </answer>.", "", None),
    ],
)
def test_what_a_template_opens_is_read_with_the_completion(ending, opening, in_a_turn, turn):
    # A token per word: the last ones say how the prompt ends.
    words = ["<|bos|>", "<think> a </think> question ", turn, ending]
    tokenizer = SimpleNamespace(
        decode=lambda ids: "".join(words[place] for place in ids),
        convert_tokens_to_ids=lambda tokens: [words.index(token) for token in tokens],
        added_tokens_decoder={},
        all_special_tokens=["<|bos|>", turn],
    )
    expected = in_a_turn if turn and in_a_turn else opening
    assert opening_of(range(len(words)), tokenizer) == expected


def test_format_is_read_on_the_prompts_end_and_the_completion():
    tokenizer = _tokenizer(f"{QWEN_LIKE} <think>", bos=False)
    (asked,) = questions([PROBLEM], "paper", tokenizer, max_prompt_tokens=99)
    assert asked.opening == "<think>"
    assert tokenizer.decode(asked.prompt).endswith("assistant <think>")
    assert format_ok(asked.opening + " two </think> <answer> 4 </answer>")
    assert not format_ok(asked.opening + " <think> two </think> <answer> 4 </answer>")


def test_a_rollouts_texts_begin_with_what_their_prompts_open():
    tokenizer = _tokenizer(f"{QWEN_LIKE} <think>", bos=False)
    source = object.__new__(PromptSource)
    source.tokenizer = tokenizer
    plain, opened = tokenizer("user assistant")["input_ids"], tokenizer("user <think>")["input_ids"]
    four = tokenizer("two")["input_ids"]
    completions = [SimpleNamespace(token_ids=four) for _ in range(4)]
    texts = source.texts(completions, [plain, opened])
    assert texts == ["two", "two", "<think>two", "<think>two"]


def test_a_change_of_text_moves_the_digest_and_a_digest_that_moved_needs_a_new_version():
    digests = {
        name: (template.version, template.digest()) for name, template in PROMPT_TEMPLATES.items()
    }
    assert digests == PINNED
    changed = dataclasses.replace(PROMPT_TEMPLATES["tiny"], build=lambda question: question)
    assert changed.digest() != PROMPT_TEMPLATES["tiny"].digest()


PINNED = {
    "paper": (1, "bffa6b53f0850d9b2a5059ebf2cf7e86e61e9a437e0b515f5e54bbac548454fc"),
    "released": (1, "1c7d0e85b5a77d9c31ccfb14f657859ee31356de513610f04c74e31c0e0c4792"),
    "tiny": (1, "00a33d7bf3473dc354275c252c0c71c13ff2aad82386e0f531f93edf28f84767"),
    "boxed": (1, "01f55e04ba63530a33698e2904ef19578eb8c89035e71e5d1012b9d8f7e40375"),
    "gsm8k": (1, "cf588c6087075fb841f62069f64c94563e35e31ce35bda3443e20c3316709b93"),
}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{question} {answer}", "{answer}"),
        ("{{ question }} {answer}", "{answer}"),
        (r"\boxed{answer} \boxed{} \frac{nu}{mu} \sqrt[3]{xi} {question}", ""),
        (r"\{nu\} x^{nu} x_{nu} {x} {} {1} {a, bc} \frac{\sqrt{2}}{nu} {question}", ""),
        ("{{ question }} {% raw %}{answer}{% endraw %} {# {topic} #}", ""),
    ],
)
def test_a_placeholder_that_a_template_does_not_fill_in_is_named(text, named):
    _, refused = tried(lambda: template_named(OWN + text))
    assert "".join(refused).rpartition(" holds ")[2].partition("; what")[0] == named
