"""The block of `docs/ci.md` about the GPU tests."""

from __future__ import annotations

from pathlib import Path

from repro.evidence.gpu_tests import HOW, blessed_gpu_tests, stale_sentence
from repro.evidence.provenance import PACKAGE


def gpu_tests_rows(expected: Path, root: Path = PACKAGE.parent) -> list[str]:
    """Return the block of `docs/ci.md` about the GPU tests, as lines of Markdown.

    Whether the record is older than the files it covers is said here by yes or no alone: the block
    changes with the first change after a blessing and with the next blessing, and no edit between
    them asks for a new page. Which files changed, the end of `nox -s tests` says.
    """
    records = blessed_gpu_tests(expected)
    if not records:
        return [f"No run is on record yet: {HOW} writes one."]
    current = stale_sentence(expected, root) is None
    return [
        *(
            f"- `{record.commit[:7]}` on {record.device}, {record.date[:10]}: GPU tests "
            f"{record.tests}; benchmarks {record.benchmarks}."
            for record in records
        ),
        "- The source is that of the latest run."
        if current
        else "- **Older than the source**: covered files changed since.",
    ]
