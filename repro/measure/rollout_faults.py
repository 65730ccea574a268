"""That noise is live and leaves no trace, and that faults cost no memory, on the engine as it runs.

noise: a rollout without noise, one under it, one after it, all by captured steps. The one after
must equal the one before to the bit, and the norm with a buffer of zeros the norm without one.

faults: one after another, a prompt that is too long, an empty one, a request for no tokens, an
interrupt in mid-rollout, logits that are not finite, and a cache too small for all rows at full
length. Each must end in its own error (the last in the right number of tokens), and the rollout
after it must be the one before it. Then the engine is closed, and the bytes that torch counts as
allocated must be those from before it was built.

Easy to get wrong: the first engine of a process leaves kernels' and cuBLAS' workspaces behind, kept
a stream and used by every later one; so bytes are counted around a second engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from repro.evidence.record import Estimate
from repro.measure.rollout_cells import estimate, random_prompts
from repro.models.norms import block_norms
from repro.models.policy import Policy
from repro.rl.noise import perturbed
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.rollout.sampler import RolloutBatch
from repro.rollout.state import Statistics
from repro.spec.arm import NoiseConfig
from repro.spec.config import SamplingConfig, derive_seed

_ROWS, _PROMPT, _NEW = 8, 64, 64
_QUEUE = 10_000
# "Noise range 1e-2 to 5e-4" (Table 4); a step in the first stage with noise.
_NOISE = NoiseConfig(sigma_start=1e-2, sigma_end=5e-4)
_STEP, _STEPS = 15, 100


class Interrupted(BaseException):
    """Stands for Ctrl-C in mid-rollout."""


def _config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "slots": _ROWS, "max_positions": _PROMPT + _NEW, "max_new_tokens": _NEW,
        "ignore_end": True,
    }  # fmt: skip
    return EngineConfig(**(values | changes))


def _rollout(engine: Engine, seed: int) -> RolloutBatch:
    decoder: Any = engine.policy.decoder
    return engine.sample(
        random_prompts(_ROWS, _PROMPT, decoder.config.vocab_size, seed),
        SamplingConfig(max_new_tokens=_NEW),
        group_size=1,
        seeds=[derive_seed(seed, "row", row) for row in range(_ROWS)],
    )


def _changed(first: RolloutBatch, second: RolloutBatch) -> int:
    """Return how many rows differ in a token or in a bit of a log-probability."""
    pairs = zip(first.completions, second.completions, strict=True)
    return sum(before != after for before, after in pairs)


def check_noise(policy: Policy, seeds: Sequence[int]) -> list[dict[str, Estimate]]:
    """Sample before, under and after noise on the norms."""
    engine = Engine(policy, _config())
    by_seed = []
    for seed in seeds:
        before, again = _rollout(engine, seed), _rollout(engine, seed)
        with perturbed(policy, _NOISE, seed=seed, step=_STEP, total_steps=_STEPS) as receipt:
            under = _rollout(engine, seed)
        after = _rollout(engine, seed)
        moved = 100 * receipt.channels_changed / receipt.channels
        values = {
            "repeat_rows_changed": (_changed(before, again), "rows"),
            "noise_off_rows_changed": (_changed(before, after) + _norms_changed(engine), "rows"),
            "noise_rows_changed": (100 * _changed(before, under) / _ROWS, "percent"),
            "noise_norms": (len(receipt.modules) / len(block_norms(policy.decoder)), "ratio"),
            "noise_channels_changed": (moved, "percent"),
            "noise_sigma_ratio": (receipt.sigma_realised / receipt.sigma, "ratio"),
        }
        by_seed.append(_estimates(values, "rollouts before, under and after noise"))
    engine.close()
    return by_seed


def _norms_changed(engine: Engine) -> int:
    """Return how many norms give another bit with a noise of zeros than with none."""
    changed = 0
    for norm in engine.forward.norms():
        gain, eps = norm.module.weight, norm.module.variance_epsilon
        x = torch.randn(_ROWS, len(gain), device=gain.device).to(engine.forward.dtype)
        zeros = torch.zeros(len(gain), device=gain.device)
        with_zeros = engine.forward.ops.norm(x, None, gain, zeros, eps)[1]
        changed += not torch.equal(with_zeros, engine.forward.ops.norm(x, None, gain, None, eps)[1])
    return changed


def _estimates(values: dict[str, tuple[float, str]], method: str) -> dict[str, Estimate]:
    return {name: estimate(value, unit, method) for name, (value, unit) in values.items()}


def check_faults(policy: Policy, seeds: Sequence[int]) -> list[dict[str, Estimate]]:
    """Put an engine through every fault and count the bytes that it leaves behind."""
    by_seed = []
    for seed in seeds:
        # The first leaves the workspaces that every engine of the process then shares.
        _through_faults(policy, seed)
        allocated_before = _allocated(policy.device)
        right, changed = _through_faults(policy, seed)
        values: dict[str, tuple[float, str]] = {
            "faults_as_they_should": (100 * sum(right.values()) / len(right), "percent"),
            "faults_rows_changed": (changed, "rows"),
            "faults_bytes_kept": (_allocated(policy.device) - allocated_before, "bytes"),
        }
        wrong = [name for name, fine in right.items() if not fine]
        method = f"{len(right)} faults" + (
            f"; not as they should: {', '.join(wrong)}" * bool(wrong)
        )
        by_seed.append(_estimates(values, method))
    return by_seed


def _allocated(device: torch.device) -> int:
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated(device))


def _through_faults(policy: Policy, seed: int) -> tuple[dict[str, bool], int]:
    """Return which faults ended as they should, and how many later rows were other ones."""
    engine = Engine(policy, _config())
    expected = _rollout(engine, seed)
    right, changed = {}, 0
    for name, (error, provoke) in _FAULTS.items():
        right[name] = _ends_in(error, provoke, engine) and engine.pool.free == engine.pool.capacity
        changed += _changed(expected, _rollout(engine, seed))
    engine.close()
    del engine
    for name, survive in (("full cache", _exhaust), ("queue", _queue)):
        right[name] = survive(policy, seed)
    return right, changed


def _ends_in(error: type[BaseException], provoke: Callable[[Engine], object], engine: Any) -> bool:
    try:
        provoke(engine)
    except error:
        return True
    return False


def _ask(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int | None = None) -> None:
    sampling = SamplingConfig(max_new_tokens=_NEW if new_tokens is None else new_tokens)
    engine.sample(prompts, sampling, group_size=1, seeds=range(len(prompts)))


def _interrupt(engine: Engine) -> None:
    def stop(statistics: Statistics) -> None:
        if statistics.decode_steps >= _NEW // 2:
            raise Interrupted

    prompts = [[1] * _PROMPT for _ in range(_ROWS)]
    sampling = SamplingConfig(max_new_tokens=_NEW)
    engine.sample(prompts, sampling, group_size=1, seeds=range(_ROWS), on_round=stop)


def _spoil(engine: Engine) -> None:
    """Sample with a gain that is not a number, and see the layer named."""
    norms = block_norms(engine.policy.decoder)
    name = f"model.layers.{len(norms) // 4}.post_attention_layernorm"
    weight = norms[name].weight
    original = weight.detach().clone()
    with torch.no_grad():
        weight[0] = torch.nan
    try:
        _ask(engine, [[1] * _PROMPT for _ in range(_ROWS)])
    except FloatingPointError as error:
        if name.rsplit(".", 1)[0] + "'s" not in str(error):
            raise RuntimeError(f"another layer was named: {error}") from error
        raise
    finally:
        with torch.no_grad():
            weight.copy_(original)


_FAULTS: dict[str, tuple[type[BaseException], Callable[[Engine], object]]] = {
    "prompt too long": (ValueError, lambda engine: _ask(engine, [[1] * (_PROMPT + _NEW)])),
    "empty prompt": (ValueError, lambda engine: _ask(engine, [[1], []])),
    "no tokens": (ValueError, lambda engine: _ask(engine, [[1]], 0)),
    "interrupt": (Interrupted, _interrupt),
    "not finite": (FloatingPointError, _spoil),
}


def _exhaust(policy: Policy, seed: int) -> bool:
    """Run all rows to full length in a cache that holds half of them."""
    blocks = 1 + (_ROWS // 2) * -(-(_PROMPT + _NEW) // 32)
    engine = Engine(policy, _config(cache_blocks=blocks, round_steps=4))
    batch = _rollout(engine, seed)
    fine = engine.statistics.preemptions > 0 and engine.pool.free == engine.pool.capacity
    engine.close()
    return fine and all(len(c.token_ids) == _NEW for c in batch.completions)


def _queue(policy: Policy, seed: int) -> bool:
    """Serve 10,000 requests of a few tokens."""
    engine = Engine(policy, _config(slots=256, max_positions=16, max_new_tokens=4))
    prompts = [[1 + (seed + i) % 97, 2, 3] for i in range(_QUEUE)]
    limits = [1 + i % 4 for i in range(_QUEUE)]
    sampling = SamplingConfig(max_new_tokens=4)
    batch = engine.sample(prompts, sampling, group_size=1, seeds=range(_QUEUE), limits=limits)
    fine = engine.pool.free == engine.pool.capacity
    engine.close()
    return fine and [len(c.token_ids) for c in batch.completions] == limits
