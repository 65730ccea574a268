"""The project's update beside what a user would otherwise run, on one card in one run.

`python -m benchmarks.peers` starts each way of each model in a process of its own, with the Python
of its environment, and writes what they measured into one JSON file; it goes on where it was
stopped. A way that cannot be run is written down with the reason. `--table FILE` prints a record as
Markdown; `--into PAGE` writes the blessed ones (`benchmarks/<device>/peers.json`) into a page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers import measured, table
from benchmarks.peers.rows import LENGTHS, MODELS, SAMPLED, UPDATES
from repro.evidence.environment import capture_environment
from repro.evidence.provenance import source_commit
from repro.spec.whole_files import replace_text

ROOT = Path(__file__).resolve().parents[2]
# What a peer needs beside torch, by way.
NEEDS: dict[str, tuple[str, ...]] = {
    "peft": ("transformers", "peft"),
    "peft_liger": ("transformers", "peft", "liger-kernel"),
    "peft_trl": ("transformers", "peft", "trl"),
    "qlora": ("transformers", "peft", "bitsandbytes"),
    "trl": ("transformers", "peft", "trl", "accelerate", "datasets"),
}
WAYS = (*table.OURS, *NEEDS)
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b")


def command_line() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--models", default="135m,0.5b,7b")
    parser.add_argument("--lengths", default=",".join(LENGTHS), help="those that a model has")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument(
        "--folder", action="append", default=[], metavar="MODEL=FOLDER",
        help="a checkpoint in place of random weights; whole steps need one",
    )  # fmt: skip
    parser.add_argument("--peers-python", default=sys.executable, help="of the peers' environment")
    parser.add_argument("--out", type=Path, default=Path("runs/peers.json"))
    parser.add_argument("--again", action="store_true", help="also what is in the file already")
    parser.add_argument(
        "--seconds-limit", type=float, default=0.0, help="stop whatever runs after so many seconds"
    )
    parser.add_argument("--table", type=Path, help="print this record as Markdown and do no more")
    parser.add_argument("--into", type=Path, help="write the blessed records into this page")
    measured.add_shared(parser)
    return parser


def applies(way: str, lengths: str, model: str) -> bool:
    """Whether a way is measured on a kind of lengths; the long rows are the largest model's."""
    if lengths == SAMPLED:
        return way in ("trl", *table.OURS) and model == "0.5b"
    return way != "trl" and (lengths != "long" or model == "7b")


def module_of(way: str) -> str:
    """Return the module that measures a way."""
    name = "ours" if way in table.OURS else "trl_step" if way == "trl" else "update"
    return f"benchmarks.peers.{name}"


def read_record(path: Path, device: str, driver: str | None) -> dict[str, Any]:
    """Return the record in a file, or an empty one.

    Raises
    ------
    SystemExit
        When it is of another device.
    """
    if not path.is_file():
        return {"device": device, "driver": driver, "entries": []}
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record["device"] != device:
        raise SystemExit(
            f"{path} is of {record['device']}; this is {device}: name another file by --out"
        )
    return record


def key(entry: table.Entry) -> tuple[str, str, str]:
    """Return what an entry is of."""
    return entry["model"], entry["lengths"], entry["way"]


def merge(record: dict[str, Any], entries: Sequence[dict[str, Any]]) -> None:
    """Put entries into a record in place of those of the same."""
    kept = {key(entry): entry for entry in record["entries"]}
    kept |= {key(entry): entry for entry in entries}
    record["entries"] = table.ordered(kept.values())


def missing_package(way: str, python: str) -> str | None:
    """Return why a way cannot be run for want of a package, or None."""
    names = NEEDS.get(way, ())
    program = (
        "import sys\nfrom importlib.metadata import distributions\n"
        "print(*(d.metadata['Name'].lower().replace('_', '-') for d in distributions()))"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    absent = [name for name in names if name not in done.stdout.split()]
    if not absent:
        return None
    return f"not run: {', '.join(absent)} is not installed in the peers' environment"


def run_way(command: list[str], seconds: float | None) -> str | None:
    """Run a way's process; return why it failed, or None. It is killed after so many seconds."""
    sentence = ""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        timer = threading.Timer(seconds or threading.TIMEOUT_MAX, process.kill)
        timer.daemon = True
        timer.start()
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            if _ERROR.match(line):
                sentence = line.strip()
        timer.cancel()
    if process.returncode == 0:
        return None
    return f"failed: {sentence or f'the process ended with status {process.returncode}'}"


class Driver:
    """Runs ways and keeps their record.

    Parameters
    ----------
    asked
        The command line.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.began = asked, time.monotonic()
        gpus = capture_environment()["gpu"] if asked.device != "cpu" else None
        first = gpus[0] if isinstance(gpus, list) and gpus else {}
        self.device = str(first.get("name", asked.device))
        self.record = read_record(asked.out, self.device, first.get("driver_version"))
        self.folders = dict(item.split("=", 1) for item in asked.folder)
        commit, dirty = source_commit()
        self.stamp = {"commit": commit, "dirty": dirty, "date": f"{datetime.date.today()}"}

    def run(self) -> bool:
        """Run what is missing; return whether all of it was tried."""
        for model in self.asked.models.split(","):
            for way in self.asked.ways.split(","):
                lengths = [
                    name
                    for name in self.asked.lengths.split(",")
                    if applies(way, name, model) and not self.done((model, name, way))
                ]
                # Whole steps have a process of their own: their engine holds memory.
                for kinds in (UPDATES, (SAMPLED,)):
                    together = [name for name in lengths if name in kinds]
                    if together and (self.late() or not self.measure(model, way, together)):
                        return False
        return True

    def left(self) -> float | None:
        """Return the seconds that are left, None without a limit."""
        limit = self.asked.seconds_limit
        return limit - (time.monotonic() - self.began) if limit else None

    def late(self) -> bool:
        """Whether the limit is over."""
        left = self.left()
        return left is not None and left <= 0

    def done(self, wanted: tuple[str, str, str]) -> bool:
        """Whether the record has a measurement by this commit."""
        return not self.asked.again and any(
            key(entry) == wanted
            and table.is_measured(entry)
            and entry["commit"] == self.stamp["commit"]
            for entry in self.record["entries"]
        )

    def measure(self, model: str, way: str, lengths: list[str]) -> bool:
        """Measure a way of a model on some lengths, and write the record.

        Returns
        -------
        bool
            False where the limit stopped it; what it had measured by then is kept.
        """
        ours = way in table.OURS
        python = sys.executable if ours else self.asked.peers_python
        folder = self.folders.get(model)
        failed = None if ours else missing_package(way, python)
        if lengths == [SAMPLED] and folder is None:
            failed = f"not run: whole steps need a checkpoint (--folder {model}=FOLDER)"
        entries: list[dict[str, Any]] = []
        if failed is None:
            with tempfile.TemporaryDirectory() as place:
                out = Path(place) / "entries.jsonl"
                command = [
                    python, "-m", module_of(way), "--model", model, "--way", way,
                    "--lengths", ",".join(lengths), "--out", str(out),
                    *measured.shared_flags(self.asked),
                    *(("--folder", str(Path(folder).resolve())) if folder else ()),
                ]  # fmt: skip
                failed = run_way(command, self.left())
                if out.is_file():
                    lines = out.read_text(encoding="utf-8").splitlines()
                    entries = [json.loads(line) for line in lines]
        stopped = failed is not None and self.late()
        if stopped:
            measured.say(f"{way}, {model}: stopped at the limit; run again for the rest")
        elif failed is not None:
            here = {entry["lengths"] for entry in entries}
            entries += [
                {"model": model, "lengths": name, "way": way, "failed": failed}
                for name in lengths
                if name not in here
            ]
        merge(self.record, [entry | self.stamp for entry in entries])
        self.asked.out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.asked.out, json.dumps(self.record, indent=1) + "\n")
        return not stopped


def show(record: dict[str, Any]) -> None:
    """Print a record as a table."""
    shown = Table(*table.HEAD, title=record["device"])
    for entry in record["entries"]:
        shown.add_row(*table.cells(entry, record["entries"]))
    Console(width=200).print(shown)


def main() -> int:
    """Run, or write what was run; return the exit status."""
    asked = command_line().parse_args()
    if asked.table is not None:
        print("\n".join(table.record_lines(json.loads(asked.table.read_text(encoding="utf-8")))))
        return 0
    if asked.into is not None:
        files = table.blessed_files(ROOT / "benchmarks")
        records = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        text = asked.into.read_text(encoding="utf-8")
        replace_text(asked.into, table.written_into(text, table.page_lines(records)))
        return 0
    unknown = {*asked.models.split(",")} - {*MODELS} | {*asked.ways.split(",")} - {*WAYS}
    unknown |= {*asked.lengths.split(",")} - {*LENGTHS}
    if unknown:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; see --help")
    driver = Driver(asked)
    whole = driver.run()
    show(driver.record)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
