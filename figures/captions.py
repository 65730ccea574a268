"""Captions of pictures: seeds, device, commit, and how values were measured.

All of it is read from the records themselves: a record of another device, commit or length of
rollout says so in the caption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from repro.evidence.environment import device_of
from repro.evidence.origins import grouped_by, named_commits
from repro.evidence.record import Record
from repro.report.numbers import device_title


def origin(records: Sequence[Record]) -> str:
    """Return `5 seeds per arm on one NVIDIA H200, commit d42857b`."""
    arms = grouped_by(records, lambda record: (record.target, record.arm))
    numbers = sorted({len({record.seed for record in of}) for of in arms.values()})
    seeds = "1 seed" if numbers == [1] else f"{listed(numbers, ' to ')} seeds"
    devices = sorted({device_title(device_of(record.environment) or "") for record in records})
    commits = " and ".join(named_commits(records, 7))
    return f"{seeds} per arm on one {' and '.join(devices)}, commit {commits}"


def rollouts(records: Sequence[Record]) -> str:
    """Return how the rollouts of throughput records were sampled and timed, and the adapter."""
    every = (point for record in records for point in record.config["scale"]["points"])
    points = list({point["name"]: point for point in every}.values())
    timed = "timed whole"
    if any(point.get("windows", 0) for point in points):
        timed = "estimated from the prefill and windows of decode steps"
    prompts, tokens = _by_model(points, "prompt_tokens"), _by_model(points, "new_tokens")
    ranks = sorted({int(record.config["arm"]["lora_rank"]) for record in records})
    sampled = f"{tokens} new tokens per row after {prompts} of the prompt, {timed}"
    return f"{sampled}; random weights; LoRA of rank {listed(ranks)}"


def _by_model(points: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return `256`, or with other models' values behind the first's: `256 (192 at 14B, 32B)`."""
    by_value = grouped_by(points, lambda point: point[key])
    names = {of: ", ".join(p["name"].upper() for p in own) for of, own in by_value.items()}
    (usual, _), *others = names.items()
    named = "; ".join(f"{value} at {models}" for value, models in others)
    return f"{usual}" + (f" ({named})" if named else "")


def listed(values: Sequence[int], between: str = " or ") -> str:
    """Return the values as words; between ends, with ` to `, the first and the last alone."""
    ends = (values[0], values[-1]) if between == " to " and len(values) > 1 else values
    return between.join(f"{value}" for value in ends)
