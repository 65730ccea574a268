"""How large a measurement of rollout throughput is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from repro.spec.checks import Count, Natural, check_fields, require
from repro.spec.config import Seeds
from repro.spec.settings import OMIT_AT_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputPoint:
    """One model shape and the batches it is sampled at.

    Attributes
    ----------
    name
        In the names of metrics: "7b".
    shape
        A name of `repro.models.random_policy`.
    prompt_tokens, new_tokens
        Of every row; rows end at their limit alone.
    batches
        Rows sampled at once.
    windows, window_steps
        In how many equal stretches the decode steps are cut, and how many steps in the middle of
        each are timed: the rollout's time is their sum (`repro.measure.rollout_cells`). 0
        rolls out whole.
    """

    name: str
    shape: str
    prompt_tokens: Count = 256
    new_tokens: Count = 256
    batches: tuple[Count, ...] = (1, 8, 64, 256)
    windows: Natural = field(default=0, metadata=OMIT_AT_DEFAULT)
    window_steps: Count = field(default=16, metadata=OMIT_AT_DEFAULT)

    RETIRED: ClassVar = {"repeats": 0}

    def __post_init__(self) -> None:
        check_fields(self, f"throughput point {self.name}: ")
        require(bool(self.batches), f"throughput point {self.name}: it needs batches")
        steps = self.new_tokens - 1
        require(
            self.windows * (self.window_steps + 1) <= steps,
            f"throughput point {self.name}: {self.windows} windows of {self.window_steps} steps, "
            f"and one untimed in each, do not fit {steps} steps",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputScale:
    """Points, and which of their cells are measured in a second way.

    Attributes
    ----------
    points
        Neighbours of one shape share a loaded model.
    bitsandbytes
        Names of arms whose NF4 products are bitsandbytes' own, in the same engine.
    vllm
        Names of arms that vLLM's own engine rolls out, with its kernels: whole, at one point.
    fp8
        Of those, names of arms whose 16-bit weights vLLM rounds to FP8 itself.
    whole
        (arm, point, batch): cells timed by windows that seed 0 also rolls out whole, which shows
        what the windows are worth.
    """

    points: tuple[ThroughputPoint, ...]
    bitsandbytes: tuple[str, ...] = ()
    whole: tuple[tuple[str, str, Count], ...] = field(default=(), metadata=OMIT_AT_DEFAULT)
    vllm: tuple[str, ...] = field(default=(), metadata=OMIT_AT_DEFAULT)
    fp8: tuple[str, ...] = field(default=(), metadata=OMIT_AT_DEFAULT)
    seeds: Seeds = (0, 1, 2, 3, 4)

    RETIRED: ClassVar = {"checks": ()}

    def __post_init__(self) -> None:
        check_fields(self)
        names = [point.name for point in self.points]
        require(
            bool(names) and len(set(names)) == len(names),
            f"throughput points need names of their own; found {names}",
        )
        windowed = {
            (point.name, batch) for point in self.points for batch in point.batches if point.windows
        }
        for arm, name, batch in self.whole:
            require(
                (name, batch) in windowed,
                f"{arm} must be rolled out whole at point {name}, batch {batch}, beside "
                "its windows; there is no such cell timed by windows",
            )

    def products(self, arm: str) -> Literal["own", "bitsandbytes", "vllm"]:
        """Return whose kernels multiply by an arm's 4-bit weights."""
        if arm in self.vllm:
            return "vllm"
        return "bitsandbytes" if arm in self.bitsandbytes else "own"
