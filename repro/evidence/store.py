"""The store of records: raw runs in a folder, and blessed records in `expected/`.

Blessed records are at `expected/records/<tier>/[<device>/]<target>`, in two files with the same
runs in the same order:

* `.csv`: a line per run and a column per metric of the target, for review in a diff. Numbers have
  six digits; a value that was not finite is `nan`, a missing value is empty.
* `.jsonl.xz`: the complete record of each run, one JSON object per line, followed by the series, a
  line per name with the values of every run (null for a run without the series). This order
  compresses better. The same records give the same bytes.

Records are read only from the second file, and their seals are checked. A test checks that each
committed CSV file matches its records (`table_text`). Blessing rounds series and drops some, so a
blessed record keeps the metrics that were computed before, and gets a new seal.

`check` and the figures read records through a `Source`. A blessed record has the same name and
order as its file among raw runs, so that a check does not depend on the source.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import lzma
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from repro.evidence.environment import device_of
from repro.evidence.record import Record, RecordError, parse_record, read_record
from repro.spec.checks import check_value, require, shown
from repro.spec.tier import Tier
from repro.spec.whole_files import replace_files, stamp_of

FOLDER = "records"
HEAD = ("arm", "seed", "outcome", "commit", "device", "digest", "started")
WHOLE = ".jsonl.xz"
# Keys of a line with the series of one name; the first is also a key of a record.
SERIES, VALUES = "series", "values"
_SHORT = 12
_DIGITS = 6
# The dictionary of 8 MiB is larger than any target's records; higher presets only use more memory.
PRESET = 6 | lzma.PRESET_EXTREME


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A stored record that has not been read yet: tier, target and arm are from its path.

    `name` is `seed-3.json`, or `seed-3.failed-1.json`, as among raw runs. `path` is for messages:
    the file, or the CSV file followed by arm and name. `read` raises `RecordError` if it cannot be
    used.
    """

    tier: str
    target: str
    arm: str
    name: str
    path: Path
    read: Callable[[], Record]

    @property
    def stem(self) -> str:
        """The run's own name, finished or failed: `seed-3`."""
        return self.name.split(".")[0]

    @property
    def finished(self) -> bool:
        """Whether the run finished, according to the name."""
        return self.name == f"{self.stem}.json"


class Source(Protocol):
    """A place that records are read from."""

    def entries(self, tier: str, target: str) -> list[Entry]:
        """Return a target's records at a tier, failed ones included, by arm and name."""

    def place(self, tier: str, target: str) -> Path:
        """Return the path that messages name for the records of a target at a tier."""


@dataclass(frozen=True, slots=True)
class RunsFolder:
    """Raw runs: `<folder>/<tier>/<target>/<arm>/seed-<seed>.json`."""

    folder: Path

    def targets(self) -> list[tuple[str, str]]:
        """Return (tier, target) of each folder that holds a record."""
        return [
            (folder.parent.name, folder.name)
            for folder in sorted(self.folder.glob("*/*"))
            if next(folder.glob("*/seed-*.json"), None) is not None
        ]

    def entries(self, tier: str, target: str) -> list[Entry]:
        """Return an entry per file; none is opened."""
        return [
            Entry(
                tier=tier,
                target=target,
                arm=path.parent.name,
                name=path.name,
                path=path,
                read=functools.partial(read_record, path),
            )
            for path in sorted(self.place(tier, target).glob("*/seed-*.json"))
        ]

    def place(self, tier: str, target: str) -> Path:
        """Return the target's folder."""
        return self.folder / tier / target


@dataclass(frozen=True, slots=True)
class Blessed:
    """The blessed records of one tier on one kind of device, None where a tier has no device."""

    expected: Path
    tier: str
    device: str | None

    def has(self, target: str) -> bool:
        """Whether this source has blessed records of the target itself."""
        return self.place(self.tier, target).is_file()

    def entries(self, tier: str, target: str) -> list[Entry]:
        """Return an entry per record; empty if nothing is blessed.

        Raises `RecordError` if the files cannot be read or contradict each other.
        """
        path = self.place(tier, target)
        if tier != self.tier or not path.is_file():
            return []
        return entries_of(read_stored(path), path)

    def place(self, tier: str, target: str) -> Path:
        """Return the target's CSV file, which may not exist."""
        return self.expected / FOLDER / tier / (self.device or "") / f"{target}.csv"


@dataclass(frozen=True, slots=True)
class Joined:
    """Several sources as one; where several have a run, the first one's entry is taken."""

    sources: Sequence[Source]

    def entries(self, tier: str, target: str) -> list[Entry]:
        """Return the entries of all sources, without duplicates of a run.

        Raises `RecordError` if two sources hold different runs under one name.
        """
        kept: dict[tuple[str, str, str], Entry] = {}
        for entry in (e for source in self.sources for e in source.entries(tier, target)):
            # A run may fail several times, and finishes once.
            began = "" if entry.finished else entry.read().started
            other = kept.setdefault((entry.arm, entry.stem, began), entry)
            if other is entry or began:
                continue
            one, two = other.read(), entry.read()
            if (one.commit, one.started) != (two.commit, two.started):
                raise RecordError(
                    f"{entry.path}: recorded at commit {two.commit[:12]}, and again at commit "
                    f"{one.commit[:12]} in {other.path}; move one of the two away"
                )
        return sorted(kept.values(), key=lambda entry: (entry.arm, entry.name))

    def place(self, tier: str, target: str) -> Path:
        """Return the first source's place."""
        return self.sources[0].place(tier, target)


def source_of(runs: Path | Source) -> Source:
    """Return a source unchanged, and a folder as the source of its raw runs."""
    return RunsFolder(runs) if isinstance(runs, Path) else runs


def blessed_sources(expected: Path, tier: Tier | None = None) -> list[Blessed]:
    """Return a source for each tier (or of one tier) and device that has blessed records."""
    sources = []
    for each in Tier if tier is None else [tier]:
        root = expected / FOLDER / each.value
        for folder in sorted({path.parent for path in root.rglob("*.csv")}):
            device = None if folder == root else folder.name
            sources.append(Blessed(expected, each.value, device))
    return sources


def blessed_records(expected: Path, tier: Tier, target: str) -> list[Record]:
    """Return a target's blessed records at a tier on all devices, failed ones included."""
    return [
        entry.read()
        for source in blessed_sources(expected, tier)
        for entry in source.entries(tier.value, target)
    ]


def entries_of(records: Iterable[Record], path: Path) -> list[Entry]:
    """Return records as entries, named like their files among raw runs."""
    failures: Counter[tuple[str, int]] = Counter()
    entries = []
    for record in records:
        name = f"seed-{record.seed}.json"
        if not record.ok:
            failures[record.arm, record.seed] += 1
            name = f"seed-{record.seed}.failed-{failures[record.arm, record.seed]}.json"
        entries.append(
            Entry(
                tier=record.tier,
                target=record.target,
                arm=record.arm,
                name=name,
                path=path / record.arm / name,
                read=functools.partial(replace, record),  # a copy
            )
        )
    return sorted(entries, key=lambda entry: (entry.arm, entry.name))


def write_stored(path: Path, metrics: Sequence[str], records: Iterable[Record]) -> list[Path]:
    """Write records as a CSV file and a file of complete records; return both paths.

    Each of the target's `metrics` is a column if any record has it. Each file is replaced
    atomically.
    """
    ordered = sorted(records, key=lambda record: (record.arm, record.seed, record.started))
    columns = [name for name in metrics if any(_cell(record, name) for record in ordered)]
    text = table_text(columns, ordered)
    whole = path.with_suffix(WHOLE)
    packed = lzma.compress(stored_text(ordered).encode(), preset=PRESET)
    replace_files({whole: packed, path: text.encode()})
    return [path, whole]


def table_text(metrics: Sequence[str], records: Iterable[Record]) -> str:
    """Return the text of the CSV file: a line per record, a column per metric."""
    rows = []
    for record in records:
        outcome = record.outcome["status"]
        if not record.ok:
            outcome += f": {record.outcome.get('reason', '').partition(chr(10))[0]}"
        head = [record.arm, str(record.seed), outcome, record.commit[:_SHORT]]
        head += [device_of(record.environment) or "", record.digest[:_SHORT], record.started]
        rows.append([*head, *(_cell(record, name) for name in metrics)])
    return csv_text([*HEAD, *metrics], rows)


def csv_text(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return the text of a CSV file with these columns."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


def read_stored(path: Path) -> tuple[Record, ...]:
    """Return the complete records that belong to a CSV file, in the order of its lines.

    Raises `RecordError` if they cannot be read; the message names file and line.
    """
    whole = path.with_suffix(WHOLE)
    try:
        stamps = stamp_of(whole)
    except OSError as error:
        raise RecordError(f"{path}: half of it is missing: {error}") from error
    return _read(whole, stamps)


# Cached: tables and pages read the same records repeatedly. The stamp detects changed files.
@functools.lru_cache(maxsize=256)
def _read(whole: Path, stamps: str) -> tuple[Record, ...]:
    try:
        raw = raw_records(lzma.decompress(whole.read_bytes()).decode().splitlines())
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise RecordError(f"{whole}: not readable: {error}") from error
    return tuple(parse_record(item, f"{whole}:{i}") for i, item in enumerate(raw, 1))


def _cell(record: Record, name: str) -> str:
    value = record.value(name)
    if value is None:
        return "nan" if name in record.metrics else ""
    return f"{value:.{_DIGITS}g}"


def stored_text(records: Iterable[Record]) -> str:
    """Return a line per record without its series, then a line per series of them all."""
    raw = [record.to_json() for record in records]
    series = [item.pop(SERIES) for item in raw]
    names = sorted({name for curves in series for name in curves})
    curves = [{SERIES: name, VALUES: [of_run.get(name) for of_run in series]} for name in names]
    return "".join(stored_line(item) for item in (*raw, *curves))


def raw_records(
    lines: Iterable[str], parse: Callable[[str], Any] = json.loads
) -> list[dict[str, Any]]:
    """Return the JSON values of the records in lines of `stored_text`, each with its series."""
    items = [parse(line) for line in lines]
    for item in items:
        require(isinstance(item, dict), f"a line is {shown(item)}; needed is an object")
    curves = [item for item in items if set(item) == {SERIES, VALUES}]
    records = [item | {SERIES: {}} for item in items[: len(items) - len(curves)]]
    for curve in curves:
        name, values = curve[SERIES], curve[VALUES]
        check_value(name, str, SERIES)
        require(isinstance(values, list), f"{VALUES} is {shown(values)}; needed is a list")
        found, needed = len(values), len(records)
        require(found == needed, f"a series is of {found} records; {needed} are there")
        for record, of_run in zip(records, values, strict=True):
            if of_run is not None:
                record[SERIES][name] = of_run
    return records


def stored_line(raw: dict[str, Any]) -> str:
    """Return JSON values as one line, alike for alike values."""
    return json.dumps(raw, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"
