"""How a rollout is timed: prompts, device events around a whole rollout, and the device's rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from repro.evidence.record import Estimate
from repro.measure.rollout_parts import Repeat
from repro.models.decoder import is_projection
from repro.models.lora import base_linear
from repro.models.policy import Policy
from repro.rollout.engine import Engine
from repro.spec.config import SamplingConfig, derive_seed

_HOW = "one rollout between device events"


def timed(
    engine: Engine,
    prompts: list[list[int]],
    new_tokens: int,
    *,
    group_size: int = 1,
    limits: Sequence[int] | None = None,
    first_seed: int = 0,
) -> float:
    """Return the seconds of one rollout between two device events.

    Parameters
    ----------
    limits
        Tokens of each row; None takes `new_tokens` for all.
    first_seed
        Of the rows' seeds, which follow one another.

    Raises
    ------
    RuntimeError
        When another number of tokens was drawn than the protocol has.
    """
    rows = len(prompts) * group_size
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    batch = engine.sample(
        prompts,
        SamplingConfig(max_new_tokens=new_tokens),
        group_size=group_size,
        seeds=range(first_seed, first_seed + rows),
        limits=limits,
    )
    after.record()
    torch.cuda.synchronize()
    expected = sum(limits) if limits is not None else rows * new_tokens
    drawn = sum(len(completion.token_ids) for completion in batch.completions)
    if drawn != expected:
        raise RuntimeError(f"{drawn} tokens were drawn; the protocol has {expected}")
    return float(before.elapsed_time(after)) * 1e-3


def random_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return `count` prompts of random tokens."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "prompts"))
    drawn: list[list[int]] = torch.randint(
        0, vocabulary, (count, length), generator=generator
    ).tolist()
    return drawn


def estimate(value: float, unit: str, method: str = _HOW, n: int = 1) -> Estimate:
    """Return an estimate without an interval."""
    return Estimate(value=value, unit=unit, method=method, n=n)


def add_work(
    repeat: Repeat, policy: Policy, *, seconds: float, rows: int, prompt_tokens: int, steps: int
) -> None:
    """Add a prefill and `steps` decode steps of `rows` rows to the work behind a seed's receipt.

    The weights are read once by the prefill and once per step; every token but the last is
    multiplied by all projections.
    """
    decoder: Any = policy.decoder
    weight_bytes = policy.effects["base_bytes"] - _embedding_bytes(decoder)
    repeat.seconds += seconds
    repeat.nbytes += (steps + 1) * weight_bytes
    repeat.flops += 2.0 * rows * _product_parameters(decoder) * (prompt_tokens + steps - 1)


def _embedding_bytes(decoder: Any) -> int:
    tied = decoder.lm_head.weight is decoder.model.embed_tokens.weight
    return 0 if tied else int(decoder.model.embed_tokens.weight.nbytes)


def _product_parameters(decoder: Any) -> int:
    """Return the parameters of all projections: what every token is multiplied by."""
    total = 0
    for name, module in decoder.named_modules():
        if is_projection(name):
            base = base_linear(module)
            total += base.in_features * base.out_features
    return total
