"""How large a measurement of rollout throughput is."""

from __future__ import annotations

from dataclasses import dataclass

from repro.spec.config import require


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
    """

    name: str
    shape: str
    prompt_tokens: int = 256
    new_tokens: int = 256
    batches: tuple[int, ...] = (1, 8, 64, 256)

    def __post_init__(self) -> None:
        require(
            bool(self.batches) and self.prompt_tokens >= 1 and self.new_tokens >= 1,
            f"throughput point {self.name}: it needs batches, prompt tokens and new tokens",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputScale:
    """Points, and what else is measured.

    Attributes
    ----------
    parity_tokens
        Length of the completions on which sampler and trainer are compared; 0 leaves it out.
    scheduling
        Also measure what sharing prompts and continuous batching gain, on the first point.
    """

    points: tuple[ThroughputPoint, ...]
    parity_tokens: int = 0
    scheduling: bool = False
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
