"""Compare the project's update with the alternatives of a user, on one card in one run.

`python -m benchmarks.peers` starts each way of each model in a process of its own, with the Python
of its environment, and writes what they measured into one JSON file; it goes on where it was
stopped. A way that cannot be run is written down with the reason. Flags that are not its own go to
every way (`benchmarks.peers.harness`). `--into PAGE` writes the blessed records
(`benchmarks/<device>/peers.json`) into a page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import harness, peer_update, table
from benchmarks.peers.step_rows import LENGTHS, MODELS, SAMPLED, UPDATES
from repro.evidence.environment import capture_environment
from repro.evidence.provenance import source_commit
from repro.spec.whole_files import replace_text

ROOT = Path(__file__).resolve().parents[2]
WAYS = (*table.OURS, *peer_update.WAYS, "trl")
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
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/peers.json"))
    parser.add_argument("--again", action="store_true", help="also what is in the file already")
    parser.add_argument("--into", type=Path, help="write the blessed records into this page")
    return parser


def applies(way: str, lengths: str, model: str) -> bool:
    """Whether a way is measured on a kind of lengths; the long rows are the largest model's."""
    if lengths == SAMPLED:
        return way in ("trl", *table.OURS) and model == "0.5b"
    return way != "trl" and (lengths != "long" or model == "7b")


def module_of(way: str) -> str:
    """Return the module that measures a way."""
    name = "ours" if way in table.OURS else "trl_step" if way == "trl" else "peer_update"
    return f"benchmarks.peers.{name}"


def read_record(path: Path, device: str) -> dict[str, Any]:
    """Return the record in a file, or an empty one; exit where it is of another device."""
    gpus = capture_environment()["gpu"] if device != "cpu" else None
    first = gpus[0] if isinstance(gpus, list) and gpus else {}
    name = str(first.get("name", device))
    if not path.is_file():
        return {"device": name, "driver": first.get("driver_version"), "entries": []}
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record["device"] != name:
        raise SystemExit(
            f"{path} is of {record['device']}; this is {name}: name another file by --out"
        )
    return record


def key(entry: table.Entry) -> tuple[str, str, str]:
    """Return what an entry is of."""
    return entry["model"], entry["lengths"], entry["way"]


def run_way(command: list[str]) -> str | None:
    """Run a way's process; return why it failed, or None."""
    sentence = ""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            if _ERROR.match(line):
                sentence = line.strip()
    if process.returncode == 0:
        return None
    return f"failed: {sentence or f'the process ended with status {process.returncode}'}"


def measure(
    model: str, way: str, lengths: Sequence[str], asked: argparse.Namespace, more: list[str]
) -> list[dict[str, Any]]:
    """Return the entries of a way of a model on some lengths, measured or failed."""
    folder = dict(item.split("=", 1) for item in asked.folder).get(model)
    entries: list[dict[str, Any]] = []
    if SAMPLED in lengths and folder is None:
        failed: str | None = f"not run: whole steps need a checkpoint (--folder {model}=FOLDER)"
    else:
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / "entries.jsonl"
            python = sys.executable if way in table.OURS else asked.peers_python
            command = [
                python, "-m", module_of(way), "--model", model, "--way", way,
                "--lengths", ",".join(lengths), "--out", str(out), "--device", asked.device,
                *more, *(("--folder", str(Path(folder).resolve())) if folder else ()),
            ]  # fmt: skip
            failed = run_way(command)
            if out.is_file():
                lines = out.read_text(encoding="utf-8").splitlines()
                entries = [json.loads(line) for line in lines]
    done = {entry["lengths"] for entry in entries}
    return entries + [
        {"model": model, "lengths": name, "way": way, "failed": failed}
        for name in lengths
        if name not in done
    ]


def fill(record: dict[str, Any], asked: argparse.Namespace, more: list[str]) -> None:
    """Measure what a record lacks by this commit, and write it after each way."""
    commit, dirty = source_commit()
    stamp = {"commit": commit, "dirty": dirty, "date": f"{datetime.date.today()}"}
    entries = {key(entry): entry for entry in record["entries"]}
    known = {
        key(entry)
        for entry in record["entries"]
        if not asked.again and table.is_measured(entry) and entry["commit"] == commit
    }
    # Whole steps have a process of their own: their engine holds memory.
    for model, way, kinds in [
        (model, way, kinds)
        for model in asked.models.split(",")
        for way in asked.ways.split(",")
        for kinds in (UPDATES, (SAMPLED,))
    ]:
        lengths = [
            name
            for name in asked.lengths.split(",")
            if name in kinds and applies(way, name, model) and (model, name, way) not in known
        ]
        if lengths:
            made = measure(model, way, lengths, asked, more)
            entries |= {key(entry): entry | stamp for entry in made}
            record["entries"] = table.ordered(entries.values())
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            replace_text(asked.out, json.dumps(record, indent=1) + "\n")


def main() -> int:
    """Run, or write what was run; return the exit status."""
    asked, more = command_line().parse_known_args()
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
    harness.add_flags(argparse.ArgumentParser(prog="peers")).parse_args(more)
    record = read_record(asked.out, asked.device)
    fill(record, asked, more)
    print("\n".join(table.record_lines(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
