"""How a way is asked for and timed, the same in both environments; needs torch alone.

A way is a process of its own. For each kind of lengths it makes one warm-up step and then timed
ones, each on rows that it has not met, with the device waited for at both ends; it appends an entry
to its file after each kind, so that what is done stays done when a later kind fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.step_rows import LENGTHS, MODELS, Sizes

RANDOM = "random, normal of standard deviation .02"


def arguments(description: str, ways: tuple[str, ...]) -> argparse.ArgumentParser:
    """Return the parser of a way's command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--way", choices=ways, required=True)
    parser.add_argument("--model", choices=tuple(MODELS), required=True)
    parser.add_argument("--lengths", default="spread", help=f"of {', '.join(LENGTHS)}, by commas")
    parser.add_argument("--folder", help="a checkpoint in place of random weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", required=True, help="JSON lines, an entry each")
    return add_flags(parser)


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what the command over all ways hands on to each; return the parser."""
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    for item in fields(Sizes):
        flag = f"--{item.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(item.default), default=item.default)
    parser.add_argument("--new-tokens", type=int, default=400, help="of a sampled completion")
    return parser


def sizes_asked(asked: argparse.Namespace) -> Sizes:
    """Return the sizes on a command line."""
    return Sizes(**{item.name: getattr(asked, item.name) for item in fields(Sizes)})


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return how long a work takes, the device waited for at both ends."""
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started


def time_steps(once: Callable[[int], float], asked: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of the steps that `once` makes, and the most memory in tensors."""
    device = torch.device(asked.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    for step in range(1, asked.steps + 1):
        seconds.append(once(step))
        say(f"{asked.way}, {asked.model}: step {step}: {seconds[-1]:.3f} s")
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"seconds": seconds, "median": statistics.median(seconds), "peak_bytes": peak}


def free_memory() -> None:
    """Give back what no tensor uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def append_entry(asked: argparse.Namespace, lengths: str, packages: tuple[str, ...],
                 entry: dict[str, Any]) -> None:  # fmt: skip
    """Append what was measured, with what it was measured of, to the way's file."""
    device = torch.device(asked.device)
    named = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    said = {
        "model": asked.model,
        "lengths": lengths,
        "way": asked.way,
        "device": named,
        "seed": asked.seed,
        "weights": Path(asked.folder).name if asked.folder else RANDOM,
        "dtype": asked.dtype,
        "packages": versions(packages),
    }
    with Path(asked.out).open("a", encoding="utf-8") as file:
        file.write(json.dumps(said | entry) + "\n")


def say(sentence: str) -> None:
    """Tell how far it has come."""
    print(sentence, file=sys.stderr, flush=True)


def versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    """Return the versions of Python and of packages; None for those that are not installed."""
    installed: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in packages:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = None
    return installed


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
