"""Records: the configuration, facts and results of one run, as one JSON file.

The path is `<runs>/<tier>/<target>/<arm>/seed-<seed>.json`. The file is written under a temporary
name and then renamed, so it is never incomplete, and it is never overwritten. A failed run writes
`seed-<seed>.failed-<n>.json` in the same folder instead: it can be tried again, and the failure
still counts.

Every record has a seal, the SHA-256 of its other contents in a canonical form. The seal detects
damage and manual edits. It is not a signature: anyone can compute it. Against forged results there
is the review before blessing, and repeating the run.

A record holds observations: configuration, digests, series, tallies, seconds, facts, and the
metrics that only the run itself can measure. All other metrics are computed when it is read
(`repro.evidence.derived`).

Easy to get wrong: matching a record with today's configuration by name only. Each record holds its
resolved configuration and its digest; `find_record` refuses a record of another configuration,
and names the fields that differ.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from types import UnionType
from typing import Any, get_args, get_origin

from repro.evidence.derived import derive
from repro.evidence.environment import steady_now
from repro.evidence.estimate import Estimate as Estimate
from repro.evidence.procedure import Measured as Measured
from repro.evidence.provenance import source_at_start, source_states
from repro.spec.checks import field_types
from repro.spec.config import RunConfig, digest_of
from repro.spec.facts import FactNameError, Facts
from repro.spec.settings import flattened
from repro.spec.whole_files import stamp_of, write_new

SCHEMA = 3
SEAL = "seal"
# Means that a record forms of any of its series.
_MEAN = re.compile(r"train_(?P<series>\w+?)_(?:mean|to_(?P<last>[1-9]\d*))")
# Sums of squares of larger numbers are not finite.
_LARGEST = 1e100
# A commit of git, or the value of `REPRO_COMMIT`: no leading dash, no control characters.
_COMMIT = re.compile(r"\w[\w.+-]{0,99}", re.ASCII)
Finder = Callable[[RunConfig, Path], Path | None]


class RecordError(ValueError):
    """A record that cannot be read or used; the message names the file and the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run of one arm with one seed.

    Attributes
    ----------
    config, digest
        The resolved `RunConfig` as JSON values, and its SHA-256.
    commit, dirty
        Source commit of the process that wrote the record, and whether files differed from it;
        `unknown` and None outside a git checkout.
    sources
        States of the source at the start and end of each process of the run.
    environment
        See `repro.evidence.environment`.
    inputs
        SHA-256 digests of the inputs (checkpoint, problems, prompt template).
    metrics, series
        Numbers by name, including derived metrics once the record is read; and lists with one
        value per step (None where not finite).
    facts
        What the run did; `repro.evidence.receipts` lists what is required.
    outcome
        `{"status": "ok"}` or `{"status": "failed", "reason": ...}`.
    started, finished
        ISO 8601 times, UTC.
    """

    schema: int = SCHEMA
    target: str
    target_version: int
    tier: str
    arm: str
    seed: int
    procedure: str
    config: dict[str, Any]
    digest: str
    commit: str
    dirty: bool | None
    sources: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any]
    inputs: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Estimate] = field(default_factory=dict)
    series: dict[str, list[float | None]] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    outcome: dict[str, str] = field(default_factory=lambda: {"status": "ok"})
    started: str
    finished: str

    def __post_init__(self) -> None:
        if isinstance(self.facts, dict):
            object.__setattr__(self, "facts", Facts(self.facts))

    @property
    def ok(self) -> bool:
        """Whether the run finished."""
        return self.outcome["status"] == "ok"

    def value(self, metric: str) -> float | None:
        """Return the value of a metric, None if the record has none.

        Two need no entry: `train_<series>_mean` is the mean of any series over all steps, and
        `train_<series>_to_<N>` that over steps 1 to N, which an untrained arm that sampled the
        prompts of these steps has, too. None if there are fewer steps.
        """
        estimate = self.metrics.get(metric)
        if estimate is not None:
            return estimate.value
        named = _MEAN.fullmatch(metric)
        series = self.series.get(named["series"], ()) if named else ()
        last = int(named["last"] or len(series)) if named else 0
        values = [item for item in series[:last] if item is not None]
        return fmean(values) if values and last <= len(series) else None

    def repeats(self, metric: str) -> list[float]:
        """Return the timed repeats of a metric: its series, else its value; empty without either.

        Only for targets whose runs repeat a deterministic workload (`Target.timed_repeats`): in
        other targets a series of the same name has another meaning.
        """
        value = self.value(metric)
        if value is None:
            return []
        return [item for item in self.series.get(metric, [value]) if item is not None]

    def derived(self) -> dict[str, Estimate]:
        """Return the derived metrics; raise `ValueError` if the observations are contradictory."""
        return derive(self.procedure, self.config["scale"], self.series, self.facts)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values, with its seal."""
        # Faster than `asdict`, which copies every number before `_finite` does.
        values = {item.name: _finite(getattr(self, item.name)) for item in dataclasses.fields(self)}
        return values | {SEAL: digest_of(values)}

    def write(self, runs: Path) -> Path:
        """Write the record to its path under `runs`, without derived metrics; return the file.

        Raises `FileExistsError` if the run already has a record of success, as records are never
        overwritten; `ValueError` if observations contradict each other, or it could not be read
        again.
        """
        folder = runs / self.tier / self.target / self.arm
        follow = self.derived() if self.ok else {}
        measured = {name: item for name, item in self.metrics.items() if name not in follow}
        raw = dataclasses.replace(self, metrics=measured)
        text = json.dumps(raw.to_json(), indent=1, sort_keys=True, allow_nan=False) + "\n"
        parse_record(finite_json(text), f"the record of seed {self.seed}")
        if self.ok:
            return write_new(folder / f"seed-{self.seed}.json", text)
        attempt = 1
        while True:
            try:
                return write_new(folder / f"seed-{self.seed}.failed-{attempt}.json", text)
            except FileExistsError:
                attempt += 1


def record_of(
    run: RunConfig, measured: Measured, *, environment: dict[str, Any], started: datetime
) -> Record:
    """Return the record of a run that ends now, and that started at a time by `steady_now`.

    To the states of the source that its checkpoints carried, those of this process are added.
    """
    start, facts = source_at_start(), Facts(measured.facts)
    return Record(
        target=run.target,
        target_version=run.target_version,
        tier=run.tier,
        arm=run.arm.name,
        seed=run.seed,
        procedure=run.procedure,
        config=_plain(run.resolved()),
        digest=run.digest(),
        commit=start["commit"],
        dirty=start["dirty"],
        sources=source_states(facts.pop("sources", ())),
        environment=environment,
        inputs=measured.inputs,
        metrics=measured.metrics,
        series=measured.series,
        facts=facts,
        started=started.isoformat(timespec="seconds"),
        finished=max(started, steady_now()).isoformat(timespec="seconds"),
    )


def failed_record(
    run: RunConfig, reason: str, environment: dict[str, Any], started: datetime | None = None
) -> Record:
    """Return the record of a run that failed, with the reason (first line first)."""
    record = record_of(run, Measured(), environment=environment, started=started or steady_now())
    outcome = {"status": "failed", "reason": reason or "no reason given"}
    return dataclasses.replace(record, outcome=outcome)


def record_path(run: RunConfig, runs: Path) -> Path:
    """Return the path of the record that `run` has once it has finished."""
    return runs / run.tier / run.target / run.arm.name / f"seed-{run.seed}.json"


# The folder, in a run's own, of what was trained.
TRAINED = {"lora": "adapter", "full": "model"}


def run_folder(run: RunConfig, runs: Path) -> Path:
    """Return the run's working folder, for checkpoints; its name includes the digest."""
    return record_path(run, runs).with_suffix("") / run.digest()[:12]


def find_record(run: RunConfig, runs: Path) -> Path | None:
    """Return the path of the finished record of `run`, or None.

    Raises `RecordError` if what stands at this path is no record, or of another configuration.
    """
    path = record_path(run, runs)
    if not os.path.lexists(path):
        return None
    difference = config_difference(read_record(path), run)
    if difference is not None:
        raise RecordError(
            f"{path}: {difference}; name another --runs folder, or move that record away"
        )
    return path


@dataclass(slots=True, kw_only=True)
class Standing:
    """Runs with a record of success, runs without one, and why what stands is not a run's record.

    An unreadable file, or a record of another configuration, costs its own run alone: nothing is
    written over it. A sentence of `blocked` names the file.
    """

    recorded: list[RunConfig] = field(default_factory=list)
    left: list[RunConfig] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)


def standing_of(planned: Iterable[RunConfig], runs: Path, find: Finder = find_record) -> Standing:
    """Sort runs by what stands at the place of their record, or why `find` refuses it."""
    standing = Standing()
    for run in planned:
        try:
            found = find(run, runs)
        except ValueError as error:
            standing.blocked.append(str(error))
        else:
            (standing.left if found is None else standing.recorded).append(run)
    return standing


def run_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name, without the planned seeds: a later plan may name more."""
    return {key: value for key, value in flattened(config).items() if key != "scale.seeds"}


def config_difference(record: Record, run: RunConfig) -> str | None:
    """Return a sentence saying how the record's configuration differs from `run`'s, or None."""
    needed = run_settings(_plain(run.resolved()))
    recorded = run_settings(record.config)
    changes = [
        f"{key} is {recorded.get(key, 'absent')}, needed {needed.get(key, 'absent')}"
        for key in sorted(needed.keys() | recorded.keys())
        if recorded.get(key, "absent") != needed.get(key, "absent")
    ]
    if not changes:
        return None
    shown = "; ".join(changes[:3]) + (f"; and {len(changes) - 3} more" if len(changes) > 3 else "")
    return f"the record is of another configuration ({shown})"


def read_record(path: Path) -> Record:
    """Read one raw record and compute its derived metrics.

    Raises `RecordError` if the file cannot be read, is not a record of this schema, has a seal that
    does not match its contents, or holds contradictory observations.
    """
    if path.exists() and not path.is_file():
        raise RecordError(f"{path}: not a readable record: it is not a plain file")
    try:
        return _read(path, stamp_of(path))
    except (OSError, RecursionError) as error:
        raise RecordError(f"{path}: not a readable record: {error}") from error


# One start asks several times which runs are recorded. The stamp detects changed files.
@functools.lru_cache(maxsize=512)
def _read(path: Path, stamp: str) -> Record:
    try:
        raw = finite_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(f"{path}: not a readable record: {error}") from error
    record = parse_record(raw, str(path))
    if not record.ok:
        return record
    try:
        return dataclasses.replace(record, metrics=record.metrics | record.derived())
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RecordError(f"{path}: no metrics follow from what it holds: {error}") from error


def finite_json(text: str) -> Any:
    """Return the JSON values of a text; `ValueError` names a number beyond those of a record."""
    return json.loads(
        text, parse_int=_whole_number, parse_float=_finite_number, parse_constant=_finite_number
    )


def _whole_number(digits: str) -> int:
    _finite_number(digits)
    return int(digits)


def _finite_number(digits: str) -> float:
    number = float(digits)
    if not abs(number) <= _LARGEST:
        raise ValueError(f"a number is {digits:.20}; needs a finite one, at most {_LARGEST:g}")
    return number


def parse_record(raw: Any, where: str) -> Record:
    """Convert JSON values to a record; `where` names their origin in errors.

    Of facts the names are checked, of other fields the types.

    Raises `RecordError` if the values have another schema, other fields than a record, one of
    another type, or a wrong seal.
    """
    if not isinstance(raw, dict):
        raise RecordError(f"{where}: it holds a {type(raw).__name__}; needs an object")
    if raw.get("schema") != SCHEMA:
        raise RecordError(f"{where}: schema is {raw.get('schema')!r}; this program reads {SCHEMA}")
    needed = {SEAL, *(item.name for item in dataclasses.fields(Record))}
    if raw.keys() != needed:
        missing, unknown = sorted(needed - raw.keys()), sorted(raw.keys() - needed)
        raise RecordError(f"{where}: fields {missing} are missing, and {unknown} are unknown")
    values = {name: value for name, value in raw.items() if name != SEAL}
    if digest_of(values) != raw[SEAL]:
        raise RecordError(
            f"{where}: seal is not that of the record's contents; it was damaged or edited by hand"
        )
    if digest_of(values["config"]) != values["digest"]:
        raise RecordError(f"{where}: digest is not that of the record's own config")
    for name, hint in field_types(Record).items():
        if not _fits(values[name], hint):
            raise RecordError(f"{where}: field {name} is {values[name]!r:.60}; needed is {hint}")
    if not _COMMIT.fullmatch(values["commit"]):
        raise RecordError(f"{where}: commit is {values['commit']!r:.60}; that is no commit's name")
    times = []
    for name in ("started", "finished"):
        try:
            times.append(datetime.fromisoformat(values[name]))
        except ValueError as error:
            raise RecordError(f"{where}: field {name}: {error}") from error
        if times[-1].tzinfo is None:
            raise RecordError(f"{where}: field {name} is {values[name]!r}; needs an offset to UTC")
    if times[1] < times[0]:
        raise RecordError(f"{where}: field started is {times[0]}, later than finished, {times[1]}")
    if any(not isinstance(state.get("sha256"), str) for state in values["sources"]):
        raise RecordError(f"{where}: field sources: a state has no text as its sha256")
    metrics = {name: Estimate(**metric) for name, metric in values["metrics"].items()}
    try:
        return Record(**(values | {"metrics": metrics}))
    except FactNameError as error:
        raise RecordError(f"{where}: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    """Say whether a JSON value has a field's type."""
    members = get_args(hint)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_fits(item, members[1]) for item in value.values())
    if get_origin(hint) is list:  # of numbers, or of any objects: one of each class is looked at
        classes = {type(item): item for item in value} if isinstance(value, list) else {}
        return isinstance(value, list) and all(_fits(v, members[0]) for v in classes.values())
    if get_origin(hint) is UnionType:
        return any(_fits(value, member) for member in members)
    if hint is Facts:
        return isinstance(value, dict)
    if hint is Estimate:
        hints = field_types(Estimate)
        return (
            isinstance(value, dict)
            and value.keys() == hints.keys()
            and all(_fits(item, hints[name]) for name, item in value.items())
        )
    return hint is Any or isinstance(value, int | float if hint is float else hint)


def _plain(value: Any) -> Any:
    """Return `value` as JSON would return it (tuples as lists)."""
    return json.loads(json.dumps(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return _finite(dataclasses.asdict(value)) if isinstance(value, Estimate) else value
