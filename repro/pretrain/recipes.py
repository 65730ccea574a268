"""What pre-training fixes: the policy's shape, its corpus, the optimiser and the schedule.

A recipe is a value. The number of steps is fixed and the schedule depends on the step alone, so
that a run is a function of its recipe and seed; a clock decides nothing. AdamW with decay on
matrices only, a linear warm-up, a flat stretch, and a linear fall to a small rest.

The recipe follows a probe with other code: "AdamW (.9, .98), weight decay .05 on matrices, clip 1,
warm-up 100, flat to 60 %, then linear to 2 %".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from repro.data.tiny_corpus import CorpusConfig
from repro.spec.arm import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A policy's shape and its training; the defaults are the tiny policy's.

    Attributes
    ----------
    hidden_size, layers, heads, key_value_heads, intermediate_size
        Qwen2's shape; embeddings are tied. Hidden and intermediate sizes are multiples of 64,
        the largest block of the 4-bit formats.
    initializer_range
        Standard deviation of the initial matrices.
    steps, tokens_per_batch
        Optimiser steps, and tokens in each at most, padding included.
    learning_rate, warmup_steps, flat_until, final_share
        Peak rate, linear warm-up, the share of steps after which the rate falls linearly, and the
        share of the peak that it falls to.
    beta1, beta2, weight_decay, max_grad_norm
        AdamW, with decay on matrices only, and gradient clipping by the global norm.
    checkpoint_every
        Steps between resumable states.
    quality_problems
        Problems of the development split that the finished checkpoint is measured on.
    threads
        Threads of torch while training; results are equal to the bit for equal threads only.
    corpus
        The documents.
    """

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    intermediate_size: int = 384
    initializer_range: float = 0.05
    rope_theta: float = 10_000.0
    steps: int = 3000
    tokens_per_batch: int = 2560
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    flat_until: float = 0.6
    final_share: float = 0.02
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    checkpoint_every: int = 500
    quality_problems: int = 500
    threads: int = 2
    corpus: CorpusConfig = field(default_factory=CorpusConfig)

    def __post_init__(self) -> None:
        for name in ("layers", "steps", "tokens_per_batch", "checkpoint_every", "threads"):
            value = getattr(self, name)
            require(value >= 1, f"{name} is {value}; it must be 1 or more")
        for name in ("hidden_size", "intermediate_size"):
            value = getattr(self, name)
            require(value % 64 == 0, f"{name} is {value}; the 4-bit formats need multiples of 64")
        require(0 < self.flat_until < 1, f"flat_until is {self.flat_until}; it must lie in (0, 1)")

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        fall_from = self.flat_until * self.steps
        fallen = max(0.0, (step - fall_from) / (self.steps - fall_from))
        return self.learning_rate * warm * (1.0 - (1.0 - self.final_share) * fallen)
