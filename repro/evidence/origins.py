"""Origins: the commit and device of each seed's records, and which records may be combined.

Records from different commits may be combined, as long as all arms of a seed come from the same
state of the source. Arms are compared seed by seed, so a change of the source moves both arms of a
pair. The same holds for kinds of device: the arms of a seed share one, and seeds may differ.

Timings depend on the code and the card. At the systems tier all records must therefore come from
one state and one kind of device. Commits whose sources have the same digest are one state, so
records and pages may be committed between two targets that share arms.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from repro.evidence.environment import device_of
from repro.evidence.provenance import digest_of_commit
from repro.evidence.record import Record

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)
_committed = functools.cache(digest_of_commit)
# Before a target's name: a record's input that is the digest of that target's analysis plan.
PLAN_INPUT = "plan:"
# A record's inputs that differ from seed to seed, and are one for all arms of a seed.
OF_THE_SEED = ("order_of_problems",)
# The mark of records, and of verdicts on them, whose commit does not say what ran.
CHANGED = "changed source"


def grouped_by(items: Iterable[T], key: Callable[[T], Key]) -> dict[Key, list[T]]:
    """Return items by their `key`, in the order in which they come."""
    groups: dict[Key, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def commits_of(records: Iterable[Record]) -> dict[str, list[int]]:
    """Return {commit: its seeds, sorted}, in the order of their first seeds."""
    ordered = sorted(records, key=lambda record: (record.seed, record.commit))
    by_commit = grouped_by(ordered, lambda record: record.commit)
    return {commit: sorted({record.seed for record in of}) for commit, of in by_commit.items()}


def seeds_text(seeds: Iterable[int]) -> str:
    """Return `seed 3`, or `seeds 0, 2, 4 to 9`: three or more in a row are a range."""
    ordered = sorted(set(seeds))
    # A seed less its place is the same for all of a row.
    rows = itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
    parts: list[str] = []
    for _, pairs in rows:
        row = [seed for _, seed in pairs]
        parts += [f"{row[0]} to {row[-1]}"] if len(row) > 2 else map(str, row)
    return f"seed{'s' * (len(ordered) != 1)} {', '.join(parts)}"


def _compared(records: Iterable[Record]) -> list[tuple[int, list[Record]]]:
    """Return (seed, records): arms are paired within a seed."""
    return sorted(grouped_by(records, lambda record: record.seed).items())


def mixed_devices(records: Iterable[Record]) -> str | None:
    """Return a sentence on the first seed whose arms ran on different kinds of device, or None."""
    for seed, paired in _compared(records):
        devices = sorted(device or "none named" for device in devices_of(paired))
        if len(devices) > 1:
            return f"the arms of seed {seed} ran on different kinds of device: {', '.join(devices)}"
    return None


def _states_of(records: Iterable[Record]) -> set[str]:
    """Return the digests of the sources that ran; the commit of a record that shows none."""
    return {record.sources[0]["sha256"] if record.sources else record.commit for record in records}


def is_clean(record: Record) -> bool:
    """Whether the record's commit says what ran, from its first step to its last.

    The commit must exist in this checkout and its files have the digest of what ran. A run that saw
    several states of the source is of none of them.
    """
    if is_changed(record) or not record.sources:
        return False
    return bool(record.sources[0]["sha256"] == _committed(record.commit))


def is_changed(record: Record) -> bool:
    """Whether a record itself shows that it is of no one commit."""
    return bool(record.dirty) or len(record.sources) > 1


def named_commits(records: Sequence[Record], digits: int) -> list[str]:
    """Return commits as pages print them, sorted: `4ca0801`, or `4ca0801 (changed source)`."""
    commits = {record.commit[:digits] for record in records}
    changed = {record.commit[:digits] for record in records if is_changed(record)}
    return [f"{one} ({CHANGED})" if one in changed else one for one in sorted(commits)]


def mixed_sources(records: Sequence[Record], *, several: bool) -> str | None:
    """Return why records must not be combined, or None.

    Needed is every record of a target: its own, failed ones, and those of arms that it shares.
    `several` says whether seeds may be of different states of the source at all.
    """
    commits = sorted({record.commit for record in records})
    if len(commits) < 2:
        return None
    where = f"the records are of {len(commits)} commits"
    if not several and len(_states_of(records)) > 1:
        return f"{where}: {', '.join(commits)}; needs one, for timings are of the code"
    for seed, paired in _compared(records):
        if len(_states_of(paired)) > 1:
            differing = ", ".join(sorted({record.commit for record in paired}))
            return f"{where}, and not all arms of seed {seed} are of one: {differing}"
    return None


def devices_of(records: Iterable[Record]) -> list[str | None]:
    """Return the kinds of device that records were made on, that of most of them first.

    None where one names none.
    """
    counts = Counter(device_of(record.environment) for record in records)
    return sorted(counts, key=lambda device: (-counts[device], device or ""))
