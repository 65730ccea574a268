"""How large the measured steps are: real shapes, random weights, forced completion lengths.

One run measures an arm at several points, one after another in one process. Where `baseline` names
a format, the points of a model are first measured with that format (`repro.measure.step_time`).
Each point is timed `steps` times: a measured step is a deterministic workload, so what differs
between two timings is the machine, and a seed would add nothing.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from repro.spec.arm import Arm, OptimizerName, WeightFormat
from repro.spec.checks import Count, Natural, check_fields, require
from repro.spec.config import Seeds, derive_seed
from repro.spec.settings import OMIT_AT_DEFAULT
from repro.spec.shapes import shape_named

Linears = Literal["kernels", "dequantised", "bitsandbytes"]
Lengths = Literal["full", "spread", "equal"]
# Standard deviation of spread lengths over their mean, and of the log-normal's logarithm.
_LENGTH_CV = 0.5
_LENGTH_SIGMA = math.sqrt(math.log1p(_LENGTH_CV**2))
# What a standard normal variable exceeds once in a thousand times.
_ONE_IN_1000 = 3.09


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArm(Arm):
    """An arm, and how the products with its 4-bit weights are carried out (`linears`).

    `kernels`: this project's. `dequantised`: as the released trainer does, each layer is turned
    into a dense matrix by plain torch at every pass; rollouts keep the kernels, as they do in
    the released code. `bitsandbytes`: that library's NF4 layer in trainer and rollouts alike.
    """

    linears: Linears = "kernels"

    def __post_init__(self) -> None:
        # Spelled out: a dataclass with slots is a new class, which `super()` would not find.
        Arm.__post_init__(self)
        require(
            self.linears == "kernels" or self.weight_format != "bf16",
            f"arm {self.name}: linears {self.linears} are for 4-bit weights; these are bf16",
        )
        require(
            self.linears != "bitsandbytes" or self.weight_format == "nf4",
            f"arm {self.name}: bitsandbytes multiplies nf4 weights; these are {self.weight_format}",
        )


def step_arm(arm: Arm, **changes: Any) -> StepArm:
    """Return a table's arm as one whose steps are timed, with `changes`."""
    fields = {item.name: getattr(arm, item.name) for item in dataclasses.fields(arm)}
    return StepArm(**(fields | changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One step to measure.

    Attributes
    ----------
    name
        Ends the names of its metrics.
    model
        A size of `repro.spec.shapes`.
    prompts, group
        P prompts with G completions each.
    prompt_tokens, completion_tokens
        Of every row: 256 and 2048 in the paper (App. J).
    sampled_tokens
        Tokens that the engine really samples, of a point that measures memory alone; the rest of
        each completion is filled with random ones before the update. 0 samples all.
    micro_tokens
        Tokens of a micro-batch; 0 leaves it to the memory plan.
    budget_bytes
        The allocator may take no more, context aside; 0 leaves it the device.
    lora_rank
        In place of the arm's; 0 keeps that.
    slots
        Rows sampled at once; 0 samples all rows at once.
    memory_only
        Nothing is timed, and the update goes over two micro-batches alone. The second meets the
        first's gradients, and the moments that the warm-up left, so further ones add nothing to
        the peak. Cache and engine are those of the whole step.
    lengths
        `full`: every completion has `completion_tokens`. `spread`: each has a length of its own,
        new in every step, log-normal with mean `mean_tokens` and a deviation of half of it, cut at
        `completion_tokens`. `equal`: all have the mean length that the spread rows of the same step
        have, so that a step has the same tokens either way.
    mean_tokens
        Of lengths that are not full.
    one_wave
        Rows of full length that find no room together are sampled in waves, each like the others.
        Measured are the prompts of one wave alone, and the seconds of every phase count as often as
        there are waves, those that a step has but once (its optimiser's) too.
    ranks
        GPUs that share the step's prompts, by the trainer's own division. A point of one is
        measured by all GPUs of its run at the same time, each for itself; the first's counts.
    """

    name: str
    model: str
    prompts: Count = 1
    group: Count = 8
    prompt_tokens: Count = 256
    completion_tokens: Count = 2048
    sampled_tokens: Natural = 0
    micro_tokens: Natural = 0
    budget_bytes: Natural = 0
    lora_rank: Natural = 0
    slots: Natural = 0
    memory_only: bool = False
    lengths: Lengths = field(default="full", metadata=OMIT_AT_DEFAULT)
    mean_tokens: Count = field(default=300, metadata=OMIT_AT_DEFAULT)
    one_wave: bool = field(default=False, metadata=OMIT_AT_DEFAULT)
    ranks: Count = field(default=1, metadata=OMIT_AT_DEFAULT)

    RETIRED: ClassVar = {"checkpointing": True, "cache": "compute"}

    def __post_init__(self) -> None:
        check_fields(self, f"point {self.name}: ")
        shape_named(self.model)

    @classmethod
    def recorded(cls, values: Mapping[str, Any]) -> StepPoint:
        """Return the point that a record's configuration describes."""
        return cls(**{name: value for name, value in values.items() if name not in cls.RETIRED})

    @property
    def place(self) -> str:
        """What the name says beside the model: `batch 8`, `16x8` or `batch 2, spread`."""
        words = self.name.removeprefix(self.model.replace(".", "_")).strip("_").split("_")
        return ", ".join(f"batch {self.group}" if w == f"b{self.group}" else w for w in words)

    @property
    def rows(self) -> int:
        """Completions of the step."""
        return self.prompts * self.group

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def expected_tokens(self) -> int:
        """Tokens of a completion on average, but for what the cut takes off."""
        return self.completion_tokens if self.lengths == "full" else self.mean_tokens

    @property
    def long_tokens(self) -> int:
        """Tokens that one completion in a thousand exceeds."""
        if self.lengths != "spread":
            return self.expected_tokens
        long = self.mean_tokens * math.exp(_LENGTH_SIGMA * (_ONE_IN_1000 - _LENGTH_SIGMA / 2))
        return min(self.completion_tokens, round(long))

    def drawn_lengths(self, seed: int) -> list[int]:
        """Return the tokens of each completion of a rollout; `seed` is that rollout's own."""
        if self.lengths == "full":
            return [self.completion_tokens] * self.rows
        generator = random.Random(derive_seed(seed, "lengths"))
        centre = math.log(self.mean_tokens) - _LENGTH_SIGMA**2 / 2
        drawn = (generator.lognormvariate(centre, _LENGTH_SIGMA) for _ in range(self.rows))
        lengths = [min(self.completion_tokens, max(1, round(length))) for length in drawn]
        if self.lengths == "equal":
            lengths = [round(sum(lengths) / self.rows)] * self.rows
        return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScale:
    """Points, and how often each is measured.

    A model's points are first measured with the format `baseline`; None for none. `warm_up` steps
    before the clock sample `warm_up_tokens` of a row, fill up the rest and update on one
    micro-batch. The `steps` under it are each the trainer's own iteration; their median counts.
    """

    points: tuple[StepPoint, ...]
    baseline: WeightFormat | None = None
    warm_up: Natural = 1
    warm_up_tokens: Count = 48
    steps: Count = 1
    optimizer: OptimizerName = "adamw"
    seeds: Seeds = (0,)

    RETIRED: ClassVar = {"updates": 1}

    def __post_init__(self) -> None:
        check_fields(self)
        require(bool(self.points), "points is (); a step needs 1 or more")
        for point in self.points:
            require(
                point.memory_only or point.sampled_tokens == 0,
                f"point {point.name}: sampled_tokens is {point.sampled_tokens}; a step that is "
                "timed samples all of them, so it must be 0",
            )

    @property
    def ranks(self) -> int:
        """GPUs that a run needs."""
        return max(point.ranks for point in self.points)


def equal_twin(point: StepPoint, points: Sequence[StepPoint]) -> StepPoint | None:
    """Return the point that differs from a spread one in its equal lengths; None without one."""
    equal = dataclasses.replace(point, lengths="equal")
    return _named(equal, points) if point.lengths == "spread" else None


def _named(wanted: StepPoint, points: Sequence[StepPoint]) -> StepPoint | None:
    """Return the point that is like the wanted one, whatever its name."""
    return next((p for p in points if p == dataclasses.replace(wanted, name=p.name)), None)


def alone_twin(point: StepPoint, points: Sequence[StepPoint]) -> StepPoint | None:
    """Return the point of one GPU that one of several is compared with; None without one.

    It has as many rows as each of them (weak scaling), or else as many as all (strong scaling).
    """
    one = dataclasses.replace(point, ranks=1)
    weak = dataclasses.replace(one, prompts=point.prompts // point.ranks)
    return (_named(weak, points) or _named(one, points)) if point.ranks > 1 else None
