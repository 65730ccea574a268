"""Public data sets by name, at pinned revisions.

Files are fetched one by one through the hub's cache, so a set that was fetched once loads without
network, and a machine without network gets one sentence within seconds instead of a minute of
retries. Their rows become problems as a user's own do (`repro.data.problem`).

Easy to get wrong: Big-Math's "levels" are quintiles of another model's solve rate, 5 the hardest,
not MATH's levels; its length filter counts characters of the problem, not tokens; AIME 2024's only
split is called `train` and is a test set.

The revisions are the newest that could be found cited with each set's files when this was written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from repro.data.problem import DataError, Problem, problem_from_row, require_answers
from repro.data.row_sources import rows_of_file, stored_or_fetched
from repro.spec.needs import DATA_DOWNLOADS

# "filter len(prompt) <= 1024", in characters: the released code's Big-Math filter.
BIGMATH_MAX_CHARACTERS = 1024
# "BigMath (7B, 14B: levels 3-5, 122,000 samples; 32B: levels 4-5)" (section 4.1); both are folders
# of the data set, as are the single levels.
_BIGMATH_LEVELS = ((1,), (2,), (3,), (4,), (5,), (2, 3, 4, 5), (3, 4, 5), (4, 5))
_BIGMATH_DEFAULT_LEVELS = (3, 4, 5)
_NAMED = {"question": "problem", "answer": "answer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicSet:
    """The location of a public data set, and how to read its rows.

    `revision` is a commit on the hub, where `DATA_DOWNLOADS` has its name; `files` has the path in
    the repository by split. Columns are by role: question, answer, and solution, id and level where
    it has them. `gold` makes an answer a gold.
    """

    revision: str
    files: Mapping[str, str]
    columns: Mapping[str, str]
    gold: Callable[[str], str] = str


def integer_gold(answer: str) -> str:
    """Return a competition's answer, whole numbers without decimals: `27.0` becomes `27`.

    Leading zeros are kept out too: AIME's 025 is 25.
    """
    try:
        value = float(answer)
    except ValueError:
        return answer
    return str(int(value)) if value.is_integer() else answer


PUBLIC_SETS: dict[str, PublicSet] = {
    "gsm8k": PublicSet(
        revision="740312add88f781978c0658806c59bc2815b9866",
        files={
            "train": "main/train-00000-of-00001.parquet",
            "test": "main/test-00000-of-00001.parquet",
        },
        columns={"question": "question", "answer": "answer", "solution": "answer"},
    ),
    "math500": PublicSet(
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        files={"test": "test.jsonl"},
        columns=_NAMED | {"solution": "solution", "id": "unique_id", "level": "level"},
    ),
    "aime24": PublicSet(
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        files={"test": "data/train-00000-of-00001.parquet"},
        columns=_NAMED | {"solution": "solution", "id": "id"},
        gold=integer_gold,
    ),
    "aime25": PublicSet(
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        files={"test": "test.jsonl"},
        columns=_NAMED | {"id": "id"},
        gold=integer_gold,
    ),
    "amc23": PublicSet(
        revision="80815d37005feb82cd7f8fbc6901d5d3eff43057",
        files={"test": "test-00000-of-00001.parquet"},
        columns=_NAMED | {"question": "question", "id": "id"},
        gold=integer_gold,
    ),
    "bigmath": PublicSet(
        revision="c79efbb6d3b75e3a2bcc27a5c569119918132345",
        files={"train": "level_{levels}/train-00000-of-00001.parquet"},
        columns={"question": "prompt", "answer": "solution"},
    ),
}


def file_of(name: str, split: str, levels: Sequence[int]) -> tuple[str, int | None]:
    """Return a split's file in its repository and its one level, or None; `DataError` without."""
    public = PUBLIC_SETS[name]
    if split not in public.files:
        raise DataError(
            f"{name} ({DATA_DOWNLOADS[name].name}) has no {split} split, only "
            f"{', '.join(public.files)}"
        )
    filename = public.files[split]
    if name == "bigmath":
        chosen = tuple(sorted(levels)) or _BIGMATH_DEFAULT_LEVELS
        if chosen not in _BIGMATH_LEVELS:
            raise DataError(
                f"bigmath has no folder for levels {chosen}; it has "
                f"{', '.join(str(known) for known in _BIGMATH_LEVELS)}"
            )
        joined = "_".join(map(str, chosen))
        return filename.format(levels=joined), chosen[0] if len(chosen) == 1 else None
    if levels and "level" not in public.columns:
        raise DataError(f"{name} has no levels; found levels {tuple(levels)}, need none")
    return filename, None


def load_public(name: str, split: str, levels: Sequence[int]) -> list[Problem]:
    """Return a public set's own split, `train` or `test`, in its own order.

    Levels are Big-Math's quintiles, of which its folders hold certain combinations, or MATH-500's;
    empty keeps all (Big-Math: 3 to 5). Raises `DataError` if the set has no such split or levels,
    or is not on this machine and cannot be fetched.
    """
    from huggingface_hub import hf_hub_download

    public, repository = PUBLIC_SETS[name], DATA_DOWNLOADS[name].name
    filename, level = file_of(name, split, levels)
    what = f"{name}: {filename} of {repository}"
    path = stored_or_fetched(
        what, hf_hub_download, repository, filename=filename, revision=public.revision
    )
    problems = []
    for index, (row, where) in enumerate(rows_of_file(path)):
        problem = problem_from_row(row, where=where, columns=public.columns)
        require_answers([problem])
        own = dataclasses.replace(
            problem,
            id=f"{name}/{split}/{problem.id if 'id' in public.columns else index}",
            answer=public.gold(problem.answer),
            source=repository,
            level=problem.level if "level" in public.columns else level,
        )
        problems.append(own)
    if name == "bigmath":
        return [problem for problem in problems if len(problem.question) <= BIGMATH_MAX_CHARACTERS]
    if levels:
        return [problem for problem in problems if problem.level in levels]
    return problems
