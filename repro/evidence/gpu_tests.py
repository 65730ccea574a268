"""How the GPU tests ended on each kind of device: JUnit files of `nox -s gpu-tests`, summed up.

`python -m repro.evidence.gpu_tests FOLDER` writes `FOLDER/gpu_tests.json`, which is kept as
`expected/systems/<device>/gpu_tests.json`. A process that died leaves no JUnit file, and no results
are no failures: a file that is missing counts as one.
"""

from __future__ import annotations

import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from repro.evidence.environment import ask_driver_tool, package_versions
from repro.evidence.provenance import source_commit
from repro.spec.whole_files import replace_text

NAME = "gpu_tests.json"
# Starts of pytest, in order, and what each is counted as.
STARTS = {"alone": "tests", "together": "tests", "benchmarks": "benchmarks"}
# Packages whose versions stand in the record, beside Python's.
NAMED = ("torch", "triton", "transformers")


def summary(folder: Path) -> dict[str, Any]:
    """Return commit, device, versions, counts and names of failed tests of a folder's files."""
    commit, dirty = source_commit()
    counts: dict[str, dict[str, int]] = {}
    failed = []
    for start, kind in STARTS.items():
        count = counts.setdefault(kind, dict.fromkeys(("passed", "failed", "skipped"), 0))
        junit = folder / f"{start}.xml"
        if not junit.is_file():
            count["failed"] += 1
            failed.append(f"{start}: pytest left no results")
            continue
        for case in ElementTree.parse(junit).iter("testcase"):
            endings = {child.tag for child in case}
            lost = bool(endings & {"failure", "error"})
            count["failed" if lost else "skipped" if "skipped" in endings else "passed"] += 1
            failed += [f"{case.get('classname')}::{case.get('name')}"] * lost
    try:
        device = ask_driver_tool(["name"])[0]["name"]
    except FileNotFoundError:
        raise SystemExit("gpu_tests: the device's name needs nvidia-smi; there is none") from None
    date = datetime.now(UTC).date().isoformat()
    installed = package_versions()
    versions = {"python": platform.python_version()} | {name: installed[name] for name in NAMED}
    head = {"commit": commit, "dirty": dirty, "date": date, "device": device, "versions": versions}
    return head | counts | {"failed": failed}


def gpu_tests_rows(expected: Path) -> list[str]:
    """Return the block of pages about the GPU tests, a line of Markdown per kind of device."""
    paths = sorted((expected / "systems").glob(f"*/{NAME}"))
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    rows = []
    for record in sorted(records, key=lambda record: record["date"], reverse=True):
        # A record from before versions were noted has none.
        versions = [f"{name} {value}" for name, value in record.get("versions", {}).items()]
        rows.append(
            f"- `{record['commit'][:7]}` on {record['device']}, {record['date']}: "
            f"GPU tests {_counted(record['tests'])}; benchmarks {_counted(record['benchmarks'])}"
            f"{'; ' if versions else ''}{', '.join(versions)}."
        )
    return rows


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[ending]} {ending}" for ending in ("passed", "failed", "skipped"))


def main(folder: Path) -> int:
    """Write the summary next to the JUnit files; return 0 if all tests passed, else 1."""
    record = summary(folder)
    replace_text(folder / NAME, json.dumps(record, indent=1) + "\n")
    sys.stdout.write(json.dumps(record, indent=1) + "\n")
    return 1 if record["failed"] or not record["tests"]["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
