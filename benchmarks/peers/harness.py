"""How a way is started, timed and written down, the same in all environments; needs torch alone.

A row is a process of its own: `python -m benchmarks.peers.<module> FILE`, where FILE holds what is
requested (`benchmarks.peers.sweep.Row`, and sizes) and where its entry goes. An update makes a
warm-up and then timed steps, each on rows that it has not met; a whole step is timed from the end
of the step before, warm-up left out, with the device waited for at both ends.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RANK, ALPHA = 32, 32
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Whole steps before the clock.
WARM_UP = 3
# Of the host's. Rows are small tensors there: BF16's step took 0.8 s more with 32 than with these.
THREADS = 4
# A completion's answer, and the number in it.
_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?|-?\.\d+")
# What a whole step's seconds are made of; `sync` is a part of `rollout`.
PHASES = ("rollout", "sync", "score", "update")


def adapter_settings() -> Any:
    """Return peft's settings of the adapter that every way trains."""
    from peft import LoraConfig

    modules = list(PROJECTIONS)
    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules, task_type="CAUSAL_LM")


def requested() -> Namespace:
    """Return what the file on the command line requests."""
    return Namespace(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


def json_lines(file: str) -> list[Any]:
    """Return the values of a file of JSON lines."""
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def by_turns(count: int) -> torch.Tensor:
    """Return (count,) advantages, -1 and 1 by turns, so that no row is idle."""
    return 2.0 * (torch.arange(count) % 2) - 1.0


def now(device: torch.device) -> float:
    """Return the time, the device waited for."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def time_steps(
    prepared: Callable[[int], Callable[[], object]],
    asked: Namespace,
    steps: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the seconds of updates, the device waited for, and the most memory in tensors.

    `steps` are their rows, of which `prepared` gives a step's work; the first warms up and is not
    timed.
    """
    device = torch.device(asked.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    for step in range(1, len(steps)):
        work, started = prepared(step), now(device)
        work()
        seconds.append(now(device) - started)
        say(f"{asked.way}, {asked.model}: step {step}: {seconds[-1]:.3f} s")
    return {
        "seconds": seconds,
        "median": statistics.median(seconds),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "completion_tokens": [sum(map(len, rows["completions"])) for rows in steps[1:]],
    }


def whole_steps(
    steps: Sequence[Mapping[str, float]], began: float, ended: Sequence[float]
) -> dict[str, Any]:
    """Return the entry of whole steps: of each, `total`, `PHASES`, `tokens` and mean `reward`.

    `began` and `ended` are seconds since the epoch, of the first step's beginning and every end.
    """
    left_out = min(WARM_UP, len(steps) - 1)
    timed = steps[left_out:]
    return {
        "seconds": [step["total"] for step in timed],
        "median": statistics.median(step["total"] for step in timed),
        **{f"{phase}_seconds": [step[phase] for step in timed] for phase in PHASES},
        "completion_tokens": [int(step["tokens"]) for step in timed],
        "rewards": [step["reward"] for step in steps],
        "began": began,
        "timed_between": [ended[left_out - 1] if left_out else began, ended[-1]],
    }


def write_entry(asked: Namespace, packages: tuple[str, ...], entry: dict[str, Any]) -> None:
    """Write what was measured, with what it was measured of."""
    device = torch.device(asked.device)
    said = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "seed": asked.seed,
        "weights": Path(asked.folder).name,
        "dtype": asked.dtype,
        "packages": versions(packages),
    }
    made = Path(f"{asked.out}.new")
    made.write_text(json.dumps(said | entry), encoding="utf-8")
    made.replace(asked.out)


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


def in_turn(completions: Sequence[Any], **unused: Any) -> list[float]:
    """Pay every second completion, whatever it says."""
    return [float(place % 2) for place in range(len(completions))]


def boxed(completions: Sequence[Any], answers: Sequence[str], **unused: Any) -> list[float]:
    """Pay a completion, a text or messages, whose last box holds the gold number."""
    texts = [said if isinstance(said, str) else said[-1]["content"] for said in completions]
    return [float(_is_right(text, gold)) for text, gold in zip(texts, answers, strict=True)]


def _is_right(text: str, gold: str) -> bool:
    boxes = _BOX.findall(text) or [""]
    return abs(_number(boxes[-1]) - _number(gold.rpartition("####")[2])) < 1e-4


def _number(text: str) -> float:
    return float((_NUMBER.findall(text.replace(",", "").replace("\\!", "")) or ["nan"])[-1])
