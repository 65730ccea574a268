"""Rows of problems from wherever they lie: a file, a folder, a saved data set, a set on the hub.

Read are JSON lines, JSON (an array of objects), CSV and TSV with a header, Parquet, folders that
`datasets` saved, and sets on the hub by name. A folder of files has its splits in their names:
`train.csv`, `test-00000-of-00002.parquet`. This is the only module that imports `datasets`.

Easy to get wrong: CSV by a reader that guesses types turns the answer 0.50 into 0.5 and 007 into 7;
here its cells are texts.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from repro.data.problem import DataError
from repro.spec.checks import shown
from repro.spec.hub import ANSWER_SECONDS, HubError, endpoint, fetch, hub_cache
from repro.spec.settings import json_once

# A decoded row, and the file and line that it was read from.
Row = tuple[Any, str]
Item = TypeVar("Item")
# Splits as makers of data sets name them; the first that is there is taken.
SPLITS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "test": ("test", "validation", "valid", "dev", "eval"),
}
_SAVED = ("dataset_dict.json", "state.json")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_FAULTS = (OSError, ValueError, LookupError, TypeError, ArithmeticError)


def tables_of_path(path: Path) -> dict[str, list[Row]]:
    """Return the rows of a file or folder by split: `train` and `test`, or `all` undivided.

    Raises `DataError`, naming file and line, if there are none or they cannot be decoded.
    """
    if path.is_file():
        return {"all": list(rows_of_file(path))}
    if not path.is_dir():
        raise DataError(f"{path}: there is no such file or folder")
    if any((path / name).is_file() for name in _SAVED):
        import datasets

        return _loaded(partial(datasets.load_from_disk, str(path)), str(path))
    found = _first_of(partial(_files, path))
    if not found:
        files = sorted(item.name for item in path.iterdir() if item.suffix in _READERS)
        raise DataError(
            f"{path}: found {', '.join(files[:5]) or 'no file of problems'}; needed are files "
            "called train and test (train.jsonl, test.jsonl), or the name of one file"
        )
    return {
        split: [row for file in files for row in rows_of_file(file)]
        for split, files in found.items()
    }


def tables_of_hub(name: str) -> dict[str, list[Row]]:
    """Return the rows of a set on the hub by split, as `tables_of_path` does.

    It is named `owner/name`, with `:CONFIG` where it has several configurations, and `@REVISION`
    for another branch, tag or commit than `main`. Its files are fetched into the hub's cache once,
    those of one configuration alone. `datasets` finds the splits of a set whose card does not list
    them. Raises `DataError` if it cannot be fetched or is not read.
    """
    named, _, revision = name.partition("@")
    repository, _, config = named.partition(":")
    from huggingface_hub import snapshot_download

    taken = partial(
        stored_or_fetched,
        f"data set {name}",
        snapshot_download,
        repository,
        revision=revision or "main",
    )
    card = taken(allow_patterns=["README.md"]) / "README.md"
    listed = _listed_files(card, name, config) if card.is_file() else {}
    patterns = [pattern for own in listed.values() for pattern in own]
    patterns = patterns or [f"*{suffix}" for suffix in (*FILE_SUFFIXES, ".jsonl.gz", ".json.gz")]
    folder = taken(allow_patterns=["README.md", *patterns])
    if listed:
        tables = {}
        for split, globs in listed.items():
            files = sorted({path for pattern in globs for path in folder.glob(pattern)})
            tables[split] = [row for file in files for row in rows_of_file(file)]
        return _by_split(tables, name)
    import datasets

    return _loaded(partial(datasets.load_dataset, str(folder), config or None), name)


def stored_or_fetched(
    what: str, download: Callable[..., str], repository: str, **wanted: Any
) -> Path:
    """Return what a download of the hub's client has of a data set, over the network if need be.

    `wanted` are its further arguments. A `DataError` says why `what` cannot be fetched.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    stored = partial(
        download,
        repository,
        repo_type="dataset",
        cache_dir=hub_cache(),
        etag_timeout=ANSWER_SECONDS,
        endpoint=endpoint(),
        **wanted,
    )
    with suppress(LocalEntryNotFoundError):
        return Path(stored(local_files_only=True))
    home = hub_cache() / f"datasets--{repository.replace('/', '--')}"
    try:
        return Path(fetch(partial(stored, local_files_only=False), home))
    except HubError as error:
        raise DataError(
            f"{what} is not in the local hub cache, and {error}; or give a file or folder of your "
            "own: `--data PATH`, in `run` `--set data.source=folder:PATH`"
        ) from error


def _listed_files(card: Path, name: str, config: str) -> dict[str, list[str]]:
    """Return the patterns of a configuration's files by split, as a set's card lists them.

    Empty where it lists none; `datasets` then finds them by their names.
    """
    from datasets.data_files import sanitize_patterns
    from huggingface_hub import DatasetCard

    try:
        configs = DatasetCard.load(card).data.to_dict().get("configs") or []
        listed = {str(item["config_name"]): item.get("data_files") for item in configs}
        of_name = {own: sanitize_patterns(files) for own, files in listed.items() if files}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        said = shown(" ".join(str(error).split()))
        raise DataError(f"data set {name}: its card, {card}, is not read ({said})") from error
    taken = config or (next(iter(listed)) if len(listed) == 1 else "default")
    if listed and taken not in listed:
        raise DataError(
            f"data set {name} has the configurations {', '.join(listed)}; needed is one of them: "
            f"{name.partition(':')[0]}:{next(iter(listed))}"
        )
    return of_name.get(taken, {})


def _loaded(load: Callable[[], Any], name: str) -> dict[str, list[Row]]:
    """Return the rows of the `Dataset`, undivided, or `DatasetDict` that `datasets` loads here."""
    import datasets

    datasets.disable_progress_bars()
    try:
        loaded = load()
        if not isinstance(loaded, Mapping):
            return {"all": _numbered(loaded, name)}
        tables = {own: _numbered(rows, f"{name}, {own}") for own, rows in loaded.items()}
        return _by_split(tables, name)
    except DataError:
        raise
    except (*_FAULTS, datasets.exceptions.DatasetsError) as error:
        said = shown(" ".join(str(error).split()), 300)
        raise DataError(f"{name} is not read as a data set ({said})") from error


def _by_split(tables: Mapping[str, list[Row]], name: str) -> dict[str, list[Row]]:
    """Return tables by split, of those by their makers' names; one of any name is undivided."""
    splits = _first_of(lambda own: tables.get(own, []))
    if not splits and len(tables) == 1:
        splits["all"] = next(iter(tables.values()))
    if not splits:
        raise DataError(f"{name} has the splits {', '.join(tables)}; needed are train and test")
    return splits


def _first_of(named: Callable[[str], list[Item]]) -> dict[str, list[Item]]:
    """Return by split what its makers' first name with any has; splits without any are left out."""
    found = {split: filter(None, map(named, names)) for split, names in SPLITS.items()}
    return {split: first for split, every in found.items() if (first := next(every, []))}


def _numbered(rows: Iterable[Any], name: str) -> list[Row]:
    return [(row, f"{name}, row {number}") for number, row in enumerate(rows)]


def _files(folder: Path, split: str) -> list[Path]:
    """Return a split's file in a folder, or its parts (`train-00000-of-00002`), also in `data`."""
    named = re.compile(rf"{split}(-\d+(-of-(\d+))?)?", re.IGNORECASE)
    for place in (folder, folder / "data"):
        every = sorted(place.iterdir()) if place.is_dir() else []
        items = [path for path in every if path.suffix.lower() in _READERS]
        found = {path: match for path in items if (match := named.fullmatch(path.stem))}
        for path in [] if found else every:
            if named.fullmatch(path.name.partition(".")[0]) and path.suffix.lower() in _PACKED:
                raise DataError(f"{path}: needed is one of {', '.join(_READERS)}")
        whole = sum(match[1] is None for match in found.values())
        counts = {match[3] and int(match[3]) for match in found.values()}
        if (len(found) > 1 and (whole or len(counts) > 1)) or counts - {None, len(found)}:
            names = ", ".join(path.name for path in found)
            raise DataError(
                f"{place}: found {names}; needed is one {split} file, or all of its parts"
            )
        if found:
            return list(found)
    return []


def rows_of_file(path: Path) -> Iterator[Row]:
    """Yield the rows of a file, read as its suffix says; `DataError` names file and line."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path}: files that end in {path.suffix or 'nothing'} are not read; needed is one of "
            f"{', '.join(_READERS)}"
        )
    if path.exists() and not path.is_file():  # who opens a pipe waits for its writer
        raise DataError(f"{path}: it is no plain file; a file of problems is needed")
    try:
        yield from reader(path)
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror or error}; a file of problems is needed"
        ) from error


def _json(path: Path) -> Iterator[Row]:
    """Yield the elements of a JSON array, or the lines of JSON lines."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if content.lstrip()[:1] == b"[" and path.suffix.lower() == ".json":
        yield from _numbered(_decoded(content, str(path), "an array of objects"), str(path))
        return
    for number, raw in enumerate(content.split(b"\n"), start=1):
        if raw.strip():
            where = f"{path}, line {number}"
            yield _decoded(raw, where, "one JSON object a line"), where


def _decoded(raw: bytes, where: str, needed: str) -> Any:
    try:
        value: Any = json_once(raw)
        json.dumps(value, ensure_ascii=False).encode()  # half of a pair of surrogates is no text
    except (RecursionError, ValueError) as error:
        raise DataError(
            f"{where}: {shown(raw.strip())} is not read ({shown(str(error))}); needed is {needed}, "
            "in UTF-8"
        ) from error
    return value


def _separated(delimiter: str, path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file with a header, every cell a text and an empty one None."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: {error}; needed is a text in UTF-8") from error
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = reader.fieldnames or ()
        _require_once(header, f"{path}, line 1")
        for row in reader:
            where, width = f"{path}, line {reader.line_num}", len(header)
            beyond = row.pop(None, [])  # cells behind the header's last
            cells = sum(value is not None for value in row.values()) + len(beyond)
            if cells != width:
                raise DataError(
                    f"{where}: found {cells} cells; needed are {width}, as the header has"
                )
            yield {key: value or None for key, value in row.items()}, where
    except csv.Error as error:
        line = reader.line_num + 1
        raise DataError(f"{path}, line {line}: {error}; needed is CSV with a header") from error


def _require_once(columns: Sequence[str], where: str) -> None:
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise DataError(f"{where}: the column {twice[0]!r} is there twice; needed is once")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        _require_once(pyarrow.parquet.read_schema(path).names, str(path))
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except DataError:
        raise
    except (pyarrow.ArrowException, ArithmeticError, LookupError, ValueError) as error:
        raise DataError(f"{path} is not read as Parquet ({shown(str(error))})") from error
    yield from _numbered(rows, str(path))


_READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json,
    ".json": _json,
    ".csv": partial(_separated, ","),
    ".tsv": partial(_separated, "\t"),
    ".parquet": _parquet,
}
FILE_SUFFIXES = tuple(_READERS)
