"""Problems are opened before a plan starts: what is refused, named and counted."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Regex, normalizers

from repro.__main__ import main
from repro.data.load import source_named
from repro.data.problem import DataError, Problem
from repro.models.checkpoint import TINY_FOLDER
from repro.models.policy import load_tokenizer
from repro.reward.custom import reward_named
from repro.run.data_check import data_lines, require_prompts
from repro.run.select import Changes, select
from tests.changed_settings import with_value
from tests.repro.problem_files import write_problems
from tests.said import unsaid


def _problems(name, golds):
    return [
        Problem(id=f"{name}/{i}", question=f"{name} {i}?", answer=gold)
        for i, gold in enumerate(golds)
    ]


def _folder(path, train, test):
    path.mkdir()
    write_problems(path / "train.jsonl", _problems("train", train))
    write_problems(path / "test.jsonl", _problems("test", test))
    return path


def _plan(data):
    settings = {"data": {"source": source_named(str(data))}}
    [selection] = select(["table1"], tier="smoke", changes=Changes(settings=settings))
    return selection.plan(1)


def test_many_such_golds_are_counted_and_all_of_them_are_an_error(tmp_path):
    lines = data_lines(_plan(_folder(tmp_path / "many", ["}{"] * 9 + ["1"], ["4"])), named=True)
    assert len(lines) == 6
    assert "9 of 10 train golds" in lines[-1]
    with pytest.raises(DataError, match=r"2 test problems .*test\.jsonl, line 1"):
        data_lines(_plan(_folder(tmp_path / "all", ["1"], ["}{", "..."])), named=True)


@pytest.mark.parametrize(
    "gold",
    ["The answer is 4.", "Answer: 4", "4 (four)", "about 4 apples", "The answer is Evelyn.",
     "\\text{She has } 4", "4, because 2+2=4", "18 thousand", "so it is 4",
     "\\frac{1}{"],
)  # fmt: skip
def test_a_gold_that_is_never_paid_or_by_its_own_words_alone_is_named(tmp_path, gold):
    folder = _folder(tmp_path / "set", ["1", gold, "3"], ["4"])
    [line] = data_lines(_plan(folder), named=True)
    assert f"{folder / 'train.jsonl'}, line 2: gold {gold!r}" in line


@pytest.mark.parametrize(
    "gold",
    ["4 apples", "12 ounces", "\\boxed{4}", "70,000", "Evelyn", "\\text{(B)}", "2516_8", "4%",
     "x = 3 \\text{ or } x = 5", "3 \\text{ and } 5", "2\\sin 3x", "sin(2x)",
     "\\begin{pmatrix} 1 & 2 \\end{pmatrix}"],
)  # fmt: skip
def test_a_gold_whose_words_may_be_left_out_is_not(tmp_path, gold):
    assert data_lines(_plan(_folder(tmp_path / "set", ["1", gold], ["4"])), named=True) == []


def test_a_test_split_that_is_held_out_is_named(tmp_path):
    write_problems(tmp_path / "mine.jsonl", _problems("mine", list("12345678901")))
    [line] = data_lines(_plan(tmp_path / "mine.jsonl"), named=True)
    assert "1 of 11 problems" in line


def test_a_reward_is_tried_on_the_columns_of_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("own_columns.py").write_text(
        "def reward(completions, topic):\n    return [len(name) for name in topic]\n"
    )
    rows = [f"What is {n} + {n}?,{2 * n},sums\n" for n in range(4)]
    (tmp_path / "with.csv").write_text("question,answer,topic\n" + "".join(rows))
    (tmp_path / "without.csv").write_text("question,answer,kind\n" + "".join(rows))
    function = reward_named("own_columns:reward")
    for data, said in (("with.csv", ""), ("without.csv", "topic"), ("generated", "topic")):
        run = _plan(data)[-1]
        run = replace(run, arm=replace(run.arm, reward="task", reward_function=function))
        if said:
            with pytest.raises(ValueError, match=f"asks for {said}"):
                data_lines([run], named=data != "generated")
        else:
            assert len(data_lines([run], named=True)) == 1


@pytest.mark.parametrize("until", [0.0, 50.0])
def test_answers_are_needed_by_a_reward_that_asks_and_a_run_that_ends_by_them(
    until, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    asking = {"prompts": False, "answers=None": False, "answers": True, "answer": True}
    module = f"unanswered_{until:.0f}"
    functions = [
        f"def of_{n}(completions, {own}): return [0.5] * 2" for n, own in enumerate(asking)
    ]
    Path(f"{module}.py").write_text("\n".join(functions))
    Path("tales.csv").write_text("\n".join(["prompt", *(f"Tell tale {n}." for n in range(40))]))
    for n, asks in enumerate(asking.values()):
        run = with_value(_plan("tales.csv")[1], "scale.evaluation.until", until)
        run = with_value(run, "arm.reward_function", reward_named(f"{module}:of_{n}"))
        if asks or until:
            with pytest.raises(DataError, match="`answer` is missing"):
                data_lines([run], named=True)
        else:
            assert "40 of 40 problems" in data_lines([run], named=True)[-1]


def test_a_tokenizer_that_loses_the_digits_of_a_prompt_is_refused(monkeypatch):
    losing = load_tokenizer(TINY_FOLDER)
    losing.backend_tokenizer.normalizer = normalizers.Replace(Regex("[0-9]"), "0")
    require_prompts(TINY_FOLDER, "tiny")
    monkeypatch.setattr("repro.models.policy.load_tokenizer", lambda folder: losing)
    with pytest.raises(ValueError, match=r"'2 \+ 2\?' is not in '0 \+ 0"):
        require_prompts(TINY_FOLDER / "other", "tiny")


def test_the_package_s_own_problems_are_not_opened():
    [selection] = select(["table1"], tier="smoke")
    assert data_lines(selection.plan(1), named=False) == []


def _require_refused(folder, words, capsys, *flags):
    """Require that plan and run refuse a folder of problems in one line with these words."""
    runs = folder.parent / "runs"
    line = ["table1", "--tier", "smoke", "--set", f"data.source=folder:{folder}", *flags]
    for command in ("plan", "run"):
        assert main([command, *line, "--runs", str(runs)]) == 2
        said = capsys.readouterr().err
        assert unsaid(said, words) == []
        assert len(said.splitlines()) == 1
    assert not runs.exists()


def test_plan_refuses_what_run_would(tmp_path, capsys):
    folder = _folder(tmp_path / "set", ["1"] * 16, ["4"])
    with (folder / "test.jsonl").open("a") as stream:
        stream.write('{"id": "x"}\n')
    _require_refused(folder, "test.jsonl, line 2: `question`", capsys)


@pytest.mark.parametrize(
    ("train", "test", "words"), [(40, 1, "training problems"), (1, 40, "test problems")]
)
def test_a_question_too_long_is_refused_before_the_start(train, test, words, tmp_path, capsys):
    (tmp_path / "set").mkdir()
    for split, times in (("train", train), ("test", test)):
        *others, last = _problems(split, ["3"] * 16)
        last = replace(last, question=f"{split}: " + "Tom has 3 apples " * times)
        write_problems(tmp_path / "set" / f"{split}.jsonl", [*others, last])
    flags = ["--seeds", "1", "--set", "max_prompt_tokens=150"]
    _require_refused(
        tmp_path / "set", f"{words}|jsonl, line 16|max_prompt_tokens|150", capsys, *flags
    )
