"""From a `DataConfig` to the problems of one split.

Three kinds of source share one rule: the test split is never tuned on, and which problems are in
which split depends on their text alone, not on the machine, the order of lines or the run's seed.

* `generated`: the package's own generator; its splits are disjoint by construction;
* a public set by name: its own train and test splits, development held out of train;
* `folder:<path>`: local JSONL.

Where `train_problems`, `development_problems` or `test_problems` ask for fewer than there are, the
ones with the smallest seeded hash are used, in their original order; where they ask for more, all
are used. Nothing is held out of train unless `development_problems` asks for it, since the paper
trains on all of it.
"""

from __future__ import annotations

from repro.data.folder import Split, cut_development, load_folder
from repro.data.problem import DataError, Problem, hash_of
from repro.data.public import PUBLIC_SETS, file_of, load_public
from repro.spec.checks import require_choice, unknown
from repro.spec.config import DataConfig

_FOLDER_PREFIX = "folder:"
_GENERATED = "generated"


def data_sources() -> tuple[str, ...]:
    """Return the values that `DataConfig.source` takes, for messages."""
    return (_GENERATED, *PUBLIC_SETS, f"{_FOLDER_PREFIX}PATH")


def require_declared(config: DataConfig, split: Split) -> None:
    """Raise `ValueError` where a source cannot have a split, whatever its files hold."""
    known = is_generated(config.source) or config.source in PUBLIC_SETS
    if not known and not config.source.startswith(_FOLDER_PREFIX):
        raise ValueError(unknown("data source", config.source, data_sources()))
    if split == "development" and config.development_problems < 1:
        raise DataError(
            f"{config.source}: no development split, since development_problems is "
            f"{config.development_problems}; it needs 1 or more"
        )
    if config.source in PUBLIC_SETS:
        file_of(config.source, "test" if split == "test" else "train", config.levels)
    if is_generated(config.source):
        _generated(config, split, min(1, _count(config, split)))  # one shows whether levels exist


def is_generated(source: str) -> bool:
    """Say whether a source is the package's own generator."""
    return source == _GENERATED


def load_problems(config: DataConfig, split: Split) -> list[Problem]:
    """Return the problems of one split.

    Raises
    ------
    DataError
        If the data are missing or broken; the message names the place and what is needed.
    ValueError
        If the source or the split is unknown, or a count that is needed is missing.
    """
    require_choice("split", split, Split)
    count = _count(config, split)
    if is_generated(config.source):
        return _generated(config, split, count)
    if config.source.startswith(_FOLDER_PREFIX):
        path = config.source.removeprefix(_FOLDER_PREFIX)
        problems = load_folder(path, split, config.development_problems)
        problems = _of_levels(problems, config)
    elif config.source in PUBLIC_SETS:
        own_split = "test" if split == "test" else "train"
        problems = load_public(config.source, own_split, config.levels)
        if split != "test":
            problems = cut_development(problems, split, config.development_problems, config.source)
    else:
        raise ValueError(unknown("data source", config.source, data_sources()))
    return _first(problems, count, config.seed)


def _count(config: DataConfig, split: Split) -> int:
    """Return the number of problems asked of a split; 0 is all."""
    count = {
        "train": config.train_problems,
        "development": config.development_problems,
        "test": config.test_problems,
    }[split]
    if count < 0:
        raise ValueError(f"{split}_problems is {count}; it must not be negative")
    return count


def _generated(config: DataConfig, split: Split, count: int) -> list[Problem]:
    """Return generated problems, as many as asked for."""
    if count == 0:
        raise ValueError(
            f"{split}_problems is 0, which means all, and generated problems have no end; it must "
            "be 1 or more"
        )
    from repro.data.generator import generate_problems

    return generate_problems(split, count, config.levels, config.seed)


def _of_levels(problems: list[Problem], config: DataConfig) -> list[Problem]:
    """Return the problems of the levels asked for, or all if none is."""
    if not config.levels:
        return problems
    selected = [problem for problem in problems if problem.level in config.levels]
    if not selected:
        present = sorted({problem.level for problem in problems if problem.level is not None})
        raise DataError(
            f"{config.source}: no problem has a level of {config.levels}; levels found: "
            f"{', '.join(map(str, present)) or 'none'}"
        )
    return selected


def _first(problems: list[Problem], count: int, seed: int) -> list[Problem]:
    """Return `count` problems by seeded hash, in their original order; 0 or too many is all."""
    if not 0 < count < len(problems):
        return problems
    keys = [hash_of(f"order {seed}", problem.id) for problem in problems]
    chosen = set(sorted(range(len(problems)), key=keys.__getitem__)[:count])
    return [problem for i, problem in enumerate(problems) if i in chosen]
