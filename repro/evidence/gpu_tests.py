"""The record of the GPU tests: how a whole run of them ended, on which device, of which source.

Most machines that change this source have no GPU, and there every GPU test skips: green says
nothing about the kernels. So a run on a GPU (`nox -s gpu`) leaves a record, the record is blessed
to `expected/systems/<device>/gpu_tests.json`, and every later test run, on any machine, ends with a
sentence where the source is another since.

Easy to get wrong: a process that dies (a spoilt context, a kill) leaves no results at all, and no
results are no failures. `read_outcome` counts that, and any exit status that the results do not
explain, as an error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from repro.evidence.bless import BlessError
from repro.evidence.environment import device_of
from repro.evidence.provenance import PACKAGE, digest_of_commit, source_digest
from repro.evidence.record import RecordError
from repro.spec.whole_files import replace_text

SCHEMA = 2
NAME = "gpu_tests.json"
_SHORT = 7
# Exit statuses of pytest that its results explain: all passed, some failed.
_EXPLAINED = (0, 1)
# How a test ended, by the tag that JUnit's files have for it.
_ENDINGS = {"error": "errors", "failure": "failed", "skipped": "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one start of pytest ended.

    Attributes
    ----------
    passed, failed, errors, skipped
        Numbers of tests; an error is one outside a test's own call (a fixture, an import), or the
        end of the whole process.
    failures
        Names of the failed tests and of those with errors, `file::test[case]`.
    seconds
        Duration of the whole process.
    """

    passed: int
    failed: int
    errors: int
    skipped: int
    failures: Sequence[str] = ()
    seconds: float

    @property
    def green(self) -> bool:
        """Whether something passed and nothing else happened but skips."""
        return self.passed > 0 and self.failed == 0 and self.errors == 0

    def __add__(self, other: Outcome) -> Outcome:
        """Return how two starts ended together."""
        return Outcome(
            passed=self.passed + other.passed,
            failed=self.failed + other.failed,
            errors=self.errors + other.errors,
            skipped=self.skipped + other.skipped,
            failures=[*self.failures, *other.failures],
            seconds=round(self.seconds + other.seconds, 1),
        )

    def __str__(self) -> str:
        errors = f", {self.errors} errors" if self.errors else ""
        return f"{self.passed} passed, {self.failed} failed{errors}, {self.skipped} skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTests:
    """One run of all GPU tests and benchmarks.

    Attributes
    ----------
    commit, dirty, environment
        As in `repro.evidence.record.Record`; the environment has the digest of the source.
    date
        ISO 8601, UTC.
    tests, benchmarks
        How each of the two ended.
    """

    schema: int = SCHEMA
    commit: str
    dirty: bool | None
    date: str
    environment: Mapping[str, Any]
    tests: Outcome
    benchmarks: Outcome

    @property
    def green(self) -> bool:
        """Whether tests and benchmarks both are."""
        return self.tests.green and self.benchmarks.green

    @property
    def device(self) -> str | None:
        """The device's name as the driver has it, or None."""
        gpus = self.environment.get("gpu")
        return str(gpus[0]["name"]) if isinstance(gpus, list) and gpus else None

    def write(self, path: Path) -> None:
        """Write the record, replacing what is there: it tells of the latest run."""
        replace_text(
            path,
            json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True, allow_nan=False) + "\n",
        )


def read_gpu_tests(path: Path) -> GpuTests:
    """Return the record in a file.

    Raises
    ------
    RecordError
        If it cannot be read, is of another schema, or lacks a field or has one too many.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("schema") != SCHEMA:
            raise RecordError(f"{path}: schema is {raw.get('schema')!r}; needs {SCHEMA}")
        # Older records have the names of skipped tests too, which nothing reads.
        raw |= {
            part: Outcome(**{name: v for name, v in raw[part].items() if name != "skips"})
            for part in ("tests", "benchmarks")
        }
        return GpuTests(**raw)
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise RecordError(
            f"{path} is no record of GPU tests: {type(error).__name__}: {error}"
        ) from error


def read_outcome(junit: Path, status: int, seconds: float) -> Outcome:
    """Return how a start of pytest ended, from the JUnit file it wrote (family `xunit1`).

    Parameters
    ----------
    status
        Exit status of the process; negative for a signal.
    seconds
        Its duration.
    """
    counts = dict.fromkeys(("passed", "failed", "errors", "skipped"), 0)
    failures: list[str] = []
    cases = ElementTree.parse(junit).iter("testcase") if junit.is_file() else ()
    for case in cases:
        ending = next((name for tag, name in _ENDINGS.items() if case.find(tag) is not None), "")
        counts[ending or "passed"] += 1
        if ending in ("failed", "errors"):
            place = case.get("file") or case.get("classname")
            failures.append("::".join(filter(None, (place, case.get("name")))))
    if not junit.is_file():
        unexplained = f"pytest ended with status {status} and left no results"
    elif status not in _EXPLAINED or bool(status) != bool(failures):
        unexplained = f"pytest ended with status {status}, which its results do not explain"
    else:
        return Outcome(**counts, failures=failures, seconds=round(seconds, 1))
    counts["errors"] += 1
    return Outcome(**counts, failures=[*failures, unexplained], seconds=round(seconds, 1))


def refusals(record: GpuTests) -> list[str]:
    """Return in sentences why a record must not be blessed; empty where it may."""
    sentences = [
        f"{name}: {outcome}; needs at least one passed and none failed"
        for name, outcome in (("tests", record.tests), ("benchmarks", record.benchmarks))
        if not outcome.green
    ]
    if device_of(dict(record.environment)) is None:
        sentences.append("it names no device")
    if record.dirty:
        sentences.append("made from a source tree with changes; commit and run again")
    elif record.environment.get("source_sha256") != digest_of_commit(record.commit):
        sentences.append(
            f"its source is not shown to be that of commit {record.commit}; bless it in a git "
            "checkout that has the commit"
        )
    return sentences


def bless_gpu_tests(record: GpuTests, expected: Path) -> Path:
    """Write a record to its place among the expectations; return the path.

    Raises
    ------
    BlessError
        If it does not qualify (`refusals`).
    """
    reasons = refusals(record)
    if reasons:
        more = f" (and {len(reasons) - 1} more reasons)" if len(reasons) > 1 else ""
        raise BlessError(f"GPU tests are not blessed: {reasons[0]}{more}")
    path = expected / "systems" / str(device_of(dict(record.environment))) / NAME
    record.write(path)
    return path


def blessed_gpu_tests(expected: Path) -> list[GpuTests]:
    """Return the blessed records, one per device, the latest first."""
    records = [read_gpu_tests(path) for path in sorted((expected / "systems").glob(f"*/{NAME}"))]
    return sorted(records, key=lambda record: record.date, reverse=True)


def stale_sentence(expected: Path, root: Path = PACKAGE.parent) -> str | None:
    """Return what is to be said where no blessed record is of the present source, else None.

    Parameters
    ----------
    root
        The checkout; an installed package, which has no tests, is never stale.
    """
    if not (root / "tests").is_dir():
        return None
    records = blessed_gpu_tests(expected)
    if not records:
        return f"No run of the GPU tests is on record: {HOW} writes one."
    if any(record.environment.get("source_sha256") == source_digest() for record in records):
        return None
    last, commit = records[0], records[0].commit[:_SHORT]
    return (
        f"GPU tests last passed at {commit} on {last.device} ({last.date[:10]}: {last.tests}); "
        f"the source is another since: git diff --stat {commit} -- kernels repro"
    )


HOW = "`nox -s gpu` on a machine with a CUDA GPU"


def gpu_tests_rows(expected: Path, root: Path = PACKAGE.parent) -> list[str]:
    """Return the block of pages about the GPU tests, as lines of Markdown.

    It changes with the first change of the source after a blessing and with the next blessing.
    """
    records = blessed_gpu_tests(expected)
    if not records:
        return [f"No run is on record yet: {HOW} writes one."]
    lines = [
        f"- `{record.commit[:_SHORT]}` on {record.device}, {record.date[:10]}: GPU tests "
        f"{record.tests}; benchmarks {record.benchmarks}."
        for record in records
    ]
    if stale_sentence(expected, root) is None:
        return [*lines, "- The source is that of the latest run."]
    return [*lines, "- **Older than the source**, which has changed since."]
