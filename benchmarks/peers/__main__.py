"""Race the project against what a user would run instead, on one card in one sitting.

`python -m benchmarks.peers` runs each row (`benchmarks.peers.sweep`) in a process of its own, with
the Python of its environment, and writes what was measured into one JSON file after each; it goes
on where it was stopped. A row that cannot be run is written down with the reason; of steps that are
cut off after `--seconds`, those made count. `--into PAGE` writes the blessed records
(`benchmarks/<device>/peers.json`) into a page. Whole steps need `--folder 0.5b=FOLDER`, and for 7B
`--folder 7b=RANDOM`, of random weights: `python -m benchmarks.peers.workloads 7b FOLDER RANDOM
cuda` makes them with the tokenizer of FOLDER.

Peers run from a folder that holds `benchmarks` alone: from this checkout's root they would take
`kernels` and `repro` for packages of theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

from benchmarks.peers import sweep, table, workloads
from benchmarks.peers.sweep import Row
from repro.evidence.environment import capture_environment
from repro.evidence.provenance import source_commit
from repro.spec.whole_files import replace_text

ROOT = Path(__file__).resolve().parents[2]
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b")
_OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory", re.IGNORECASE)
_MEMORY = ("nvidia-smi", "--query-gpu=timestamp,memory.used", "--format=csv,noheader,nounits")
# Nothing looks for a network; adapters are small, and Unsloth counts its users by a download.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "UNSLOTH_VLLM_NO_FLASHINFER": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}


def command_line() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--models", default="0.5b,7b", help="of which --folder names checkpoints")
    parser.add_argument("--workloads", default=",".join(sweep.WORKLOADS), help="that a model has")
    parser.add_argument("--ways", default=",".join(sweep.WAYS), help="peers and this project's own")
    parser.add_argument("--sweep", type=int, default=9, help="settings that are tried, at most")
    parser.add_argument("--folder", action="append", default=[], metavar="MODEL=FOLDER")
    parser.add_argument("--data", default="gsm8k", help="questions, as `train` takes them")
    other = "of the environment trl or unsloth; without it, this Python"
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PYTHON", help=other)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/peers.json"))
    parser.add_argument("--seconds", type=float, default=3600.0, help="that a row may take")
    parser.add_argument("--plan", action="store_true", help="name what is left, and run nothing")
    parser.add_argument("--again", action="store_true", help="also what failed before")
    parser.add_argument("--into", type=Path, help="write the blessed records into this page")
    return parser


@contextlib.contextmanager
def driver_memory(out: Path) -> Iterator[None]:
    """Let the driver's tool write the memory in use on the card, five times a second."""
    process, card = None, os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with contextlib.suppress(FileNotFoundError), out.open("w") as file:
        process = Popen([*_MEMORY, "-lms", "200", "--id", card], stdout=file, stderr=file)
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def most_bytes(lines: Iterable[str], began: float, ended: float) -> int | None:
    """Return the most memory between two times in seconds since the epoch, where any is known.

    Lines read `2026/11/28 17:55:01.123, 27340`, in MiB, in the machine's own time.
    """
    most = None
    for line in lines:
        stamp, _, mebibytes = line.partition(", ")
        with contextlib.suppress(ValueError):
            at = datetime.datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            if began <= at <= ended:
                most = max(most or 0, int(mebibytes) * 2**20)
    return most


class Race:
    """What one command measures into a record."""

    def __init__(self, asked: argparse.Namespace, record: dict[str, Any]) -> None:
        self.asked, self.record = asked, record
        self.folders = dict(item.split("=", 1) for item in asked.folder)
        self.pythons = dict(item.split("=", 1) for item in asked.python)
        commit, dirty = source_commit()
        self.stamp = {"commit": commit, "dirty": dirty, "date": f"{datetime.date.today()}"}

    def left(self) -> Iterator[Row]:
        """Yield the rows that this commit has not run yet; entries may be added meanwhile."""
        asked = self.asked
        for model, lengths, way in itertools.product(
            asked.models.split(","), asked.workloads.split(","), asked.ways.split(",")
        ):
            if sweep.applies(way, lengths, model):
                named = (way, lengths, model, asked.sweep)
                yield from filter(self._lacks, sweep.trials(*named))
                yield from filter(self._lacks, sweep.counting(*named, self.record["entries"]))

    def _lacks(self, row: Row) -> bool:
        key, commit = sweep.key_of(dataclasses.asdict(row)), self.stamp["commit"]
        return not any(
            sweep.key_of(entry) == key and entry["commit"] == commit
            for entry in self.record["entries"]
            if not (self.asked.again and "failed" in entry)
            if not entry.get("failed", "").startswith("not run")
        )

    def run(self) -> None:
        """Run what is left, and write the record after each row."""
        for row in self.left():
            kind = "trial of " * row.trial
            print(f"{kind}{row.way}, {row.lengths}, {row.terms}, {row.settings}", flush=True)
            planned = self.asked.plan
            measured = {"failed": "only planned"} if planned else self._measured(row)
            entry = dataclasses.asdict(row) | measured | self.stamp
            key = sweep.key_of(entry)
            kept = [e for e in self.record["entries"] if sweep.key_of(e) != key]
            self.record["entries"] = [*kept, entry]
            if not planned:
                self.asked.out.parent.mkdir(parents=True, exist_ok=True)
                replace_text(self.asked.out, json.dumps(self.record, indent=1) + "\n")

    def _measured(self, row: Row) -> dict[str, Any]:
        """Return a row's entry, with fewer rows of a micro-batch where memory does not suffice."""
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            (place / "benchmarks").symlink_to(ROOT / "benchmarks")
            try:
                request = self._request(row, place)
            except ValueError as error:
                return {"failed": f"not run: {error}"}
            while True:
                entry = self._process(row, request, place)
                rows = request["settings"].get("rows", 1)
                if rows == 1 or not _OUT_OF_MEMORY.search(entry.get("failed", "")):
                    return entry
                request["settings"] = {**request["settings"], "rows": rows // 2}

    def _request(self, row: Row, place: Path) -> dict[str, Any]:
        """Return what a row's process reads, and write what it needs; `ValueError` if it cannot."""
        asked, whole, model = self.asked, row.whole, row.model
        if model not in self.folders:
            raise ValueError(f"it needs a checkpoint (--folder {model}=FOLDER)")
        folder = Path(self.folders[model]).resolve()
        request = dataclasses.asdict(row) | {
            "device": asked.device,
            "dtype": "float32" if asked.device == "cpu" else "bfloat16",
            "folder": str(folder),
            "out": str(place / "entry.json"),
            "sampled": whole is not None,
            "seed": 0,
        }
        if whole is None:
            return request | workloads.write_rows(model, row.lengths, 1 + row.steps, folder, place)
        request |= dataclasses.asdict(whole) | {"steps": row.steps}
        # Room for what a tool may add to a prompt.
        request["model_tokens"] = whole.prompt_tokens + whole.new_tokens + 64
        return request | workloads.write_questions(request, asked.data, place)

    def _process(self, row: Row, request: dict[str, Any], place: Path) -> dict[str, Any]:
        """Run a row's process; return its entry, or why it failed."""
        own = row.way in sweep.OURS
        out = Path(request["out"])
        out.unlink(missing_ok=True)
        (place / "request.json").write_text(json.dumps(request), encoding="utf-8")
        peers = "unsloth" if row.way.startswith("unsloth") else "trl"
        python = sys.executable if own else self.pythons.get(peers, sys.executable)
        command = [python, "-m", f"benchmarks.peers.{row.module}", str(place / "request.json")]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | _OFFLINE
        started = time.time()
        with driver_memory(place / "memory"):
            sentence = followed(command, ROOT if own else place, environment, self.asked.seconds)
        if sentence is not None or not out.exists():
            return {"failed": sentence or "it ended without an entry"}
        entry: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        if "began" in entry:
            read = (place / "memory").read_text().splitlines()
            entry["driver_bytes"] = most_bytes(read, *entry.pop("timed_between"))
            entry["start_seconds"] = entry.pop("began") - started
            if (made := len(entry["rewards"])) < row.steps:
                entry["note"] = f"cut off after step {made} of {row.steps}"
        return entry


def followed(
    command: list[str], place: Path, environment: dict[str, str], seconds: float
) -> str | None:
    """Show what a process says until it ends, or is killed after `seconds`.

    Returns the last error's sentence, if it failed by itself.
    """
    sentence = ""
    given: dict[str, Any] = {"text": True, "errors": "replace", "process_group": 0}
    with Popen(command, cwd=place, env=environment, stdout=PIPE, stderr=STDOUT, **given) as process:
        began = time.monotonic()
        end = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        end.start()
        try:
            for line in process.stdout or ():
                sys.stderr.write(line)
                sentence = line.strip() if _ERROR.match(line) else sentence
            process.wait()
        finally:
            end.cancel()
            # Also what a tool leaves running, and everything when this command is interrupted.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    cut_off = process.returncode == -signal.SIGKILL and time.monotonic() - began >= seconds
    if process.returncode == 0 or cut_off:
        return None
    return f"failed: {sentence or f'the process ended with status {process.returncode}'}"


def read_or_begin(path: Path, device: str) -> dict[str, Any]:
    """Return the record in a file, or an empty one; exit where it is of another device."""
    gpus = capture_environment()["gpu"] if device != "cpu" else None
    first = gpus[0] if isinstance(gpus, list) and gpus else {}
    name = str(first.get("name", device))
    if not path.is_file():
        return {"device": name, "driver": first.get("driver_version"), "entries": []}
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record["device"] != name:
        raise SystemExit(f"{path} is of {record['device']}; this is {name}: name another by --out")
    return record


def main() -> int:
    """Run, or write what was run; return the exit status, 1 where every row has failed."""
    asked = command_line().parse_args()
    if asked.into is not None:
        page = asked.into.read_text(encoding="utf-8")
        replace_text(asked.into, table.renewed(page, ROOT / "benchmarks"))
        return 0
    known = {"models": workloads.MODELS, "workloads": sweep.WORKLOADS, "ways": sweep.WAYS}
    for name, values in known.items():
        unknown = set(getattr(asked, name).split(",")) - set(values)
        if unknown:
            raise SystemExit(f"--{name} {', '.join(unknown)}: needs {', '.join(values)}")
    race = Race(asked, read_or_begin(asked.out, asked.device))
    race.run()
    if asked.plan:
        return 0
    print("\n".join(table.record_lines(race.record)))
    return int(all("failed" in entry for entry in race.record["entries"]))


if __name__ == "__main__":
    # As Ctrl-C does, so that a row's process ends with this one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
