"""Public data sets by name, at pinned revisions.

Files are fetched one by one through the hub's cache, then read by `datasets`, so a set that was
fetched once loads without network, and a machine without network gets one sentence within seconds
instead of a minute of retries.

Easy to get wrong: GSM8K's gold is what follows `####`, *without* its thousands commas (the released
code keeps them, so that "70000" earns nothing against "70,000"); Big-Math's "levels" are quintiles
of another model's solve rate, 5 the hardest, not MATH's levels; its length filter counts characters
of the problem, not tokens; AIME 2024's only split is called `train` and is a test set.

The revisions are the newest that could be found cited with each set's files when this was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro.data.problem import DataError, Problem, read_level
from repro.data.row_sources import rows_by_datasets, stored_or_fetched
from repro.spec.hub import HubError

# "filter len(prompt) <= 1024", in characters: the released code's Big-Math filter.
BIGMATH_MAX_CHARACTERS = 1024
# "BigMath (7B, 14B: levels 3-5, 122,000 samples; 32B: levels 4-5)" (section 4.1); both are folders
# of the data set, as are the single levels.
_BIGMATH_LEVELS = ((1,), (2,), (3,), (4,), (5,), (2, 3, 4, 5), (3, 4, 5), (4, 5))
_BIGMATH_DEFAULT_LEVELS = (3, 4, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicSet:
    """The location of a public data set, and how to read its rows.

    Attributes
    ----------
    repository, revision
        Name and commit on the hub.
    files
        Split (`train`, `test`) to the file's path in the repository.
    gold
        Answer field to gold answer.
    """

    repository: str
    revision: str
    files: Mapping[str, str]
    question: str = "problem"
    answer: str = "answer"
    gold: Callable[[Any], str] = str
    solution: str | None = None
    row_id: str | None = None
    level: str | None = None


def gsm8k_gold(answer: str) -> str:
    """Return the text after the last `####`, thousands commas removed: `70,000` becomes `70000`."""
    _, mark, gold = answer.rpartition("####")
    if not mark:
        raise DataError(f"GSM8K answer {answer[-60:]!r} has no `####`; the gold follows it")
    return gold.strip().replace(",", "")


def integer_gold(answer: Any) -> str:
    """Return a competition's answer as text, whole numbers without decimals: `27.0` becomes `27`.

    Leading zeros are kept out too: AIME's 025 is 25.
    """
    text = str(answer).strip()
    try:
        value = float(text)
    except ValueError:
        return text
    return str(int(value)) if value.is_integer() else text


PUBLIC_SETS: dict[str, PublicSet] = {
    "gsm8k": PublicSet(
        repository="openai/gsm8k",
        revision="740312add88f781978c0658806c59bc2815b9866",
        files={
            "train": "main/train-00000-of-00001.parquet",
            "test": "main/test-00000-of-00001.parquet",
        },
        question="question",
        gold=gsm8k_gold,
        solution="answer",
    ),
    "math500": PublicSet(
        repository="HuggingFaceH4/MATH-500",
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        files={"test": "test.jsonl"},
        solution="solution",
        row_id="unique_id",
        level="level",
    ),
    "aime24": PublicSet(
        repository="HuggingFaceH4/aime_2024",
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        files={"test": "data/train-00000-of-00001.parquet"},
        gold=integer_gold,
        solution="solution",
        row_id="id",
    ),
    "aime25": PublicSet(
        repository="math-ai/aime25",
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        files={"test": "test.jsonl"},
        gold=integer_gold,
        row_id="id",
    ),
    "amc23": PublicSet(
        repository="math-ai/amc23",
        revision="80815d37005feb82cd7f8fbc6901d5d3eff43057",
        files={"test": "test-00000-of-00001.parquet"},
        question="question",
        gold=integer_gold,
        row_id="id",
    ),
    "bigmath": PublicSet(
        repository="open-r1/Big-Math-RL-Verified-Processed",
        revision="c79efbb6d3b75e3a2bcc27a5c569119918132345",
        files={"train": "level_{levels}/train-00000-of-00001.parquet"},
        question="prompt",
        answer="solution",
    ),
}


def file_of(name: str, split: str, levels: Sequence[int]) -> tuple[str, int | None]:
    """Return a split's file in its repository and its one level, or None; `DataError` without."""
    public = PUBLIC_SETS[name]
    if split not in public.files:
        raise DataError(
            f"{name} ({public.repository}) has no {split} split, only {', '.join(public.files)}"
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
    if levels and public.level is None:
        raise DataError(f"{name} has no levels; found levels {tuple(levels)}, need none")
    return filename, None


def load_public(name: str, split: str, levels: Sequence[int]) -> list[Problem]:
    """Return a public set's own split, `train` or `test`, in its own order.

    Raises `DataError` if the set has no such split or levels, or is not on this machine and cannot
    be fetched.

    Parameters
    ----------
    levels
        Big-Math's quintiles, of which its folders hold certain combinations; MATH-500's levels;
        empty keeps all (Big-Math: 3 to 5).
    """
    public = PUBLIC_SETS[name]
    filename, level = file_of(name, split, levels)
    rows = rows_by_datasets(_fetched(name, public, filename))
    problems = [_problem(name, public, split, i, row, level) for i, row in enumerate(rows)]
    if name == "bigmath":
        return [problem for problem in problems if len(problem.question) <= BIGMATH_MAX_CHARACTERS]
    if levels:
        return [problem for problem in problems if problem.level in levels]
    return problems


def _problem(
    name: str, public: PublicSet, split: str, index: int, row: Mapping[str, Any], level: int | None
) -> Problem:
    """Return the problem of one row."""
    own_id = index if public.row_id is None else row[public.row_id]
    solution = None if public.solution is None else row[public.solution]
    if public.level is not None:
        level = read_level(row[public.level], where=f"{name}, {split} row {index}")
    return Problem(
        id=f"{name}/{split}/{own_id}",
        question=str(row[public.question]),
        answer=public.gold(row[public.answer]),
        solution=None if solution is None else str(solution),
        source=public.repository,
        level=level,
        where=f"{name}, {split} row {index}",
    )


def _fetched(name: str, public: PublicSet, filename: str) -> str:
    """Return the local path of a set's file, from the hub's cache or over the network."""
    from huggingface_hub import hf_hub_download

    wanted = {"filename": filename, "revision": public.revision}
    try:
        return str(stored_or_fetched(hf_hub_download, public.repository, **wanted))
    except HubError as error:
        raise DataError(
            f"{name}: {filename} of {public.repository} is not in the local hub cache, and {error};"
            " or give a file or folder of your own as the data source `folder:PATH`"
        ) from error
