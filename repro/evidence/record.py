"""Records: what one run was, what it really did and what came out, as one JSON file.

The file of a run lies at `<runs>/<tier>/<target>/<arm>/seed-<seed>.json`. It is written under a
temporary name and renamed, so that it is whole or absent, and it is never overwritten: a result
that exists stays. A run that failed leaves `seed-<seed>.failed-<n>.json` beside that place instead,
so that it can be tried again while the failure stays counted.

Easy to get wrong: comparing a record with the configuration of today by name alone. Each record
holds its whole resolved configuration and its digest; `find_record` refuses one whose digest is
another, and says in which fields the two differ.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from repro.evidence.provenance import source_commit
from repro.spec.config import RunConfig, digest_of

SCHEMA = 1


class RecordError(ValueError):
    """A record that cannot be read or used; the message names the file and the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One measured number.

    Attributes
    ----------
    value
        None where the run produced no finite number.
    unit
        As in `repro.spec.target.Metric`.
    low, high
        95 % interval, None where there is none.
    n
        How many independent units are behind it.
    method
        How value and interval were formed.
    """

    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    n: int = 1
    method: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run of one arm with one seed.

    Attributes
    ----------
    config, digest
        The resolved `RunConfig` as JSON values, and its SHA-256.
    commit, dirty
        Source commit and whether files differed from it; `unknown` and None where that cannot be
        told.
    environment
        See `repro.evidence.environment`.
    inputs
        SHA-256 digests of what went in (checkpoint, problems, prompt template).
    metrics, series
        Numbers by name, and lists with one value a step (None where not finite).
    effects
        What was really done; `repro.evidence.receipts` says what must be there.
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
    environment: dict[str, Any]
    inputs: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Estimate] = field(default_factory=dict)
    series: dict[str, list[float | None]] = field(default_factory=dict)
    effects: dict[str, Any] = field(default_factory=dict)
    outcome: dict[str, str] = field(default_factory=lambda: {"status": "ok"})
    started: str
    finished: str

    @property
    def ok(self) -> bool:
        """Whether the run finished."""
        return self.outcome["status"] == "ok"

    def value(self, metric: str) -> float | None:
        """Return the value of a metric, None if the record has none."""
        estimate = self.metrics.get(metric)
        return None if estimate is None else estimate.value

    def repeats(self, metric: str) -> list[float]:
        """Return the timed repeats of a metric: its series, else its value; empty without either.

        For targets whose runs repeat a deterministic workload (`Target.timed_repeats`) alone: in
        others a series of the same name is something else.
        """
        value = self.value(metric)
        if value is None:
            return []
        return [item for item in self.series.get(metric, [value]) if item is not None]

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        found: dict[str, Any] = _finite(dataclasses.asdict(self))
        return found

    def write(self, runs: Path) -> Path:
        """Write the record to its place under `runs`; return the path.

        Raises
        ------
        FileExistsError
            If a record of success is there already: records are never overwritten.
        """
        folder = record_folder(self.tier, self.target, self.arm, runs)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_json(), indent=1, sort_keys=True, allow_nan=False) + "\n"
        if self.ok:
            return write_new(folder / f"seed-{self.seed}.json", text)
        attempt = 1
        while True:
            try:
                return write_new(folder / f"seed-{self.seed}.failed-{attempt}.json", text)
            except FileExistsError:
                attempt += 1


def record_of(
    run: RunConfig,
    *,
    metrics: Mapping[str, Estimate],
    environment: Mapping[str, Any],
    started: datetime,
    series: Mapping[str, list[float | None]] | None = None,
    effects: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str] | None = None,
    outcome: Mapping[str, str] | None = None,
) -> Record:
    """Return the record of a run that ends now."""
    commit, dirty = source_commit()
    return Record(
        target=run.target,
        target_version=run.target_version,
        tier=run.tier,
        arm=run.arm.name,
        seed=run.seed,
        procedure=run.procedure,
        config=_plain(run.resolved()),
        digest=run.digest(),
        commit=commit,
        dirty=dirty,
        environment=dict(environment),
        inputs=dict(inputs or {}),
        metrics=dict(metrics),
        series={name: list(values) for name, values in (series or {}).items()},
        effects=dict(effects or {}),
        outcome=dict(outcome or {"status": "ok"}),
        started=started.isoformat(timespec="seconds"),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def failed_record(
    run: RunConfig,
    reason: str,
    environment: Mapping[str, Any],
    started: datetime | None = None,
) -> Record:
    """Return the record of a run that failed, with the reason (first line first)."""
    return record_of(
        run,
        metrics={},
        environment=environment,
        started=started or datetime.now(UTC),
        outcome={"status": "failed", "reason": reason or "no reason given"},
    )


def record_folder(tier: str, target: str, arm: str, runs: Path) -> Path:
    """Return the folder that holds the records of one arm."""
    return runs / tier / target / arm


def record_path(run: RunConfig, runs: Path) -> Path:
    """Return where the record of `run` lies once it has finished."""
    return record_folder(run.tier, run.target, run.arm.name, runs) / f"seed-{run.seed}.json"


def run_folder(run: RunConfig, runs: Path) -> Path:
    """Return the run's own working folder, for checkpoints; named by its digest, too."""
    return record_path(run, runs).with_suffix("") / run.digest()[:12]


def find_record(run: RunConfig, runs: Path) -> Path | None:
    """Return the path of the finished record of `run`, or None.

    Raises
    ------
    RecordError
        If a record is at its place that was made by another configuration.
    """
    path = record_path(run, runs)
    if not path.is_file():
        return None
    difference = config_difference(read_record(path), run)
    if difference is not None:
        raise RecordError(
            f"{path}: {difference}; name another --runs folder, or move that record away"
        )
    return path


def config_difference(record: Record, run: RunConfig) -> str | None:
    """Return a sentence saying how the record's configuration differs from `run`'s, or None."""
    if record.digest == run.digest():
        return None
    wanted = _flatten(_plain(run.resolved()))
    found = _flatten(record.config)
    changes = [
        f"{key} is {found.get(key, 'absent')}, needed {wanted.get(key, 'absent')}"
        for key in sorted(wanted.keys() | found.keys())
        if found.get(key, "absent") != wanted.get(key, "absent")
    ]
    shown = "; ".join(changes[:3]) + (f"; and {len(changes) - 3} more" if len(changes) > 3 else "")
    return f"the record is of another configuration ({shown})"


def read_record(path: Path) -> Record:
    """Read one record.

    Raises
    ------
    RecordError
        If the file is not JSON, lacks a field, has one of the wrong kind, is of another schema, or
        holds a digest that is not its configuration's.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecordError(f"{path}: not a readable record: {error}") from error
    return parse_record(raw, str(path))


def parse_record(raw: Any, where: str) -> Record:
    """Return the record that JSON values stand for; `where` names their origin in errors."""
    if not isinstance(raw, dict):
        raise RecordError(f"{where}: a record is a JSON object; found {type(raw).__name__}")
    if raw.get("schema") != SCHEMA:
        raise RecordError(f"{where}: schema is {raw.get('schema')!r}; this program reads {SCHEMA}")
    values: dict[str, Any] = {}
    for item in dataclasses.fields(Record):
        if item.name not in raw:
            raise RecordError(f"{where}: field {item.name} is missing")
        _require_kind(where, item.name, raw[item.name])
        values[item.name] = raw[item.name]
    unknown = sorted(raw.keys() - values.keys())
    if unknown:
        raise RecordError(f"{where}: unknown field {', '.join(unknown)}")
    values["metrics"] = {
        name: _parse_estimate(where, name, metric) for name, metric in raw["metrics"].items()
    }
    record = Record(**values)
    if record.outcome.get("status") not in ("ok", "failed"):
        raise RecordError(f"{where}: outcome.status is {record.outcome.get('status')!r}")
    if digest_of(record.config) != record.digest:
        raise RecordError(f"{where}: digest is not that of the record's own config; it was edited")
    return record


def iterate_records(runs: Path, tier: str, target: str) -> Iterator[Path]:
    """Yield the paths of all records of a target at a tier, failed ones included, sorted."""
    yield from sorted((runs / tier / target).glob("*/seed-*.json"))


def write_new(path: Path, text: str) -> Path:
    """Write `text` to a new file, whole or not at all.

    Raises
    ------
    FileExistsError
        If the file exists.
    """
    temporary = _write_temporary(path, text.encode())
    try:
        # A hard link fails if the name is taken, where a rename would replace the file silently.
        os.link(temporary, path)
    except FileExistsError:
        raise FileExistsError(f"{path} exists; records are never overwritten") from None
    except OSError:
        if path.exists():
            raise FileExistsError(f"{path} exists; records are never overwritten") from None
        os.replace(temporary, path)
        return path
    finally:
        temporary.unlink(missing_ok=True)
    return path


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path`, replacing what is there in one step."""
    replace_files({path: text.encode()})


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Write several files, replacing what is there, once all of them are on the disk.

    The renames follow one another: a reader may meet the first file without the second.
    """
    written = {path: _write_temporary(path, content) for path, content in contents.items()}
    for path, temporary in written.items():
        os.replace(temporary, path)


def _write_temporary(path: Path, content: bytes) -> Path:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(name, 0o644)
    return Path(name)


_DICTS = ("config", "environment", "inputs", "metrics", "series", "effects", "outcome")
_INTEGERS = ("schema", "target_version", "seed")


def _require_kind(where: str, name: str, value: Any) -> None:
    wanted: type | tuple[type, ...] = str
    if name in _DICTS:
        wanted = dict
    elif name in _INTEGERS:
        wanted = int
    elif name == "dirty":
        wanted = (bool, type(None))
    if not isinstance(value, wanted):
        raise RecordError(f"{where}: field {name} is {value!r}, of kind {type(value).__name__}")


def _parse_estimate(where: str, name: str, raw: Any) -> Estimate:
    if not isinstance(raw, dict) or not {"value", "unit"} <= raw.keys():
        raise RecordError(f"{where}: metric {name} needs a value and a unit; found {raw!r}")
    try:
        return Estimate(**raw)
    except TypeError as error:
        raise RecordError(f"{where}: metric {name}: {error}") from error


def _plain(value: Any) -> Any:
    """Return `value` as it would come back from JSON (tuples as lists)."""
    return json.loads(json.dumps(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat.update(_flatten(item, f"{prefix}.{key}" if prefix else str(key)))
        return flat
    return {prefix: value}
