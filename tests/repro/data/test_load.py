"""Sources and splits: folders, public sets, and what is said when data are missing."""

import dataclasses
from pathlib import Path

import pytest

from repro.data import public
from repro.data.load import load_problems
from repro.data.problem import DataError, Problem, same_text
from repro.data.public import load_public
from repro.spec.config import DataConfig
from tests.repro.data.test_own_data import table
from tests.repro.problem_files import write_problems

SHARED = Path(__file__).parents[3].parent / "shared" / "data"
ROWS = {"gsm8k/train": 7473, "gsm8k/test": 1319, "svamp/test": 1000}
ROWS |= {"mawps/train": 2101, "mawps/test": 238}


def _problems(name, count, level=None):
    return [
        Problem(id=f"{name}/{i}", question=f"{name} {i}?", answer=str(i), level=level)
        for i in range(count)
    ]


@pytest.fixture
def folder(tmp_path):
    write_problems(tmp_path / "train.jsonl", _problems("train", 50, level=1))
    write_problems(tmp_path / "test.jsonl", _problems("test", 20, level=2))
    return tmp_path


def _config(folder, **values):
    """Return a configuration that reads a folder."""
    return DataConfig(source=f"folder:{folder}", **values)


def test_the_splits_of_a_folder_are_disjoint_complete_and_go_by_no_order(folder):
    config = _config(folder, development_problems=8)
    train, development, test = (
        load_problems(config, split) for split in ("train", "development", "test")
    )
    assert (len(train), len(development), len(test)) == (42, 8, 20)
    assert len({problem.id for problem in train + development + test}) == 70
    assert all(problem.id.startswith("train/") for problem in development)
    write_problems(folder / "train.jsonl", _problems("train", 50, level=1)[::-1])
    again = load_problems(config, "development")
    assert {problem.id for problem in again} == {problem.id for problem in development}


def test_at_most_a_fifth_is_held_out_and_nothing_unless_asked_for(folder):
    for asked, trained in ((1000, 40), (0, 50)):
        config = _config(folder, development_problems=asked)
        assert len(load_problems(config, "train")) == trained
    with pytest.raises(DataError, match="development_problems is 0"):
        load_problems(config, "development")


def test_counts_take_a_stable_sample_in_file_order_that_the_seed_chooses(folder):
    chosen = load_problems(_config(folder, test_problems=5), "test")
    numbers = [int(problem.answer) for problem in chosen]
    assert len(numbers) == 5
    assert numbers == sorted(numbers)
    assert numbers != list(range(5))
    assert load_problems(_config(folder, test_problems=5), "test") == chosen
    other = load_problems(_config(folder, test_problems=5, seed=1), "test")
    assert other != chosen
    # Asking for more keeps what was there before.
    assert set(chosen) < set(load_problems(_config(folder, test_problems=9), "test"))
    assert len(load_problems(_config(folder, test_problems=900), "test")) == 20


def test_levels_are_kept_and_a_level_that_nobody_has_is_an_error(folder):
    assert len(load_problems(_config(folder, levels=(1, 3)), "train")) == 50
    with pytest.raises(DataError, match="levels found: 2"):
        load_problems(_config(folder, levels=(1,)), "test")


def test_a_test_file_alone_is_only_a_test_set(tmp_path):
    write_problems(tmp_path / "test.jsonl", _problems("all", 50))
    assert len(load_problems(_config(tmp_path), "test")) == 50
    with pytest.raises(DataError, match=r"train\.jsonl"):
        load_problems(_config(tmp_path), "train")


@pytest.mark.parametrize(
    ("trained", "asked"),
    [
        ("How many?", " HOW  many? "),
        ("How many cafés?", "How many cafe\u0301s?"),
        ("How many cafés?", "How many ca\u200bfe\u0301s?\ufeff"),
        ("Tom's “long” walk – 5 km", 'Tom’s "long" walk - 5\u00a0km'),
        ("Tom's ``long'' walk", "Tom‘s «long»\u2003walk"),
        ("Six − two = ?", "six - two ＝ ？"),
        ("Ｔｗｏ ﬁelds", "two fields"),
        ("Is x² + ½ over y₁?", "Is x^2 +  1/2 over y_1?"),
        ("H₂O…", "H2O..."),
    ],
)
def test_twins_but_for_case_and_unicodes_form_are_one_question(tmp_path, trained, asked):
    problems = _problems("train", 40)
    first = dataclasses.replace(problems[0], question=trained)
    twin = dataclasses.replace(problems[1], question=asked)
    write_problems(tmp_path / "train.jsonl", [first, *problems[2:]])
    write_problems(tmp_path / "test.jsonl", [twin])
    for split in ("train", "test"):
        with pytest.raises(DataError, match=r"'train/1' .*'train/0'"):
            load_problems(_config(tmp_path), split)
    (tmp_path / "test.jsonl").unlink()
    write_problems(tmp_path / "train.jsonl", [first, twin, *problems[2:]])
    for count in range(1, 9):
        config = _config(tmp_path, development_problems=count)
        sides = (load_problems(config, split) for split in ("train", "development"))
        assert sum(not {first, twin}.isdisjoint(side) for side in sides) < 2


@pytest.mark.parametrize(
    ("one", "other"),
    [("2² + 1", "22 + 1"), ("1½", "11/2"), ("101₂", "1012"), ("5 - 3", "53"), ("x'", "x''")],
)
def test_questions_of_other_numbers_are_not_twins(one, other):
    assert same_text(one) != same_text(other)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("folder:{}/nowhere", "no such file"),
        ("folder:{}/empty", "{}/empty"),
        ("folder:{}/misnamed", r"a\.jsonl; .*train\.jsonl"),
        ("gsm9k", r"'gsm9k' \(.*gsm8k"),
    ],
)
def test_what_is_not_there_is_named(folder, source, named):
    for name in ("empty", "misnamed"):
        (folder / name).mkdir()
    write_problems(folder / "misnamed" / "a.jsonl", _problems("a", 5))
    with pytest.raises(ValueError, match=named.format(folder)):
        load_problems(DataConfig(source=source.format(folder)), "train")


def test_generated_problems_come_by_their_split_s_count_and_need_one():
    config = DataConfig(train_problems=40, development_problems=20, test_problems=10)
    splits = ("train", "development", "test")
    assert [len(load_problems(config, split)) for split in splits] == [40, 20, 10]
    with pytest.raises(ValueError, match="no end"):
        load_problems(DataConfig(), "train")


# Public sets, without network: rows as the pinned files have them, in files of our own.


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """Return a dictionary of file name to rows that replaces the network."""
    rows = {}
    monkeypatch.setattr(
        public,
        "stored_or_fetched",
        lambda *_, filename, revision: table(tmp_path / filename, rows[filename]),
    )
    return rows


def test_gsm8k_rows_become_problems_with_plain_golds(fetched):
    fetched["main/test-00000-of-00001.parquet"] = [
        {"question": "How much?", "answer": "so <<7*10000=70000>>70000\n#### 70,000"},
        {"question": "And now?", "answer": "#### -5"},
    ]
    first, second = load_problems(DataConfig(source="gsm8k"), "test")
    assert (first.id, first.answer, second.answer) == ("gsm8k/test/0", "70000", "-5")
    assert first.solution.endswith("#### 70,000")
    assert first.source == "openai/gsm8k"
    with pytest.raises(DataError, match="no levels"):
        load_public("gsm8k", "test", (1,))


def test_competition_sets_read_their_own_field_names(fetched):
    fetched["test.jsonl"] = [
        {"problem": "p", "solution": "s", "answer": "\\frac{1}{2}", "subject": "Algebra"}
        | {"level": "Level 2", "unique_id": "test/algebra/1.json"}
    ]
    [problem] = load_problems(DataConfig(source="math500"), "test")
    assert problem.id == "math500/test/test/algebra/1.json"
    assert (problem.answer, problem.solution, problem.level) == ("\\frac{1}{2}", "s", 2)
    fetched["data/train-00000-of-00001.parquet"] = [
        {"id": 60, "problem": "p", "solution": "s", "answer": "025", "url": "u", "year": "2024"}
    ]
    [problem] = load_problems(DataConfig(source="aime24"), "test")
    assert (problem.id, problem.answer) == ("aime24/test/60", "25")
    fetched["test.jsonl"] = [{"problem": "p", "answer": "70", "id": "0"}]
    [problem] = load_problems(DataConfig(source="aime25"), "test")
    assert (problem.answer, problem.solution) == ("70", None)
    fetched["test-00000-of-00001.parquet"] = [
        {"id": 0, "answer": "27.0", "question": "q", "url": "u"}
    ]
    [problem] = load_problems(DataConfig(source="amc23"), "test")
    assert (problem.question, problem.answer) == ("q", "27")


def test_bigmath_takes_the_papers_levels_and_drops_long_problems(fetched):
    rows = [{"prompt": "x" * n, "solution": "1", "domain": ["Algebra"]} for n in (1024, 1025)]
    fetched["level_3_4_5/train-00000-of-00001.parquet"] = rows
    fetched["level_4_5/train-00000-of-00001.parquet"] = rows[:1]
    fetched["level_5/train-00000-of-00001.parquet"] = rows[:1]
    [problem] = load_problems(DataConfig(source="bigmath"), "train")
    assert len(problem.question) == 1024
    assert problem.level is None
    assert len(load_problems(DataConfig(source="bigmath", levels=(4, 5)), "train")) == 1
    [problem] = load_problems(DataConfig(source="bigmath", levels=(5,)), "train")
    assert problem.level == 5
    with pytest.raises(DataError, match=r"levels \(1, 5\)"):
        load_problems(DataConfig(source="bigmath", levels=(1, 5)), "train")
    with pytest.raises(DataError, match="no test split"):
        load_problems(DataConfig(source="bigmath"), "test")


@pytest.mark.skipif(not SHARED.is_dir(), reason="no folder of real problems beside the repository")
@pytest.mark.parametrize("name", ROWS)
def test_real_problem_files_load_whole_and_their_golds_parse(name, pool):
    folder, split = name.split("/")
    problems = load_problems(DataConfig(source=f"folder:{SHARED / folder}"), split)
    assert len(problems) == ROWS[name]
    sample = problems[:: max(1, len(problems) // 150)]
    grades = pool.grade_answers([(problem.answer, problem.answer) for problem in sample])
    assert {grade.status for grade in grades} == {"ok"}
