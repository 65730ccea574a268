"""Checks of the engine other than its speed, on one loaded model, once per seed.

    sharing         prefill of groups of 8 with one prompt of 1,024 tokens, shared and not
    long_tail       completions of long-tailed lengths, batched continuously and statically
    parity          log-probabilities of engine, trainer and a float32 pass on the same tokens
    trained_parity  the same on the packaged trained policy, whose logits mean something
    float8          the same as `parity` with keys and values in 8 bits
    noise, faults   see `rollout_faults`

Easy to get wrong: lengths drawn again for every seed would make the gain of continuous batching a
matter of the draw. They are the distribution's own quantiles, in one shuffled order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import torch

from repro.data.load import load_problems
from repro.data.prompts import render
from repro.evidence.record import Estimate
from repro.measure.rollout_cells import estimate, random_prompts, timed
from repro.measure.rollout_faults import check_faults, check_noise
from repro.models.lora import adapter_layers
from repro.models.policy import Policy, load_policy
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.rollout.parity import exactness, float32_logprobs, parity, trainer_logprobs
from repro.rollout.sampler import RolloutBatch
from repro.spec.arm import CacheName
from repro.spec.config import DataConfig, SamplingConfig, derive_seed

Check = Callable[[Policy, Sequence[int]], list[dict[str, Estimate]]]

# Group of the paper's GSM8K runs, and the prompt on which sharing is measured.
_GROUP, _SHARED_PROMPT, _SHARED_PROMPTS = 8, 1024, 16
# Lengths of the long tail: log-normal with median 300 and 99th percentile 4096.
TAIL_MEDIAN, TAIL_MOST = 300, 4096
# Four times as many rows as slots, as a rollout of 1,024 rows has on 256.
_TAIL_SLOTS, _TAIL_ROWS = 64, 256
# Tokens of each of the completions on which log-probabilities are compared.
_PARITY_ROWS, _PARITY_TOKENS, _FLOAT8_TOKENS = 4, 2048, 512
# The packaged policy's completions end within a line or two.
_TRAINED_PROMPTS, _TRAINED_TOKENS = 128, 64
_TRAINED_SPREAD = 0.01


def check_sharing(policy: Policy, seeds: Sequence[int]) -> list[dict[str, Estimate]]:
    """Time the prefill of groups of 8 with the prompt's blocks shared and not."""
    decoder: Any = policy.decoder
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for shared in (True, False):
        engine = Engine(
            policy,
            EngineConfig(
                slots=_SHARED_PROMPTS * _GROUP,
                max_positions=_SHARED_PROMPT + 8,
                max_new_tokens=8,
                share_prompts=shared,
                ignore_end=True,
            ),
        )
        for number, seed in enumerate(seeds):
            prompts = random_prompts(
                _SHARED_PROMPTS, _SHARED_PROMPT, decoder.config.vocab_size, seed
            )
            if number == 0:
                timed(engine, prompts, 1, group_size=_GROUP)
            seconds[shared].append(timed(engine, prompts, 1, group_size=_GROUP))
        engine.close()
    return [
        {"sharing_speedup": estimate(apart / together, "ratio")}
        for apart, together in zip(seconds[False], seconds[True], strict=True)
    ]


def tail_lengths(rows: int = _TAIL_ROWS) -> list[int]:
    """Return the quantiles of the long-tailed length, cut at the longest, in a fixed order."""
    spread = math.log(TAIL_MOST / TAIL_MEDIAN) / NormalDist().inv_cdf(0.99)
    normal = NormalDist(math.log(TAIL_MEDIAN), spread)
    drawn = [math.exp(normal.inv_cdf((i + 0.5) / rows)) for i in range(rows)]
    generator = torch.Generator().manual_seed(derive_seed("long tail"))
    order = torch.randperm(rows, generator=generator).tolist()
    return [min(TAIL_MOST, max(1, round(drawn[i]))) for i in order]


def check_long_tail(policy: Policy, seeds: Sequence[int]) -> list[dict[str, Estimate]]:
    """Time completions of long-tailed lengths, batched continuously and statically."""
    limits = tail_lengths()
    decoder: Any = policy.decoder
    rates: dict[bool, list[float]] = {True: [], False: []}
    for static in (False, True):
        engine = Engine(
            policy,
            EngineConfig(
                slots=_TAIL_SLOTS,
                max_positions=256 + TAIL_MOST,
                max_new_tokens=TAIL_MOST,
                static_batches=static,
                ignore_end=True,
            ),
        )
        _capture_widths(engine)
        for seed in seeds:
            prompts = random_prompts(_TAIL_ROWS, 256, decoder.config.vocab_size, seed)
            taken = timed(engine, prompts, TAIL_MOST, limits=limits)
            rates[static].append(sum(limits) / taken)
        engine.close()
    return [
        {
            "long_tail_tokens_per_second": estimate(free, "tokens per second"),
            "long_tail_speedup": estimate(free / fixed, "ratio"),
        }
        for free, fixed in zip(rates[False], rates[True], strict=True)
    ]


def _capture_widths(engine: Engine) -> None:
    """Capture the step at every width that a shrinking batch goes through, before the clock."""
    rows = _TAIL_SLOTS
    while rows >= 1:
        timed(engine, [[1] * 256 for _ in range(rows)], 2)
        rows = rows - 8 if rows > 16 else rows // 2


def _sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    seed: int,
    cache: CacheName = "compute",
    *,
    ignore_end: bool = True,
) -> RolloutBatch:
    engine = Engine(
        policy,
        EngineConfig(
            slots=len(prompts),
            max_positions=max(map(len, prompts)) + tokens,
            max_new_tokens=tokens,
            ignore_end=ignore_end,
            cache_format=cache,
        ),
    )
    batch = engine.sample(
        prompts,
        SamplingConfig(max_new_tokens=tokens),
        group_size=1,
        seeds=[derive_seed(seed, "parity", row) for row in range(len(prompts))],
    )
    engine.close()
    return batch


def _compare(
    policy: Policy, batch: RolloutBatch, prefix: str, *, exact: bool
) -> dict[str, Estimate]:
    """Return the distances of the engine's log-probabilities from the trainer's and exact ones."""
    trainer = trainer_logprobs(policy, batch, 1.0)
    against = parity(batch, trainer)
    tokens = against.tokens
    values = {
        "mean_exp_abs": (against.mean_exp_abs, "ratio"),
        "mean_abs": (against.mean_abs, "nats"),
        "max_abs": (against.max_abs, "nats"),
        "bias": (against.mean, "nats"),
        "drift": (against.second_half / max(against.first_half, 1e-12), "ratio"),
    }
    if exact:
        errors = exactness(batch, trainer, float32_logprobs(policy, batch, 1.0))
        values |= {
            "engine_error": (errors.engine, "nats"),
            "trainer_error": (errors.trainer, "nats"),
            "engine_error_exp": (errors.engine_exp, "ratio"),
            "trainer_error_exp": (errors.trainer_exp, "ratio"),
            "error_ratio": (errors.engine / errors.trainer, "ratio"),
        }
    method = f"{tokens} tokens, bfloat16; errors against a float32 pass"
    return {
        f"{prefix}_{name}": estimate(value, unit, method, tokens)
        for name, (value, unit) in values.items()
    }


def check_parity(policy: Policy, seeds: Sequence[int]) -> list[dict[str, Estimate]]:
    """Compare log-probabilities on four completions of 2,048 tokens."""
    decoder: Any = policy.decoder
    by_seed = []
    for seed in seeds:
        prompts = random_prompts(_PARITY_ROWS, 64, decoder.config.vocab_size, seed)
        batch = _sample(policy, prompts, _PARITY_TOKENS, seed)
        by_seed.append(_compare(policy, batch, "parity", exact=True))
    return by_seed


def check_float8(policy: Policy, seeds: Sequence[int]) -> list[dict[str, Estimate]]:
    """Compare log-probabilities with a cache of 8 bits, and with the usual one as long."""
    decoder: Any = policy.decoder
    by_seed = []
    for seed in seeds:
        prompts = random_prompts(_PARITY_ROWS, 64, decoder.config.vocab_size, seed)
        metrics: dict[str, Estimate] = {}
        for cache, prefix in (("float8", "float8"), ("compute", "float8_without")):
            batch = _sample(policy, prompts, _FLOAT8_TOKENS, seed, cache)  # type: ignore[arg-type]
            metrics |= _compare(policy, batch, prefix, exact=False)
        by_seed.append(metrics)
    return by_seed


def check_trained_parity(policy: Policy, seeds: Sequence[int]) -> list[dict[str, Estimate]]:
    """Compare log-probabilities of the packaged trained policy on prompts that it knows."""
    trained = load_policy(
        "tiny",
        weight_format=policy.weight_format,
        training="lora",
        lora_rank=16,
        lora_alpha=16.0,
        compute_dtype="bfloat16",
        seed=0,
        device=policy.device,
    )
    generator = torch.Generator(policy.device).manual_seed(derive_seed("trained parity"))
    for _, layer in adapter_layers(trained.model):
        with torch.no_grad():
            layer.adapter()[1].normal_(0.0, _TRAINED_SPREAD, generator=generator)
    problems = load_problems(DataConfig(test_problems=_TRAINED_PROMPTS), "test")
    tokenizer: Any = trained.tokenizer
    prompts = [render(problem, "tiny", tokenizer) for problem in problems]
    by_seed = []
    for seed in seeds:
        # Beyond its end token a trained policy's logits mean as little as a random one's.
        batch = _sample(trained, prompts, _TRAINED_TOKENS, seed, ignore_end=False)
        by_seed.append(_compare(trained, batch, "trained_parity", exact=True))
    return by_seed


CHECKS: dict[str, Check] = {
    "sharing": check_sharing,
    "long_tail": check_long_tail,
    "parity": check_parity,
    "trained_parity": check_trained_parity,
    "float8": check_float8,
    "noise": check_noise,
    "faults": check_faults,
}
