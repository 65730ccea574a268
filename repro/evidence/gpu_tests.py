"""The record of the GPU tests: how a whole run of them ended, on which device, over which files.

Most machines that change this source have no GPU, and there every GPU test skips: green says
nothing about the kernels. So a run on a GPU (`nox -s gpu`) leaves a record, the record is blessed
to `expected/systems/<device>/gpu_tests.json`, and every later test run, on any machine, says in a
sentence which of the files that it covers have changed since.

Which files it covers, `repro.evidence.gpu_coverage` says. Digests are stored for each of them: one
for all would say that something changed, but not what.

Easy to get wrong: a process that dies (a spoilt context, a kill) leaves no results at all, and no
results are no failures. `read_outcome` counts that, and any exit status that the results do not
explain, as an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from repro.evidence.bless import BlessError
from repro.evidence.environment import device_of
from repro.evidence.gpu_coverage import covered_files, digest_of_content
from repro.evidence.provenance import PACKAGE, files_of_commit, is_commit
from repro.evidence.record import RecordError
from repro.spec.whole_files import replace_text

SCHEMA = 1
NAME = "gpu_tests.json"
_SHORT = 7
_NAMED = 5
# Exit statuses of pytest that its results explain: all passed, some failed.
_EXPLAINED = (0, 1)


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
    skips
        Names of the skipped tests by the reason given.
    seconds
        Duration of the whole process.
    """

    passed: int
    failed: int
    errors: int
    skipped: int
    failures: Sequence[str] = ()
    skips: Mapping[str, Sequence[str]] = field(default_factory=dict)
    seconds: float

    @property
    def green(self) -> bool:
        """Whether something passed and nothing else happened but skips."""
        return self.passed > 0 and self.failed == 0 and self.errors == 0

    def __add__(self, other: Outcome) -> Outcome:
        """Return how two starts ended together."""
        reasons = dict.fromkeys([*self.skips, *other.skips])
        return Outcome(
            passed=self.passed + other.passed,
            failed=self.failed + other.failed,
            errors=self.errors + other.errors,
            skipped=self.skipped + other.skipped,
            failures=[*self.failures, *other.failures],
            skips={
                reason: [*self.skips.get(reason, ()), *other.skips.get(reason, ())]
                for reason in reasons
            },
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
        As in `repro.evidence.record.Record`.
    date
        ISO 8601, UTC.
    tests, benchmarks
        How each of the two ended.
    files
        The first 12 hexadecimal digits of the SHA-256 of each covered file, by its path.
    """

    schema: int = SCHEMA
    commit: str
    dirty: bool | None
    date: str
    environment: Mapping[str, Any]
    tests: Outcome
    benchmarks: Outcome
    files: Mapping[str, str]

    @property
    def green(self) -> bool:
        """Whether tests and benchmarks both are."""
        return self.tests.green and self.benchmarks.green

    @property
    def device(self) -> str | None:
        """The device's name as the driver has it, or None."""
        gpus = self.environment.get("gpu")
        return str(gpus[0]["name"]) if isinstance(gpus, list) and gpus else None

    @property
    def source_sha256(self) -> str:
        """SHA-256 over the names and digests of the covered files."""
        lines = (f"{name}\0{digest}\n" for name, digest in sorted(self.files.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Write the record, replacing what is there: it tells of the latest run."""
        raw = dataclasses.asdict(self) | {"source_sha256": self.source_sha256}
        replace_text(path, json.dumps(raw, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_gpu_tests(path: Path) -> GpuTests:
    """Return the record in a file.

    Raises
    ------
    RecordError
        If it cannot be read, is of another schema, lacks a field or has one too many, or if its
        source digest is not that of its own files.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("schema") != SCHEMA:
            raise RecordError(f"{path}: schema is {raw.get('schema')!r}; needs {SCHEMA}")
        digest = raw.pop("source_sha256")
        raw |= {name: Outcome(**raw[name]) for name in ("tests", "benchmarks")}
        record = GpuTests(**raw)
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise RecordError(
            f"{path} is no record of GPU tests: {type(error).__name__}: {error}"
        ) from error
    if record.source_sha256 != digest:
        raise RecordError(f"{path}: source_sha256 is not that of its files; it was edited")
    return record


def read_outcome(junit: Path, status: int, seconds: float) -> Outcome:
    """Return how a start of pytest ended, from the JUnit file it wrote (family `xunit1`).

    Parameters
    ----------
    status
        Exit status of the process; negative for a signal.
    seconds
        Its duration.
    """
    outcome = _counted(_cases(junit), seconds)
    unexplained = _unexplained(status, junit.is_file(), bool(outcome.failures))
    if unexplained is None:
        return outcome
    return dataclasses.replace(
        outcome, errors=outcome.errors + 1, failures=[*outcome.failures, unexplained]
    )


def outcomes_by_file(junit: Path, whole: Outcome) -> dict[str, Outcome]:
    """Return how the tests of each file ended, of a start whose every test is accounted for.

    Parameters
    ----------
    whole
        How the start ended, by `read_outcome`. Where it has an error without a file (a process that
        died, an exit status that nothing explains), nothing is returned: tests may be missing.
    """
    cases: dict[str, list[ElementTree.Element]] = {}
    for case in _cases(junit):
        cases.setdefault(case.get("file", ""), []).append(case)
    outcomes = {name: _counted(of_file, 0.0) for name, of_file in cases.items() if name}
    accounted = sum(len(outcome.failures) for outcome in outcomes.values())
    if accounted != len(whole.failures):
        return {}
    spent = {name: sum(float(case.get("time", 0)) for case in cases[name]) for name in outcomes}
    total = sum(spent.values()) or 1.0
    return {
        name: dataclasses.replace(outcome, seconds=round(whole.seconds * spent[name] / total, 1))
        for name, outcome in outcomes.items()
    }


def _counted(cases: Iterable[ElementTree.Element], seconds: float) -> Outcome:
    counts = dict.fromkeys(("passed", "failed", "errors", "skipped"), 0)
    failures: list[str] = []
    skips: dict[str, list[str]] = {}
    for case in cases:
        ending, reason = _ending(case)
        counts[ending] += 1
        if ending == "skipped":
            skips.setdefault(reason, []).append(_name(case))
        elif ending != "passed":
            failures.append(_name(case))
    return Outcome(**counts, failures=failures, skips=skips, seconds=round(seconds, 1))


def _cases(junit: Path) -> Iterator[ElementTree.Element]:
    if junit.is_file():
        yield from ElementTree.parse(junit).iter("testcase")


def _ending(case: ElementTree.Element) -> tuple[str, str]:
    for tag, ending in (("error", "errors"), ("failure", "failed"), ("skipped", "skipped")):
        element = case.find(tag)
        if element is not None:
            return ending, element.get("message", "")
    return "passed", ""


def _name(case: ElementTree.Element) -> str:
    place = case.get("file") or case.get("classname")
    name = case.get("name", "")
    return f"{place}::{name}" if place else name


def _unexplained(status: int, results: bool, failures: bool) -> str | None:
    """Return a sentence where the exit status says more than the results do, else None."""
    if not results:
        return f"pytest ended with status {status} and left no results"
    if status not in _EXPLAINED or bool(status) != failures:
        return f"pytest ended with status {status}, which its results do not explain"
    return None


def changed_files(record: GpuTests, root: Path) -> list[str]:
    """Return the covered files that differ from the record's: changed, new or gone; sorted."""
    current = covered_files(root)
    for name in record.files.keys() - current.keys():
        # No longer covered (a test may have lost its mark), yet of the run: it counts as it is.
        if (root / name).is_file():
            current[name] = digest_of_content((root / name).read_bytes())
    names = record.files.keys() | current.keys()
    return sorted(name for name in names if record.files.get(name) != current.get(name))


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
    elif not _is_of_its_commit(record):
        sentences.append(
            f"its files are not shown to be those of commit {record.commit}; bless it in a git "
            "checkout that has the commit"
        )
    return sentences


def _is_of_its_commit(record: GpuTests) -> bool:
    """Whether git says so, or did when the tests ran and cannot be asked here."""
    committed = files_of_commit(record.commit, sorted(record.files))
    if committed is None:
        return record.dirty is False and is_commit(record.commit)
    return {name: digest_of_content(content) for name, content in committed.items()} == dict(
        record.files
    )


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
    """Return what is to be said where no blessed record is of the present files, else None.

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
    changes = [changed_files(record, root) for record in records]
    if not all(changes):
        return None
    names = ", ".join(changes[0][:_NAMED])
    more = f" and {len(changes[0]) - _NAMED} more" if len(changes[0]) > _NAMED else ""
    files = "1 file they cover" if len(changes[0]) == 1 else f"{len(changes[0])} files they cover"
    return f"GPU tests last passed {_origin(records[0])}; {files} changed since: {names}{more}"


HOW = "`nox -s gpu` on a machine with a CUDA GPU"


def _origin(record: GpuTests) -> str:
    return (
        f"at {record.commit[:_SHORT]} on {record.device} ({record.date[:10]}: "
        f"{record.tests.passed} passed, {record.tests.failed} failed)"
    )
