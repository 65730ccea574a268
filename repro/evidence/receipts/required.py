"""A check: one thing that a record must show, as a value that a walk can apply.

Numbers are compared to five significant digits: blessing rounds series to six, and a mean of
rounded numbers is not the rounded mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from repro.evidence.record import Record
from repro.spec.arm import (
    Arm,
    LossConfig,
    NoiseConfig,
    PlantedRounding,
    RewardFunction,
    WeightNoise,
)
from repro.spec.config import LearningRates, OptimizerConfig

POLICY = ("train", "evaluate", "dose")
ASKED = ("train", "evaluate")
TRAINED = ("train",)
RELATIVE = 1e-5
_PARTS_OF_ARM: dict[str, Callable[..., Any]] = {
    "noise": NoiseConfig,
    "loss": LossConfig,
    "weight_noise": WeightNoise,
    "reward_function": RewardFunction,
    "rounding": PlantedRounding,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that a finished run's record must show.

    Attributes
    ----------
    find
        Returns a sentence for each way in which the record does not.
    procedures
        Whose records it is about; empty for all.
    """

    find: Callable[[Record], Iterable[str]]
    procedures: tuple[str, ...] = ()

    def applies(self, record: Record) -> bool:
        """Whether the record must show it."""
        return not self.procedures or record.procedure in self.procedures


def close(first: float | None, second: float | None) -> bool:
    """Whether two numbers are the same but for the rounding of what is blessed."""
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=RELATIVE, abs_tol=1e-9)


def differences(
    record: Record, name: str, needed: Iterable[float | None], because: str
) -> Iterator[str]:
    """Yield a sentence on the first step at which a series is not what it must be."""
    for step, (value, right) in enumerate(zip(record.series.get(name, ()), needed, strict=False)):
        if value != right and not close(value, right):
            yield f"series.{name} at step {step} is {value}; {because} {right}"
            return


def arm_of(record: Record) -> Arm:
    """Return the record's arm as a value."""
    raw: dict[str, Any] = dict(record.config["arm"])
    for name, kind in _PARTS_OF_ARM.items():
        if raw.get(name) is not None:
            raw[name] = kind(**raw[name])
    return Arm(**raw)


def optimizer_of(record: Record) -> OptimizerConfig:
    """Return the optimiser of the record's scale as a value."""
    raw: dict[str, Any] = dict(record.config["scale"]["optimizer"])
    return OptimizerConfig(**(raw | {"learning_rates": LearningRates(**raw["learning_rates"])}))


def rollouts(record: Record) -> list[int]:
    """Return the first step of each rollout; of each step where there are none."""
    scale = record.config["scale"]
    per_rollout = scale["updates_per_rollout"] if record.procedure == "train" else 1
    return list(range(0, scale["steps"], per_rollout))
