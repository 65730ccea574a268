"""Bundles: the sealed records of a target in one file, to be judged elsewhere.

A bundle is compressed text of the store's form (`repro.evidence.store`): records with their
configuration and environment, then series. A line before them names target and tier.

A bundle is untrusted input. It is read in memory, up to a size limit, and has no file names in it,
so nothing from it is ever written, opened or executed. Its numbers must be finite. If a value is
not what a run writes, any error that it causes becomes one sentence.

Easy to get wrong: seals and digests show that nothing was damaged, not who ran it. Metrics are
those of the packed records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import lzma
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from repro.evidence.origins import is_clean
from repro.evidence.printable import one_line
from repro.evidence.provenance import checkout_folder
from repro.evidence.record import Record, finite_json, parse_record
from repro.evidence.store import (
    PRESET,
    WHOLE,
    Blessed,
    Entry,
    RunsFolder,
    blessed_records,
    entries_of,
    raw_records,
    stored_line,
    stored_text,
)
from repro.judge.blessing import compact
from repro.judge.check import Checked, check_selection
from repro.run.places import absence_text
from repro.run.select import Selection, select
from repro.spec.checks import require, shown
from repro.spec.whole_files import replace_files

# Twice the largest that is blessed, 49 runs of 200 steps; parsed, a byte takes some thirty.
MOST_BYTES = 2**22
_MOST_LINES, _MOST_VALUES = 10_000, 2**19
# Each is looked up in git.
_MOST_COMMITS = 20
# What reading may take besides, as `lzma` counts.
_MEMORY = 2**25
_REASON = 300
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that was read, as the source of the records to judge."""

    path: Path
    selection: Selection
    records: tuple[Record, ...]

    def entries(self, tier: str, target: str) -> list[Entry]:
        """Return the entries of a target's records at a tier."""
        own = [item for item in self.records if (item.tier, item.target) == (tier, target)]
        return entries_of(own, self.path)

    def place(self, tier: str, target: str) -> Path:
        """Return the bundle's path."""
        return self.path


def pack(selection: Selection, source: RunsFolder | Blessed, out: Path) -> str:
    """Write a target's records to a new bundle, each read first; return a sentence on it."""
    target, tier = selection.target, selection.tier
    homes = [selection.source.home(arm.name) for arm in target.arms]
    arms = {(home.name, arm) for home, arm in homes}
    records = [
        entry.read()
        for home in sorted({home for home, _ in arms})
        for entry in source.entries(tier.value, home)
        if (home, entry.arm) in arms
    ]
    runs = source.folder if isinstance(source, RunsFolder) else source.expected
    place = source.place(tier.value, selection.source.name)
    require(bool(records), absence_text(runs, place))
    require(out.name.endswith(WHOLE), f"{out}: the name of a bundle ends in {WHOLE}")
    require(not out.exists(), f"{out} exists; a bundle is written to a new file")
    timed = [metric.name for metric in target.metrics_at(tier)]
    exact = timed if selection.source.timed_repeats else []
    head = {"target": target.name, "tier": tier.value}
    text = stored_line(head) + stored_text([compact(record, exact) for record in records])
    replace_files({out: lzma.compress(text.encode(), preset=PRESET)})
    return f"{out}: {len(records)} records of {target.name}, {tier.value} tier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A bundle with its verdicts or, in a sentence, why it has none.

    `elsewhere` is a sentence on its runs that are blessed or are in another bundle, too; else
    empty.
    """

    path: Path
    checked: Checked | None = None
    why: str = ""
    elsewhere: str = ""

    def runs(self) -> set[tuple[str, str]]:
        """Return the configuration of each run and the instant at which it began."""
        records = self.checked.evidence.all_records() if self.checked else []
        return {(record.digest, record.started) for record in records}


def judge_folder(folder: Path, expected: Path) -> list[Judged]:
    """Return each bundle in a folder's folders, judged; one that cannot be costs itself alone."""
    judged = []
    for path in sorted(folder.glob(f"*/*{WHOLE}")):
        try:
            with untrusted(path):
                require(not path.parent.is_symlink(), "its folder is a link")
            judged.append(Judged(path=path, checked=judge_bundle(path, expected)))
        except ValueError as error:
            # Pages name no place of a machine.
            judged.append(Judged(path=path, why=str(error).removeprefix(f"{folder}/")))
    return [dataclasses.replace(one, elsewhere=_elsewhere(one, judged, expected)) for one in judged]


def _elsewhere(one: Judged, judged: Sequence[Judged], expected: Path) -> str:
    runs = one.runs()
    others = [item.path for item in judged if item is not one and item.runs() & runs]
    places = {f"{path.parent.name}/{path.name}" for path in others}
    if one.checked is not None:
        tier = one.checked.selection.tier
        targets = {record.target for record in one.checked.evidence.all_records()}
        blessed = [item for name in targets for item in blessed_records(expected, tier, name)]
        if runs & {(item.digest, item.started) for item in blessed}:
            places.add("blessed here")
    listed = one_line(", ".join(sorted(places)))
    return f"some of its runs are elsewhere, too: {listed}" if places else ""


@contextlib.contextmanager
def untrusted(path: Path) -> Iterator[None]:
    """Turn any error that a bundle's values cause into a `ValueError` with path and reason."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        why = one_line(f"{kind}{error}")[:_REASON]
        where = one_line(str(path))
        raise ValueError(f"{where}: not a bundle that can be judged: {why}") from error


def judge_bundle(path: Path, expected: Path) -> Checked:
    """Return the verdicts of a bundle's records, or raise `ValueError` where there can be none."""
    with untrusted(path):
        bundle = read_bundle(path)
        return check_selection(bundle.selection, bundle, expected)


def _as_committed(record: Record) -> Record:
    """Return a stranger's record as one with local changes unless its commit is what ran.

    Where there is no git checkout to look the commit up in, it is as it says of itself.
    """
    known = checkout_folder() is None or (COMMIT.fullmatch(record.commit) and is_clean(record))
    return record if known else dataclasses.replace(record, dirty=True)


def read_bundle(path: Path) -> Bundle:
    """Read a bundle in memory; to be called within `untrusted`."""
    require(path.is_file() and not path.is_symlink(), "there is no plain file of this name")
    reader = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY)
    with path.open("rb") as file:
        text = reader.decompress(file.read(MOST_BYTES), MOST_BYTES)
    require(reader.eof and not reader.unused_data, f"it is cut, or larger than {MOST_BYTES} bytes")
    require(text.count(b",") < _MOST_VALUES, f"it has more than {_MOST_VALUES} values")
    head, *lines = text.decode().splitlines() or ["null"]
    require(len(lines) < _MOST_LINES, f"it has {len(lines)} lines; needs fewer than {_MOST_LINES}")
    named = finite_json(head)
    stated = [named.get(key) for key in ("target", "tier")] if isinstance(named, dict) else [None]
    require(
        all(isinstance(text, str) for text in stated),
        f"its first line is {shown(named)}; needed are texts as target and tier",
    )
    records = tuple(
        parse_record(raw, f"record {number}")
        for number, raw in enumerate(raw_records(lines, finite_json), 1)
    )
    commits = {record.commit for record in records}
    require(len(commits) <= _MOST_COMMITS, f"it is of {len(commits)} commits")
    records = tuple(map(_as_committed, records))
    finished = [(item.tier, item.target, item.arm, item.seed) for item in records if item.ok]
    require(len({*finished}) == len(finished), "it has a run twice")
    require(bool(records), "it holds no record")
    return Bundle(path, select([named["target"]], tier=named["tier"])[0], records)
