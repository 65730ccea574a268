"""Problems from a local folder of JSONL files, with splits that never mix.

A folder holds `train.jsonl` and `test.jsonl`, or a single `.jsonl` file. A lone file named
`test.jsonl` is a test set and nothing else; any other lone file is divided, one problem in five
going to the test split.

Whatever is divided here is divided by a hash of the question's text, so that the split is the same
on every machine, does not move when lines are reordered or added, and puts two copies of one
question on the same side. Easy to get wrong: drawing the development problems from the test split
(then the number that is reported was tuned on), or cutting by line number (then a set sorted by
difficulty gives two different distributions).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from repro.data.problem import DataError, Problem, hash_of, read_problems

Split = Literal["train", "development", "test"]

_TEST_SHARE = 5  # one question in this many, where a lone file is divided
_MOST_DEVELOPMENT = 5  # at most one training question in this many is held out


def load_folder(path: str | Path, split: Split, development_problems: int) -> list[Problem]:
    """Return one split of a local folder, in file order.

    Parameters
    ----------
    path
        The folder, or one JSONL file.
    split
        Which split.
    development_problems
        How many training problems are held out for development; 0 holds out none.

    Raises
    ------
    DataError
        If the folder or the split is missing, a line is broken, or a question stands in both files.
    """
    train, test = _read_folder(Path(path).expanduser())
    if split == "test":
        return _present(test, split, path)
    train = _present(train, split, path)
    return cut_development(train, split, development_problems, str(path))


def cut_development(
    train: Sequence[Problem], split: Split, development_problems: int, name: str
) -> list[Problem]:
    """Return the training problems without, or only, those held out for development.

    The questions with the smallest hashes are held out, at most a fifth of all questions.

    Raises
    ------
    DataError
        If the development split is asked for and nothing is held out.
    """
    questions = {hash_of("development", problem.question) for problem in train}
    development_count = min(development_problems, len(questions) // _MOST_DEVELOPMENT)
    development = set(sorted(questions)[:development_count])
    if split == "development" and not development:
        raise DataError(
            f"{name}: no development split, since development_problems is {development_problems} "
            f"and there are {len(questions)} training questions; it needs 1 or more and at least "
            f"{_MOST_DEVELOPMENT} training questions"
        )
    wants_development = split == "development"
    return [
        problem
        for problem in train
        if (hash_of("development", problem.question) in development) == wants_development
    ]


def _read_folder(path: Path) -> tuple[list[Problem], list[Problem]]:
    """Return the training and test problems of a folder; either may be empty."""
    if path.is_file():
        return _divide(path)
    if not path.is_dir():
        raise DataError(
            f"{path}: no such folder; a folder with train.jsonl and test.jsonl is needed"
        )
    files = sorted(path.glob("*.jsonl"))
    names = [file.name for file in files]
    if "train.jsonl" in names and "test.jsonl" in names:
        train = read_problems(path / "train.jsonl")
        test = read_problems(path / "test.jsonl")
        trained = {hash_of("question", problem.question): problem for problem in train}
        for problem in test:
            twin = trained.get(hash_of("question", problem.question))
            if twin is not None:
                raise DataError(
                    f"{path / 'test.jsonl'}: the question of {problem.id!r} is also that of "
                    f"{twin.id!r} in train.jsonl; a test question must not be trained on, so "
                    "remove one of them"
                )
        return train, test
    if len(files) != 1:
        raise DataError(
            f"{path}: found {', '.join(names) or 'no .jsonl file'}; train.jsonl and test.jsonl, "
            "or a single .jsonl file, are needed"
        )
    return _divide(files[0])


def _divide(file: Path) -> tuple[list[Problem], list[Problem]]:
    """Return the training and test problems of a lone file."""
    problems = read_problems(file)
    if file.name == "test.jsonl":
        return [], problems
    train: list[Problem] = []
    test: list[Problem] = []
    for problem in problems:
        in_test = int(hash_of("test", problem.question)[:8], 16) % _TEST_SHARE == 0
        (test if in_test else train).append(problem)
    return train, test


def _present(problems: list[Problem], split: str, path: str | Path) -> list[Problem]:
    """Return the problems, or raise if the split has none."""
    if not problems:
        raise DataError(
            f"{path}: no {split} problems; put them into "
            f"{'test' if split == 'test' else 'train'}.jsonl beside the other file"
        )
    return problems
