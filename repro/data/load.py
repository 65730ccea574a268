"""From a `DataConfig` to the problems of one split.

Three kinds of source share one rule: the test split is never tuned on, and which problems are in
which split depends on their text alone, not on the machine, the order of lines or the run's seed.

* `generated`: the package's own generator; its splits are disjoint by construction;
* a public set by name: its own train and test splits, development held out of train;
* `folder:PATH`, `file:PATH`, `hub:OWNER/NAME`: a user's own (`repro.data.own`).

Nothing is held out of train unless `development_problems` asks for it, since the paper trains on
all of it.
"""

from __future__ import annotations

from pathlib import Path

from repro.data.own import cut_development, load_own, parse_columns
from repro.data.problem import DataError, Problem, Split, hash_of
from repro.data.public import PUBLIC_SETS, file_of, load_public
from repro.data.row_sources import FILE_SUFFIXES
from repro.spec.checks import require, unknown
from repro.spec.config import DataConfig
from repro.spec.hub import is_hub_name

_OWN_PREFIXES = ("folder:", "file:", "hub:")
_GENERATED = "generated"
_MOST_GENERATED = 1_000_000
# The values that `DataConfig.source` takes, for messages.
_SOURCES = (_GENERATED, *PUBLIC_SETS, "folder:PATH", "file:PATH", "hub:OWNER/NAME")


def without_kind(named: str) -> str:
    """Return what a user named without `file:`, `folder:` or `hub:` before it."""
    return next((named.removeprefix(p) for p in _OWN_PREFIXES if named.startswith(p)), named)


def source_named(named: str) -> str:
    """Return `DataConfig.source` for what a user named; `ValueError` where it is nothing known.

    Known are public sets, `generated`, files and folders that exist, and sets on the hub.
    """
    bare = without_kind(named)
    require(bool(bare.strip()), f"--data {named!r} names no problems")
    path = Path(bare).expanduser()
    if path.exists():
        return f"{'folder' if path.is_dir() else 'file'}:{path.resolve()}"
    a_file = path.suffix.lower() in FILE_SUFFIXES
    if is_hub_name(bare) and not a_file:
        return f"hub:{bare}"
    known = [name for name in _SOURCES if ":" not in name]
    if bare in known:
        return bare
    looks_local = a_file or "/" in bare or bare.startswith(".")
    there_is = "there is no such file or folder, and a set on the hub is owner/name"
    raise ValueError(
        f"--data {named}: {there_is if looks_local else unknown('data source', known, bare)}"
    )


def require_declared(config: DataConfig, split: Split) -> None:
    """Raise `ValueError` where a source cannot have a split, whatever its files hold."""
    known = is_generated(config.source) or config.source in PUBLIC_SETS
    require(known or is_own(config.source), unknown("data source", _SOURCES, config.source))
    require(
        not known or not parse_columns(config.columns),
        f"data.columns is {config.columns!r}; those of {config.source} are known, leave it out",
    )
    if split == "development" and config.development_problems < 1:
        raise DataError(
            f"{config.source}: no development split, since development_problems is "
            f"{config.development_problems}; it needs 1 or more"
        )
    if config.source in PUBLIC_SETS:
        file_of(config.source, "test" if split == "test" else "train", config.levels)
    if is_generated(config.source):
        count = getattr(config, f"{split}_problems")
        # One shows whether levels exist.
        _generated(config, split, count if count > _MOST_GENERATED else min(1, count))


def is_generated(source: str) -> bool:
    """Say whether a source is the package's own generator."""
    return source == _GENERATED


def is_own(source: str) -> bool:
    """Say whether a source is a user's own file, folder or set on the hub."""
    return source.startswith(_OWN_PREFIXES)


def load_problems(config: DataConfig, split: Split, *, alone: bool = False) -> list[Problem]:
    """Return the problems of one split; `alone` asks a source without a test split whole.

    Raises `DataError` if the data are missing or broken, and `ValueError` if the source is unknown
    or a count that is needed is missing.
    """
    count = getattr(config, f"{split}_problems")  # 0 is all
    if is_generated(config.source):
        return _generated(config, split, count)
    if is_own(config.source):
        named, held_out = config.source.partition(":")[2], config.development_problems
        problems = load_own(named, split, held_out, config.columns, alone=alone)
        problems = _of_levels(problems, config)
    else:
        require(config.source in PUBLIC_SETS, unknown("data source", _SOURCES, config.source))
        own_split = "test" if split == "test" else "train"
        problems = load_public(config.source, own_split, config.levels)
        if split != "test":
            problems = cut_development(problems, split, config.development_problems, config.source)
    return _first(problems, count, config.seed)


def _generated(config: DataConfig, split: Split, count: int) -> list[Problem]:
    require(
        count <= _MOST_GENERATED,
        f"{split}_problems is {count}; of generated problems it must be {_MOST_GENERATED} or less",
    )
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
