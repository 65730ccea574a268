"""Origins: the commit and device of each seed's records, and which records may stand together.

Records of several commits may stand together where no comparison crosses a state of the source:
every seed, all its arms and those shared with other targets included, is of one state; every
record's sources have the digest of the commit that it names; and an arm's seeds differ in nothing
but the seed: the same configuration, and the same inputs, the target's analysis plan among them.
Arms are compared seed by seed, so what another state may have changed moves both arms of a pair.
Timings are of the code itself: at the systems tier one state stays the rule. Commits whose sources
have one digest are one state: blessed records and pages may be committed between two targets that
share arms.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

from repro.evidence.environment import device_of
from repro.evidence.provenance import digest_of_commit
from repro.evidence.record import Record
from repro.spec.config import digest_of

# Before a target's name: a record's input that is the digest of that target's analysis plan.
PLAN_INPUT = "plan:"


def commits_of(records: Iterable[Record]) -> dict[str, list[int]]:
    """Return {commit: its seeds, sorted}, in the order of their first seeds."""
    seeds_by_commit: dict[str, set[int]] = {}
    for record in records:
        seeds_by_commit.setdefault(record.commit, set()).add(record.seed)
    ordered = sorted(seeds_by_commit.items(), key=lambda item: (min(item[1]), item[0]))
    return {commit: sorted(seeds) for commit, seeds in ordered}


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


def mixed_seeds(records: Iterable[Record]) -> dict[int, list[str]]:
    """Return {seed: commits} of the seeds whose records are of several states of the source."""
    commits: dict[int, set[str]] = {}
    for seed, paired in _compared(records):
        if len(_states_of(paired)) > 1:
            commits.setdefault(seed, set()).update(record.commit for record in paired)
    return {seed: sorted(several) for seed, several in commits.items()}


def _compared(records: Iterable[Record]) -> list[tuple[int, list[Record]]]:
    """Return (seed, records): arms are paired within a seed."""
    together: dict[int, list[Record]] = {}
    for record in records:
        together.setdefault(record.seed, []).append(record)
    return sorted(together.items())


def mixed_devices(records: Iterable[Record]) -> str | None:
    """Return a sentence on the first seed whose arms ran on different kinds of device, or None."""
    for seed, paired in _compared(records):
        devices = sorted(device or "none named" for device in devices_of(paired))
        if len(devices) > 1:
            return f"the arms of seed {seed} ran on different kinds of device: {', '.join(devices)}"
    return None


def between_seeds(records: Sequence[Record]) -> list[str]:
    """Return sentences: on several kinds of device, on each package of several versions."""
    seeds_by_value: dict[str, dict[str, set[int]]] = {}
    for record in records:
        values = {"devices": device_of(record.environment) or "none named"}
        packages = record.environment.get("packages", {})
        values |= {
            f"versions of {name}": str(version)
            for name, version in packages.items()
            if version and name != "failed"
        }
        for name, value in values.items():
            seeds_by_value.setdefault(name, {}).setdefault(value, set()).add(record.seed)
    return [
        f"The runs are of several {name}: "
        + ", ".join(f"{value} ({seeds_text(of)})" for value, of in sorted(by_value.items()))
        for name, by_value in seeds_by_value.items()
        if len(by_value) > 1
    ]


def _states_of(records: Iterable[Record]) -> set[str]:
    """Return what ran: digests of sources, or the commit of a record that has none."""
    return {_digest_of_source(record) or record.commit for record in records}


def is_clean(record: Record) -> bool:
    """Whether the record's commit says what ran, from its first step to its last.

    The commit must exist in this checkout and its files have the digest of what ran. A run that saw
    several states of the source is of none of them, nor is one of which a file was written to while
    it ran, whatever the file held before and after. Records of schema 1 name one state, and some of
    them no digest: then the tree must have been clean when they were written.
    """
    if len(record.sources) > 1 or was_written_to(record):
        return False
    digest, committed = _digest_of_source(record), _committed(record.commit)
    if committed is None or record.dirty:
        return False
    return digest == committed or (digest is None and record.dirty is False)


def was_written_to(record: Record) -> bool:
    """Whether a source file was written to while the run went on."""
    return any(state.get("written") for state in record.sources)


def _digest_of_source(record: Record) -> str | None:
    if record.sources:
        return str(record.sources[0]["sha256"])
    digest = record.environment.get("source_sha256")
    return digest if isinstance(digest, str) else None


def refusal(records: Sequence[Record], *, target: str, several: bool) -> str | None:
    """Return why records must not stand together, or None.

    Parameters
    ----------
    records
        Every record of a target: its own, failed ones, and those of arms that it shares.
    target
        Its name.
    several
        Whether seeds may be of different states of the source at all.
    """
    commits = commits_of(records)
    if len(commits) < 2:
        return None
    where = f"the records are of {len(commits)} commits"
    if not several and len(_states_of(records)) > 1:
        return f"{where}: {', '.join(sorted(commits))}; needs one, for timings are of the code"
    mixed = mixed_seeds(records)
    if mixed:
        seed, differing = next(iter(mixed.items()))
        return f"{where}, and {len(mixed)} seeds have arms of several: seed {seed} of {differing}"
    for record in records:
        digest = _digest_of_source(record)
        if digest is None or digest != _committed(record.commit):
            return (
                f"{where}, and the sources of {record.arm}, seed {record.seed}, are not shown to "
                f"be those of {record.commit}"
            )
    return _difference(records, where, target)


def _difference(records: Sequence[Record], where: str, target: str) -> str | None:
    """Return in what an arm's seeds differ besides the seed, or None.

    Of analysis plans that of `target` counts: another that reads an arm may have been planned again
    since, for other seeds of it.
    """
    plans = {f"{PLAN_INPUT}{target}"}
    first: dict[tuple[str, str], Record] = {}
    for record in records:
        other = first.setdefault((record.target, record.arm), record)
        pair = f"seeds {other.seed} and {record.seed} of {record.arm}"
        if without_seed(record) != without_seed(other):
            return f"{where}, and {pair} are of different configurations"
        shared = record.inputs.keys() & other.inputs.keys()
        for key in sorted(shared):
            if key.startswith(PLAN_INPUT) and key not in plans:
                continue
            if record.inputs[key] != other.inputs[key]:
                return f"{where}, and {pair} had different {key.replace('_', ' ')}"
    return None


def devices_of(records: Iterable[Record]) -> set[str | None]:
    """Return the kinds of device that records were made on; None where one names none."""
    return {device_of(record.environment) for record in records}


def without_seed(record: Record) -> str:
    """Return the digest of the record's configuration but for the seed."""
    config: Mapping[str, object] = record.config
    return digest_of({key: value for key, value in config.items() if key != "seed"})


@functools.cache
def _committed(commit: str) -> str | None:
    return digest_of_commit(commit)
