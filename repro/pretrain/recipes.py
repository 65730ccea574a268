"""What a pre-training recipe fixes: the policy's shape, its corpus, the optimiser and the schedule.

A recipe is a value; `RECIPES` holds one per policy. The number of steps is fixed and the schedule
depends on the step alone, so that a run is a function of its recipe and seed; a clock decides
nothing. AdamW with decay on matrices only, a linear warm-up, a flat stretch, and a linear fall to a
small rest.

The tiny policy's recipe follows a probe with other code: "AdamW (.9, .98), weight decay .05 on
matrices, clip 1, warm-up 100, flat to 60 %, then linear to 2 %".

The proxy policies are two sizes of one shape, the smaller with two lengths of training. Sizes are
multiples of 64, the largest block of the 4-bit formats, and heads are 64 wide. 2000 steps of about
64 thousand tokens are some 130 million tokens, four and a half for each parameter of the smaller
policy, and took 363 s on one H200: 61 of its teraFLOPS at six per parameter and token. The larger
policy's 450 steps took 132 s; they are 29 million tokens, a quarter for each parameter.

After those 2000 steps the policy `proxy-30m` can solve nearly every problem when made to work, in
any format, so that all that is left to learn is a habit. `proxy-30m-early` stops before arithmetic
is mastered on the harder levels, and its corpus is careless more often: there is skill to gain, and
room for a format to do harm. The two needles are `proxy-30m` with its habit of showing the working
made rare, by the target of the one token that decides and of no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from repro.data.proxy_corpus import ProxyCorpusConfig
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
        Optimiser steps, and tokens in each: of the tiny policy at most, padding included; of a
        proxy policy about, padding left out.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyRecipe(Recipe):
    """The tiny policy's recipe with its corpus."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRecipe(Recipe):
    """A proxy policy's shape, corpus and training.

    Attributes
    ----------
    parts
        Passes that a step's tokens are cut into, each of one length of document: less padding,
        while every step sees every length.
    prompt_weight
        Weight of a prompt's tokens in the loss; a completion's have 1.
    corpus
        The documents.
    quality_samples
        Completions per problem at temperature 1 when the quality is measured.
    start
        The pre-trained policy that training goes on from, of the same seed; None starts from random
        weights.
    working_share
        Probability of showing the working that every prompt is trained towards, in place of the
        corpus's own share: it is the target of the one token that decides, and all other tokens
        keep theirs. None leaves that token to the corpus.
    """

    hidden_size: int = 512
    layers: int = 9
    heads: int = 8
    key_value_heads: int = 2
    intermediate_size: int = 1536
    initializer_range: float = 0.02
    steps: int = 2000
    tokens_per_batch: int = 65_536
    parts: int = 4
    learning_rate: float = 1.5e-3
    warmup_steps: int = 100
    prompt_weight: float = 0.25
    quality_problems: int = 1000
    quality_samples: int = 4
    corpus: ProxyCorpusConfig = field(default_factory=ProxyCorpusConfig)
    start: str | None = None
    working_share: float | None = None

    def __post_init__(self) -> None:
        # The zero-argument form of super does not survive `slots=True`.
        Recipe.__post_init__(self)
        require(self.parts >= 1, f"parts is {self.parts}; it must be 1 or more")
        require(
            0 <= self.prompt_weight <= 1,
            f"prompt_weight is {self.prompt_weight}; it must lie in [0, 1]",
        )
        require(
            self.working_share is None or 0 < self.working_share < 1,
            f"working_share is {self.working_share}; it must lie in (0, 1) or be None",
        )


_MORE_CARELESS = ProxyCorpusConfig(careless_share=(0.30, 0.45, 0.55, 0.62, 0.67))

# A needle: what earns reward is as rare as the share says, and as good as it was once chosen.
_NEEDLE = ProxyRecipe(
    start="proxy-30m",
    steps=100,
    tokens_per_batch=16_384,
    learning_rate=2e-4,
    warmup_steps=10,
    checkpoint_every=100,
)

PROXIES: dict[str, ProxyRecipe] = {
    "proxy-30m": ProxyRecipe(),
    "proxy-30m-early": ProxyRecipe(steps=750, corpus=_MORE_CARELESS),
    "proxy-30m-needle4": replace(_NEEDLE, working_share=0.04),
    "proxy-30m-needle05": replace(_NEEDLE, working_share=0.005),
    "proxy-120m": ProxyRecipe(
        hidden_size=1024,
        layers=10,
        heads=16,
        key_value_heads=4,
        intermediate_size=2816,
        steps=450,
        learning_rate=8e-4,
        corpus=_MORE_CARELESS,
    ),
}

# By the policies' names.
RECIPES: dict[str, TinyRecipe | ProxyRecipe] = {"tiny": TinyRecipe(), **PROXIES}
