"""One's own problems: every kind of file, folder and row gives the same problems, or a sentence."""

import json
import os
from unittest.mock import Mock

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from repro.data.load import load_problems, source_named
from repro.data.own import parse_columns, read_splits
from repro.data.problem import DataError, Problem, digest_of_problems, require_answers
from repro.data.prompts import render
from repro.evaluation.flags import data_of
from repro.spec.config import DataConfig
from tests.repro.qwen_checkpoint import write_tokenizer

ROWS = [
    {"prompt": f"What is {n} + {n}?", "solution": str(2 * n), "topic": "sums"} for n in range(30)
]
NAMED = "question=prompt,answer=solution"


def table(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    made = datasets.Dataset.from_list(rows)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        made.to_parquet(path)
    elif path.suffix in (".csv", ".tsv"):
        made.to_csv(path, sep=" \t,"[1 + (path.suffix == ".csv")], index=False)
    else:
        made.save_to_disk(path)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "saved"])
@pytest.mark.parametrize("columns", ["", NAMED])
def test_every_kind_of_file_gives_the_same_problems(name, columns, tmp_path):
    path = table(tmp_path / name, ROWS)
    (problems,) = read_splits(path, parse_columns(columns)).values()
    assert [(p.question, p.answer) for p in problems] == [
        (r["prompt"], r["solution"]) for r in ROWS
    ]
    assert len({problem.id for problem in problems}) == len(ROWS)
    assert problems[3].row["topic"] == "sums"
    assert problems[3].where.startswith(str(path))


def test_a_source_without_a_test_split_is_divided_for_training_and_asked_whole_alone(tmp_path):
    path = table(tmp_path / "mine.csv", ROWS)
    config = DataConfig(source=source_named(str(path)), columns=NAMED)
    train, test = (load_problems(config, split) for split in ("train", "test"))
    assert (len(train), len(test)) == (27, 3)
    assert not {p.question for p in train} & {p.question for p in test}
    table(path, ROWS[::-1])
    assert {p.question for p in load_problems(config, "test")} == {p.question for p in test}
    assert len(load_problems(config, "test", alone=True)) == 30
    assert load_problems(data_of(str(path), 4, NAMED), "test", alone=True)[0].answer.isdigit()


@pytest.mark.parametrize("kind", ["csv", "parquet", "parts", "saved"])
def test_a_folder_has_its_splits_in_the_names_of_its_files(kind, tmp_path):
    folder = tmp_path / "mine"
    if kind == "saved":
        halves = {"train": ROWS[:20], "validation": ROWS[20:]}
        made = {name: datasets.Dataset.from_list(rows) for name, rows in halves.items()}
        datasets.DatasetDict(made).save_to_disk(folder)
    elif kind == "parts":
        for number in range(2):
            rows = ROWS[10 * number : 10 * number + 10]
            table(folder / "data" / f"train-0000{number}-of-00002.parquet", rows)
        table(folder / "data" / "test-00000-of-00001.parquet", ROWS[20:])
    else:
        table(folder / f"train.{kind}", ROWS[:20])
        table(folder / f"test.{kind}", ROWS[20:])
    config = DataConfig(source=source_named(str(folder)))
    assert config.source == f"folder:{folder}"
    assert [p.answer for p in load_problems(config, "train")] == [str(2 * n) for n in range(20)]
    assert len(load_problems(config, "test")) == 10


def test_a_split_of_a_kind_that_is_not_read_is_named_and_not_left_out(tmp_path):
    table(tmp_path / "train.csv", ROWS)
    (tmp_path / "test.py").touch()
    assert read_splits(tmp_path).keys() == {"train"}
    (tmp_path / "test.csv.gz").touch()
    with pytest.raises(DataError, match=r"test\.csv\.gz: needed is one of \.jsonl"):
        read_splits(tmp_path)


CHAT = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": [{"type": "text", "text": "3 + 4?"}]},
]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*CHAT, {"role": "assistant", "content": "7"}]},
        {"prompt": CHAT, "answer": 7},
        {"prompt": CHAT, "solution": "3 + 4 = 7 #### 7"},
    ],
)
def test_a_chat_is_a_question_with_the_messages_before_it(row, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(row))
    (problem,) = read_splits(path)["all"]
    assert (problem.question, problem.answer) == ("3 + 4?", "7")
    assert problem.before == (("system", "You are terse."),)
    bare = Problem(id=problem.id, question=problem.question, answer=problem.answer)
    assert digest_of_problems([problem]) != digest_of_problems([bare])


def test_a_system_prompt_of_a_row_is_rendered_and_refused_where_there_is_no_chat(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    before = (("system", "You are terse."), ("user", "1 + 1?"), ("assistant", "2"))
    problem = Problem(id="a", question="3 + 4?", answer="7", before=before)
    text = tokenizer.decode(render(problem, "boxed", tokenizer))
    assert text.index("You are terse.") < text.index("1 + 1?") < text.index("3 + 4?")
    assert "Alibaba" not in text
    with pytest.raises(DataError, match="before its question"):
        render(problem, "tiny", tokenizer)


@pytest.mark.parametrize(("answer", "gold"), [(7, "7"), (7.0, "7"), (0.25, "0.25")])
def test_numbers_of_a_typed_column_become_texts(answer, gold, tmp_path):
    path = table(tmp_path / "a.parquet", [{"question": "q", "answer": answer}])
    assert read_splits(path)["all"][0].answer == gold


def test_cells_of_csv_stay_as_they_are_written(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('question,answer\n"a, or\nb?",0.50\nc?,"70,000"\nd?,007\n')
    problems = read_splits(path)["all"]
    assert [problem.answer for problem in problems] == ["0.50", "70,000", "007"]
    assert problems[0].question == "a, or\nb?"
    assert problems[1].where == f"{path}, line 4"


def broken(name, content):
    def write(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return write


def holding(*columns):
    def write(folder):
        held = pa.Table.from_arrays(columns, names=["question"] * len(columns))
        pq.write_table(held, folder / "a.parquet")
        return folder / "a.parquet"

    return write


@pytest.mark.parametrize(
    ("write", "columns", "said"),
    [
        (broken("a.csv", b"question,answer\nq\n"), "", "line 2: .*1 .* 2"),
        (broken("a.csv", b"question,answer\nq,1,2\n"), "", "line 2: found 3 cells"),
        (broken("a.csv", b"question,answer\nq,\n"), "", "line 2: `answer` is None"),
        (broken("a.csv", b"question,answer\n\xe9,1\n"), "", "in UTF-8"),
        (broken("a.csv", b'question,answer\n"q,1\n'), "", "line 2: "),
        (broken("a.csv", b"question,answer\nq,1\n"), "answer=gold", "line 2: `gold` is missing"),
        (broken("a.csv", b"question,answer,answer\nq,1,2\n"), "", "line 1: .*'answer' .*twice"),
        (broken("a.jsonl", b'{"question": "q", "question": "r", "answer": 1}'), "", "twice"),
        (broken("a.csv", b"x,y\nq,1\n"), "", "`question` is missing .columns found: 'x', 'y'"),
        (broken("a.csv", b"question,answer\n"), "", "no problems found"),
        (broken("a.json", b'[{"question": "q"}]'), "", "row 0: `answer` is missing"),
        (broken("a.json", b'[{"question": "q"'), "", "array of objects"),
        (broken("a.jsonl", b'{"messages": [], "answer": "1"}'), "", "the roles none"),
        (broken("a.jsonl", b'{"messages": ["q"], "answer": "1"}'), "", "a message needs a `role`"),
        (broken("a.parquet", b"PAR1"), "", "Parquet"),
        (holding(pa.array([2**62], pa.duration("s"))), "", "Parquet"),
        (holding(pa.array([b"\xff"]).view(pa.string())), "", "Parquet"),
        (holding(pa.array(["q"]), pa.array(["r"])), "", "column 'question' is there twice"),
        (broken("a.xlsx", b"PK"), "", ".xlsx"),
        (broken("a.jsonl.gz", b"\x1f\x8b"), "", "end in .gz"),
        (lambda folder: folder / "nothing.csv", "", "no such file"),
    ],
)
def test_what_is_broken_is_one_sentence_with_file_and_line(write, columns, said, tmp_path):
    path = write(tmp_path)
    with pytest.raises(DataError, match=said) as caught:
        require_answers(read_splits(path, parse_columns(columns))["all"])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "names",
    [
        ["train.csv", "train.jsonl"],
        ["train-00000-of-00002.jsonl"],
        ["train-00000-of-00002.jsonl", "train-00001-of-00003.jsonl"],
    ],
)
def test_files_that_are_no_one_split_are_refused(names, tmp_path):
    for name in names:
        table(tmp_path / name, ROWS)
    with pytest.raises(DataError, match=", ".join(names)):
        read_splits(tmp_path)


def test_a_pipe_among_files_of_problems_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match="plain file"):
        read_splits(tmp_path)


def test_files_of_one_name_in_two_folders_of_a_set_are_told_apart(tmp_path, monkeypatch):
    files = [{"split": "train", "path": ["*/train.jsonl", "more.jsonl"]}]
    listed = [{"config_name": "default", "data_files": files}]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(listed)}\n---\n")
    monkeypatch.setattr("repro.data.row_sources.stored_or_fetched", Mock(return_value=tmp_path))
    for name, row in (("algebra/train", 0), ("geometry/train", 1), ("more", 2)):
        table(tmp_path / f"{name}.jsonl", ROWS[row : row + 1])
    (problems,) = read_splits("owner/both", parse_columns(NAMED)).values()
    assert {problem.id for problem in problems} == {
        "algebra/train.jsonl, line 1", "geometry/train.jsonl, line 1", "more.jsonl, line 1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (parse_columns, "prompt", "ROLE=NAME"),
        (parse_columns, "qestion=prompt", "mean question"),
        (parse_columns, "answer=a,answer=b", "answer .*twice"),
        (source_named, "data/none.jsonl", "no such file"),
        (source_named, "./nowhere", "no such file"),
        (source_named, "gsm9k", "mean gsm8k"),
        (source_named, "", "names no problems"),
    ],
)
def test_columns_of_no_role_and_names_of_no_data_are_refused(read, text, said):
    with pytest.raises(ValueError, match=said):
        read(text)
    assert source_named("owner/name:main") == "hub:owner/name:main"
