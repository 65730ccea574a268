"""Problems of a user's own, from a file, a folder or a set on the hub, with splits that never mix.

Development problems are held out of the training split by a hash of the question's text, so that
they are the same on every machine, do not move when lines are reordered or added, and two copies of
one question are on the same side. A source without a test split has a tenth of its questions held
out as one in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from repro.data.problem import (
    ROLES,
    DataError,
    Problem,
    Split,
    hashes_of,
    problems_of_rows,
    same_text,
)
from repro.data.row_sources import tables_of_hub, tables_of_path
from repro.spec.checks import require, unknown
from repro.spec.hub import is_hub_name

_MOST_DEVELOPMENT = 5  # at most one training question in this many is held out
_TEST_OF_ALL = 10  # one question in this many, where a source has no test split


def read_splits(
    named: str | Path, columns: Mapping[str, str] | None = None
) -> dict[str, list[Problem]]:
    """Return a user's problems by split, in their order: `train` and `test`, or `all` undivided.

    `named` is a file (.jsonl, .json, .csv, .tsv, .parquet), a folder of such files (`train`,
    `test`) or one that `datasets` saved, or a set on the hub, `owner/name:CONFIG@REVISION`, where
    configuration and revision may be left out. `columns` are the names that question, answer, id,
    ... have in the rows; others are found by their usual names (`repro.data.problem`).

    Raises `DataError`, naming file and line, if something is missing or broken, or if a test
    question is also trained on.
    """
    path = Path(named).expanduser()
    if path.exists() or not is_hub_name(str(named)):
        tables = tables_of_path(path)
    else:
        tables = tables_of_hub(str(named))
    splits = {split: problems_of_rows(rows, str(named), columns) for split, rows in tables.items()}
    trained = {same_text(own.question): own for own in splits.get("train", [])}
    for problem in splits.get("test", []):
        twin = trained.get(same_text(problem.question))
        if twin is not None:
            raise DataError(
                f"{problem.where}: the question of {problem.id!r} is also that of {twin.id!r} "
                f"({twin.where}); a test question must not be trained on, so remove one of them"
            )
    return splits


def load_own(
    named: str, split: Split, development_problems: int, columns: str, *, alone: bool
) -> list[Problem]:
    """Return one split of a user's problems, in their order; `DataError` if it has none.

    `columns` is text that `parse_columns` takes. With `alone` nothing is trained on, so that a
    source without a test split is tested whole.
    """
    splits = read_splits(named, parse_columns(columns))
    train, test = splits.get("train", []), splits.get("test", [])
    undivided = splits.get("all") or (train if not test else [])
    if split == "test" and alone:
        return test or undivided
    if undivided:
        train, test = _divided(undivided, named)
    if split == "test":
        return test
    if not train:
        raise DataError(
            f"{named}: no train problems; put them into train.jsonl beside the test file"
        )
    return cut_development(train, split, development_problems, named)


def _divided(problems: Sequence[Problem], name: str) -> tuple[list[Problem], list[Problem]]:
    """Return the problems to train on, and those held out as the test split."""
    questions = len(set(hashes_of("test", problems)))
    if questions < 2:
        raise DataError(f"{name}: there is one question; to train and to test needs 2 or more")
    return _parted(problems, "test", max(1, questions // _TEST_OF_ALL))


def _parted(
    problems: Sequence[Problem], purpose: str, count: int
) -> tuple[list[Problem], list[Problem]]:
    """Return the problems without, and only, those of the `count` questions of smallest hash."""
    hashes = hashes_of(purpose, problems)
    held_out = set(sorted(set(hashes))[:count])
    both: tuple[list[Problem], list[Problem]] = ([], [])
    for problem, key in zip(problems, hashes, strict=True):
        both[key in held_out].append(problem)
    return both


def parse_columns(text: str) -> dict[str, str]:
    """Return the columns that `question=prompt,answer=solution` names, by role.

    Raises `ValueError` if the text has another form or a role is unknown.
    """
    columns: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        role, mark, name = (item.strip() for item in part.partition("="))
        require(bool(mark and name), f"--columns {part}: needs ROLE=NAME, such as question=prompt")
        require(role in ROLES, f"--columns {part}: {unknown('role', list(ROLES), role)}")
        require(role not in columns, f"--columns {text}: {role} is named twice")
        columns[role] = name
    return columns


def cut_development(
    train: Sequence[Problem], split: Split, development_problems: int, name: str
) -> list[Problem]:
    """Return the training problems without, or only, those held out for development.

    The questions with the smallest hashes are held out, at most a fifth of all questions. Asking
    for the development split where nothing is held out raises.
    """
    questions = len(set(hashes_of("development", train)))
    count = min(development_problems, questions // _MOST_DEVELOPMENT)
    if split == "development" and not count:
        raise DataError(
            f"{name}: no development split, since development_problems is {development_problems} "
            f"and there are {questions} training questions; it needs 1 or more and at least "
            f"{_MOST_DEVELOPMENT} training questions"
        )
    return _parted(train, "development", count)[split == "development"]
