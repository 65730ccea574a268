"""How large a measurement of rollout throughput is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from repro.spec.config import require, require_choice

Check = Literal["sharing", "long_tail", "parity", "trained_parity", "float8", "noise", "faults"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputPoint:
    """One model shape and the batches it is sampled at.

    Attributes
    ----------
    name
        In the names of metrics: "7b".
    shape
        A name of `repro.models.shapes`.
    prompt_tokens, new_tokens
        Of every row; rows end at their limit alone.
    batches
        Rows sampled at once.
    repeats
        How many seeds, from 0, time this point; 0 takes all. Rollouts of 2,048 tokens on large
        models take half a minute each, so not every seed repeats them.
    """

    name: str
    shape: str
    prompt_tokens: int = 256
    new_tokens: int = 256
    batches: tuple[int, ...] = (1, 8, 64, 256)
    repeats: int = 0

    def __post_init__(self) -> None:
        require(
            bool(self.batches) and self.prompt_tokens >= 1 and self.new_tokens >= 1,
            f"throughput point {self.name}: it needs batches, prompt tokens and new tokens",
        )
        require(
            self.repeats >= 0,
            f"throughput point {self.name}: repeats is {self.repeats}; it must not be negative",
        )

    def timed_by(self, seed: int) -> bool:
        """Whether the run of `seed` times this point."""
        return self.repeats == 0 or seed < self.repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputScale:
    """Points, and what else is measured on the model of the first one.

    Attributes
    ----------
    points
        Neighbours of one shape share a loaded model.
    checks
        (what, repeats): seeds from 0 to repeats - 1 make each check. See
        `repro.procedures.rollout_checks`.
    bitsandbytes
        Names of arms whose NF4 products are bitsandbytes' own, in the same engine.
    """

    points: tuple[ThroughputPoint, ...]
    checks: tuple[tuple[Check, int], ...] = ()
    bitsandbytes: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    def __post_init__(self) -> None:
        names = [point.name for point in self.points]
        require(
            bool(names) and len(set(names)) == len(names),
            f"throughput points need names of their own; found {names}",
        )
        for what, repeats in self.checks:
            require_choice("throughput check", what, Check)
            require(repeats >= 1, f"check {what}: repeats is {repeats}; it must be 1 or more")
