"""The sampler that training takes for a policy: the engine on a CUDA device, else plain torch.

The engine reads the trained tensors themselves. Under full training those are float32 masters,
which it would run without the trainer's autocast: there, and only there, it samples from a 16-bit
copy, which `refresh` renews after every update.

Easy mistakes
-------------
* A cache sized by what is free at the start leaves nothing for the update's activations.
* The copy's matrices are views of fused ones: values must be copied into them, never replaced.
* Added noise sits on the norms of the policy that is trained; the copy has norms of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from repro.models.memory_plan import CACHE_SHARE
from repro.models.norms import block_norms, final_norm
from repro.models.policy import Policy
from repro.models.training_memory import MOST_SLOTS
from repro.rl.single_run.torch_sampler import TorchSampler
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig, blocks_for, cache_blocks
from repro.rollout.sampler import RolloutBatch, Sampler
from repro.rollout.state import Statistics
from repro.spec.config import SamplingConfig


def sampler_for(policy: Policy, *, rows: int, max_new_tokens: int, max_positions: int) -> Sampler:
    """Return the sampler for a policy where it is.

    Parameters
    ----------
    rows
        Most rows asked for at once.
    max_new_tokens, max_positions
        Longest completion, and longest prompt and completion together; no more than the policy has.
    """
    if policy.device.type != "cuda" or policy.compute_dtype != torch.bfloat16:
        return TorchSampler(policy)
    decoder: Any = policy.decoder
    positions = min(max_positions, decoder.config.max_position_embeddings)
    slots = max(1, min(rows, MOST_SLOTS))
    # Before the cache is sized: under full training the copy is as large as the weights.
    sampled = _sixteen_bit(policy) if policy.training == "full" else policy
    config = EngineConfig(
        slots=slots,
        max_positions=positions,
        max_new_tokens=min(max_new_tokens, positions - 1),
    )
    blocks = cache_blocks(policy, config, share=CACHE_SHARE, reserved=_training_bytes(policy))
    # One row must fit, or nothing can be sampled.
    config = replace(config, cache_blocks=max(blocks, blocks_for(1, config)))
    return Engine(policy, config) if sampled is policy else CopySampler(policy, config, sampled)


def _training_bytes(policy: Policy) -> int:
    """Return the bytes that full training will take besides: float32 gradients and two moments.

    An adapter's are small beside a cache.
    """
    if policy.training != "full":
        return 0
    return sum((4 + 2 * 4) * p.numel() for p in policy.model.parameters() if p.requires_grad)


class CopySampler:
    """An engine on a 16-bit copy, `sampled`, of a fully trained policy with float32 masters."""

    def __init__(self, policy: Policy, config: EngineConfig, sampled: Policy | None = None) -> None:
        if policy.training != "full":
            raise ValueError(f"training is {policy.training!r}; CopySampler needs training 'full'")
        self.policy = policy
        self._copy = _sixteen_bit(policy) if sampled is None else sampled
        self.engine = Engine(self._copy, config)

    @property
    def statistics(self) -> Statistics:
        """Of the last rollout."""
        return self.engine.statistics

    def close(self) -> None:
        """Give back the engine's memory; the copy goes with this object."""
        self.engine.close()

    def refresh(self) -> None:
        """Copy the masters as they are now into the tensors that the engine reads."""
        masters = dict(self.policy.decoder.named_parameters())
        with torch.no_grad():
            for name, parameter in self._copy.decoder.named_parameters():
                parameter.copy_(masters[name])
        self.engine.refresh()

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        group_size: int,
        seeds: Sequence[int],
    ) -> RolloutBatch:
        """Sample under the copy with the policy's added noise; see `Sampler.sample`."""
        trained, copied = self.policy.decoder, self._copy.decoder
        norms = block_norms(trained) | {"": final_norm(trained)}
        copies = block_norms(copied) | {"": final_norm(copied)}
        for name, norm in norms.items():
            copies[name].noise = norm.noise
        return self.engine.sample(prompts, sampling, group_size=group_size, seeds=seeds)


def _sixteen_bit(policy: Policy) -> Policy:
    """Return a frozen copy of the policy in its compute dtype."""
    # A copy finds what it may reuse by identity: so it is made of 16-bit tensors from the start.
    memo: dict[int, Any] = {}
    for parameter in policy.decoder.parameters():
        value = parameter.detach().to(policy.compute_dtype, copy=True)
        memo[id(parameter)] = nn.Parameter(value, requires_grad=False)
    decoder = copy.deepcopy(policy.decoder, memo)
    # Autocast was put around the original's forward pass; the engine has a pass of its own.
    decoder.get_submodule("model").__dict__.pop("forward", None)
    return Policy(
        model=decoder.eval(),
        tokenizer=policy.tokenizer,
        weight_format=policy.weight_format,
        training="none",
        compute_dtype=policy.compute_dtype,
    )
