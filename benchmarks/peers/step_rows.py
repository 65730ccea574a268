"""What every way is given: shapes of models, and the rows of each step's update.

Imported in this project's environment and in its peers', so it needs torch alone.

A step has P prompts with G completions each, B = P * G rows in prompt-major order. Lengths of
completions are drawn anew for each step from (seed, step):

    spread    log-normal of a given mean and coefficient of variation, at most `most`
    equal     as many tokens in all as `spread` has in that step, every row of one length
    long      every row of 256 + 2,048 tokens, as the paper times a step (App. J)

Rows are independent draws, so their order is as good as any: that of generation, or the shuffled
one in which TRL takes them.

Easy to get wrong: a workload whose lengths repeat from step to step is kinder than training, where
kernels are chosen, planned or compiled again for shapes that were never met.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

UPDATES = ("spread", "equal", "long")
# A whole step: completions are sampled, by each way itself.
SAMPLED = "sampled"
LENGTHS = (*UPDATES, SAMPLED)
# Special tokens lie at the end of a vocabulary.
_SPECIAL_TOKENS = 1024
# Spread of random weights: a trained projection's, and what transformers initialises with.
SPREAD = 0.02
RANK, ALPHA = 32, 64
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
# From the config.json of HuggingFaceTB/SmolLM2-135M, Qwen/Qwen2.5-0.5B and Qwen/Qwen2.5-7B; `tiny`
# is for a rehearsal on a CPU.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llama",
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
    },
    "0.5b": {
        **_QWEN,
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7b": {
        **_QWEN,
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large a step is.

    Attributes
    ----------
    prompts, group
        P and G.
    prompt_tokens
        Of every prompt.
    mean, variation, most
        Of the completions' lengths: mean, standard deviation over mean, and the longest.
    """

    prompts: int = 16
    group: int = 8
    prompt_tokens: int = 150
    mean: int = 300
    variation: float = 0.5
    most: int = 2048

    @property
    def rows(self) -> int:
        """B."""
        return self.prompts * self.group


_LONG = {"prompt_tokens": 256, "mean": 2048}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRows:
    """The rows of one step.

    Attributes
    ----------
    prompts
        (P, S) int64.
    completions
        B tensors of int64, (length,) each.
    advantages
        (B,) float32: 1 and -1 by turns, so that no row is idle.
    """

    prompts: Tensor
    completions: list[Tensor]
    advantages: Tensor

    @property
    def group(self) -> int:
        """G."""
        return len(self.completions) // len(self.prompts)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all completions."""
        return sum(len(completion) for completion in self.completions)


def sizes_of(lengths: str, sizes: Sizes) -> Sizes:
    """Return the sizes of a kind of lengths: `long` has its own."""
    return replace(sizes, **_LONG) if lengths == "long" else sizes


def draw_lengths(lengths: str, step: int, seed: int, sizes: Sizes) -> list[int]:
    """Return the tokens of each of a step's completions; `lengths` is one of `UPDATES`."""
    if lengths not in UPDATES:
        raise ValueError(f"lengths are {lengths!r}; they must be one of {', '.join(UPDATES)}")
    if lengths == "long":
        return [sizes.mean] * sizes.rows
    variance = math.log1p(sizes.variation**2)
    normal = torch.randn(sizes.rows, generator=_generator(seed, step, 0), dtype=torch.float64)
    drawn = (math.log(sizes.mean) - variance / 2 + math.sqrt(variance) * normal).exp()
    tokens = drawn.round().long().clamp(1, sizes.most)
    # Up to a multiple of B, so that `equal` can have as many: the shortest take one more each.
    shortest = tokens.argsort()[: -int(tokens.sum()) % sizes.rows]
    tokens[shortest] += 1
    if lengths == "equal":
        return [int(tokens.sum()) // sizes.rows] * sizes.rows
    return [int(length) for length in tokens]


def draw_step(lengths: str, step: int, seed: int, sizes: Sizes, vocabulary: int) -> StepRows:
    """Return a step's rows of random tokens.

    Parameters
    ----------
    lengths
        One of `UPDATES`.
    step, seed
        Together they decide everything.
    sizes
        Of the lengths in question (`sizes_of`).
    vocabulary
        Rows of the embedding; the last `1024` are left alone where there are more than twice as
        many.
    """
    highest = vocabulary - _SPECIAL_TOKENS if vocabulary > 2 * _SPECIAL_TOKENS else vocabulary
    generator = _generator(seed, step, 1)
    prompts = torch.randint(0, highest, (sizes.prompts, sizes.prompt_tokens), generator=generator)
    completions = [
        torch.randint(0, highest, (length,), generator=generator)
        for length in draw_lengths(lengths, step, seed, sizes)
    ]
    advantages = 1.0 - 2.0 * (torch.arange(sizes.rows) % 2)
    return StepRows(prompts=prompts, completions=completions, advantages=advantages)


def questions(count: int, step: int, seed: int) -> list[str]:
    """Return a step's questions, for ways that sample their completions themselves."""
    numbers = torch.randint(2, 60, (count, 3), generator=_generator(seed, step, 2)).tolist()
    return [
        f"A shop has {a} boxes with {b} apples each and sells {c} apples every day. After how many "
        "days is none left? Think step by step and end with the number."
        for a, b, c in numbers
    ]


def _generator(seed: int, step: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 3 + stream)
