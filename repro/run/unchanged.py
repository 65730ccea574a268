"""Whether the model and the data of a finished run are still those of its record.

Only a user's own are looked at: a local folder, a GGUF file, own data. That is done where runs are
carried out and not at each plan, since hashing the weights of a large model takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from repro.data.load import is_own
from repro.data.problem import Split, digest_of_problems
from repro.data.problem_sets import digested
from repro.evidence.record import Record, find_record, read_record
from repro.run.data_check import problems_of
from repro.spec.checks import require
from repro.spec.config import DataConfig, RunConfig, TrainScale
from repro.spec.hub import gguf_copy, gguf_copy_of


def find_unchanged(run: RunConfig, runs: Path) -> Path | None:
    """Return what `find_record` does; raise `ValueError` also where an input changed since.

    Digests that the record does not have are not compared.
    """
    path = find_record(run, runs)
    if path is None or not isinstance(run.scale, TrainScale):
        return path
    record = read_record(path)
    try:
        changed = ", ".join([*_changed_model(run.scale, record), *_changed_data(run, record)])
        why = changed and f"{changed} changed since this run was recorded, or is read otherwise now"
    except ValueError as error:
        why = str(error)
    require(not why, f"{path}: {why}; put back what was there, or move that record away")
    return path


def _changed_model(scale: TrainScale, record: Record) -> Iterator[str]:
    """Yield the files of a run's model that have another digest than in its record."""
    model, was = Path(scale.checkpoint).expanduser(), record.facts.get("checkpoint_files")
    if was and scale.checkpoint != "tiny" and model.is_dir():
        now = files_now(model)
        yield from (str(model / name) for name in was | now if was.get(name) != now.get(name))
    digest = record.inputs.get("gguf")
    if digest is not None and model.is_file() and gguf_copy(model) != gguf_copy_of(digest):
        yield str(model)


def _changed_data(run: RunConfig, record: Record) -> Iterator[str]:
    """Yield the problems of a user's own that have another digest than in the run's record."""
    for name, (data, split) in digested(run.scale).items():
        was = record.inputs.get(name)
        if was is not None and is_own(data.source):
            # A reward of the user's may read any column.
            rows = split == "train" and run.arm.reward_function is not None
            if was != digest_now(data, split, rows):
                yield f"{name} of {data.source}"


@functools.cache
def files_now(folder: Path) -> dict[str, str]:
    """Return the digests of a folder's files that loading reads, formed once for all runs."""
    from repro.models.checkpoint import digests_of_read, verify

    verify(folder)  # after which a manifest's sums are those of its files
    return digests_of_read(folder)


@functools.cache
def digest_now(data: DataConfig, split: Split, rows: bool) -> str:
    """Return the digest of a split's problems, with their `rows` or not, formed once for all."""
    return digest_of_problems(problems_of(data, split), rows=rows)
