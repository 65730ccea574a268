"""Templates for answers in a box or after `####`, and those of a user's own."""

import pytest

from repro.data.problem import Problem
from repro.data.prompts import OWN, render, template_named, template_source
from repro.models.checkpoint import TINY_FOLDER
from repro.models.policy import load_tokenizer
from repro.reward.answers import READINGS
from repro.reward.score import score
from repro.run.select import Changes, select
from tests.repro.small_runs import request_of

TEXT = "Q: {question}\nThink, then write \\boxed{}."
HASHED = "{question} Write #### and the answer."


def asked(name, question="2 + 2?"):
    return template_named(name).build(question)


@pytest.mark.parametrize(
    ("reads", "text", "answer", "is_format"),
    [
        ("boxed", "So \\boxed{12} it is.", "12", True),
        ("boxed", "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", True),
        ("boxed", "\\boxed{3}, no: \\boxed{4}", "4", False),
        ("boxed", "\\boxed{4", None, False),
        ("boxed", "<answer>4</answer>", None, False),
        ("hashes", "2 + 2 = 4\n#### 4", "4", True),
        ("hashes", "#### 3\n#### 4\nDone.", "4", False),
        ("hashes", "#### \n4", None, False),
        ("hashes", "4", None, False),
        ("tags", "\\boxed{4}\n#### 4", None, False),
    ],
)
def test_the_last_box_or_mark_is_the_answer(reads, text, answer, is_format):
    reading = READINGS[reads]
    assert (reading.answer(text), reading.format_ok(text)) == (answer, is_format)


def test_reward_and_accuracy_go_by_the_template_s_reading(pool):
    texts = ["I get \\boxed{4}.", "#### 4", "<think>a</think><answer>4</answer>", "\\boxed{5}"]
    requests = [request_of(text, "4") for text in texts]
    boxed = score(requests, "task", 0.2, pool, reads="boxed")
    hashed = score(requests, "task", 0.2, pool, reads="hashes")
    assert [one.unshaped for one in boxed] == [1.2, 0.0, 0.0, 0.2]
    assert [one.unshaped for one in hashed] == [0.0, 1.2, 0.0, 0.0]
    assert [one.lenient for one in (*boxed, *hashed)] == [1.0, 1.0, 1.0, 0.0] * 2


@pytest.mark.parametrize(
    ("text", "expected", "reads"),
    [
        (TEXT, "Q: 2 + 2?\nThink, then write \\boxed{}.", "boxed"),
        (HASHED, "2 + 2? Write #### and the answer.", "hashes"),
        ("{question}", "2 + 2?", "tags"),
        ("Q: {{ question }} {% if 1 %}\\boxed{}{% endif %}", "Q: 2 + 2? \\boxed{}", "boxed"),
        ("{{question}} Write #### and", "2 + 2? Write #### and", "hashes"),
    ],
)
def test_a_file_is_a_template_by_its_text(text, expected, reads, tmp_path):
    for mark in ("\ufeff", ""):  # a byte order mark is no part of a prompt
        (tmp_path / "own.txt").write_text(f"{mark}{text}\n", encoding="utf-8")
        name = template_source(str(tmp_path / "own.txt"))
        assert name == OWN + text
    assert (asked(name), template_named(name).reads) == (expected, reads)
    other = template_named(name.replace("?", "!").replace("rite", "rote").replace("Q", "R"))
    assert len(template_named(name).digest()) == 64
    assert (other.digest() == template_named(name).digest()) is (text == "{question}")
    # A question's own braces are no part of the template.
    assert "{{ 7 * 7 }} {question}" in asked(name, "{{ 7 * 7 }} {question}")


def test_a_tokenizer_without_a_chat_template_gets_the_text_as_it_is():
    tokenizer = load_tokenizer(TINY_FOLDER)
    problem = Problem(id="p", question="2+2", answer="4")
    ids = render(problem, f"{OWN}{{question}}=", tokenizer)
    assert ids == list(tokenizer("2+2=", add_special_tokens=False)["input_ids"])
    with pytest.raises(ValueError, match="chat template"):
        render(problem, "boxed", tokenizer)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"Solve it.", r"\{question\}"),
        (b"{{ 1 }}", r"\{question\}"),
        (b"{{ question | upper }}", r"\{question\}"),
        (b"{{ question | truncate(5) }}", r"\{question\}, .*'2 \+ 2 ="),
        (b"{{ question | replace(2, 3) }}", r"\{question\}, .*'2 \+ 2 ="),
        (b"{{ questoin }}", "UndefinedError"),
        (b"{{ question", "TemplateSyntaxError"),
        (b"{{ question.__class__ }}", "SecurityError"),
        (b"{question} caf\xe9", "own.txt .*UTF-8"),
        (None, "'boxd'.*paper"),
    ],
)
def test_what_is_no_template_is_a_sentence(text, words, tmp_path):
    own = tmp_path / "own.txt"
    own.write_bytes(text or b"")
    with pytest.raises(ValueError, match=words) as caught:
        asked(template_source("boxd" if text is None else str(own)), "2 + 2 = what number?")
    assert "\n" not in str(caught.value)
    assert asked(f"{OWN}{{{{ question | replace('\n', ' ') }}}}", "a\nb") == "a b"


def test_runs_under_another_template_are_runs_of_their_own(tmp_path):
    (tmp_path / "own.txt").write_text(TEXT, encoding="utf-8")
    changes = Changes(settings={"prompt_template": template_source(str(tmp_path / "own.txt"))})
    (changed,), (plain,) = (
        select(["table1"], tier="smoke", changes=c) for c in (changes, Changes())
    )
    assert "\n" not in changed.target.title
    (run,), (own,) = (chosen.plan(1, ["nvfp4_lora"]) for chosen in (changed, plain))
    assert run.scale.prompt_template == OWN + TEXT
    assert run.resolved()["scale"]["prompt_template"] == OWN + TEXT
    assert run.digest() != own.digest()
