"""Problems from a local folder of JSONL files, with splits that never mix.

A folder holds `train.jsonl`, `test.jsonl` or both.

Development problems are held out of the training split by a hash of the question's text, so that
they are the same on every machine, do not move when lines are reordered or added, and two copies of
one question are on the same side. Easy to get wrong: drawing the development problems from the test
split (then the number that is reported was tuned on), or cutting by line number (then a set sorted
by difficulty gives two different distributions).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from repro.data.problem import DataError, Problem, hash_of, read_problems, same_text

Split = Literal["train", "development", "test"]

_MOST_DEVELOPMENT = 5  # at most one training question in this many is held out


def load_folder(path: str | Path, split: Split, development_problems: int) -> list[Problem]:
    """Return one split of a local folder, in file order.

    Raises `DataError` if the folder or the split is missing, a line is broken, or a question stands
    in both files.

    Parameters
    ----------
    development_problems
        How many training problems are held out for development; 0 holds out none.
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

    The questions with the smallest hashes are held out, at most a fifth of all questions. Asking
    for the development split where nothing is held out raises.
    """
    places: dict[str, str] = {}
    for problem in train:
        # Of twins but for Unicode's form, the first one's.
        places.setdefault(same_text(problem.question), hash_of("development", problem.question))
    questions = set(places.values())
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
        if (places[same_text(problem.question)] in development) == wants_development
    ]


def _read_folder(path: Path) -> tuple[list[Problem], list[Problem]]:
    """Return the training and test problems of a folder; either may be empty."""
    if not path.is_dir():
        raise DataError(
            f"{path}: no such folder; a folder with train.jsonl and test.jsonl is needed"
        )
    files = {name: path / f"{name}.jsonl" for name in ("train", "test")}
    if not any(file.is_file() for file in files.values()):
        found = ", ".join(sorted(file.name for file in path.glob("*.jsonl"))) or "no .jsonl file"
        raise DataError(f"{path}: found {found}; train.jsonl and test.jsonl are needed")
    train, test = (read_problems(file) if file.is_file() else [] for file in files.values())
    trained = {same_text(problem.question): problem for problem in train}
    for problem in test:
        twin = trained.get(same_text(problem.question))
        if twin is not None:
            raise DataError(
                f"{files['test']}: the question of {problem.id!r} is also that of {twin.id!r} in "
                "train.jsonl; a test question must not be trained on, so remove one of them"
            )
    return train, test


def _present(problems: list[Problem], split: str, path: str | Path) -> list[Problem]:
    """Return the problems, or raise if the split has none."""
    if not problems:
        raise DataError(
            f"{path}: no {split} problems; put them into "
            f"{'test' if split == 'test' else 'train'}.jsonl beside the other file"
        )
    return problems
