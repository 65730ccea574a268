"""The sampler that training takes for a policy: the engine on a CUDA device, else plain torch.

The engine reads the trained tensors themselves. Under full training those are float32 masters,
which it would run without the trainer's autocast, or rows of them where ranks divide them: there,
and only there, it samples from a whole copy, which `refresh` renews after every update. Where an
arm folds its adapter in, the base itself holds the sum in a rollout, and its own bits after it.

Easy mistakes
-------------
* A cache sized by what is free at the start leaves nothing for the update's activations.
* The copy's matrices are views of fused ones: values must be copied into them, never replaced.
* Added noise sits on the norms of the policy that is trained; the copy has norms of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from repro.models.loading import build_on_meta, put_parameters
from repro.models.lora import dense_bases, fold_adapter, folding_loss
from repro.models.memory_plan import CACHE_SHARE, MOMENT_BYTES, MOST_SLOTS, gathered_bytes
from repro.models.norms import block_norms, final_norm, wrap_norms
from repro.models.policy import Policy, trainable_parameters
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig, blocks_for, cache_blocks
from repro.rollout.sampler import Completion, Sampler
from repro.rollout.torch_sampler import TorchSampler
from repro.spec.arm import OptimizerName


def sampler_for(
    policy: Policy,
    *,
    rows: int,
    max_new_tokens: int,
    max_positions: int,
    optimizer: OptimizerName = "adamw",
    folded: bool = False,
) -> Sampler:
    """Return the sampler for a policy where it is; of ranks that divide it all must ask.

    Parameters
    ----------
    rows
        Most rows asked for at once.
    max_new_tokens, max_positions
        Longest completion, and longest prompt and completion together; no more than the policy has.
    optimizer
        That of full training, which will need memory for its moments.
    folded
        Whether the adapter is folded into the base for each rollout.
    """
    on_engine = policy.device.type == "cuda" and policy.compute_dtype == torch.bfloat16

    def engine(sampled: Policy) -> Engine:
        decoder: Any = sampled.decoder
        positions = min(max_positions, decoder.config.max_position_embeddings)
        config = EngineConfig(
            slots=max(1, min(rows, MOST_SLOTS)),
            max_positions=positions,
            max_new_tokens=min(max_new_tokens, positions - 1),
        )
        reserved = _training_bytes(policy, optimizer)
        blocks = cache_blocks(sampled, config, share=CACHE_SHARE, reserved=reserved)
        # One row must fit, or nothing can be sampled.
        return Engine(sampled, replace(config, cache_blocks=max(blocks, blocks_for(1, config))))

    around = engine if on_engine else TorchSampler
    if folded:
        return FoldedSampler(policy, around)
    if policy.training == "full" and (on_engine or policy.shards is not None):
        return CopySampler(policy, around)
    return around(policy)


def _training_bytes(policy: Policy, optimizer: OptimizerName) -> int:
    """Return the bytes that full training will take besides: gradients, moments, gathered weights.

    An adapter's are small beside a cache.
    """
    if policy.training != "full":
        return 0
    trained = sum(p.numel() for p in trainable_parameters(policy).values())
    own = int((4 + MOMENT_BYTES[optimizer]) * trained)
    if policy.shards is None:
        return own
    decoder: Any = policy.decoder
    block = sum(p.numel() for p in decoder.model.layers[0].parameters())
    table = decoder.get_output_embeddings().weight.numel()
    return own + sum(gathered_bytes(table, block, policy.shards.group.size())[:2])


class CopySampler:
    """A sampler, made by `around`, of a whole copy of a policy whose float32 masters train."""

    def __init__(self, policy: Policy, around: Callable[[Policy], Sampler]) -> None:
        self.policy = policy
        self.copied = _copy_of(policy)
        self.engine = around(self.copied)

    def of_trained(self) -> Policy:
        """Return the policy with the copy's weights, which one rank has whole."""
        return replace(self.policy, model=self.copied.model, shards=None)

    def refresh(self) -> None:
        """Copy the masters as they are now into the tensors that are read; all ranks must ask."""
        read = dict(self.copied.decoder.named_parameters())
        with torch.no_grad():
            for name, whole in whole_parameters(self.policy, self.policy.compute_dtype):
                read[name].copy_(whole)
        self.engine.refresh()

    def sample(self, *request: Any, **of_rows: Any) -> list[Completion]:
        """Sample under the copy with the policy's added noise; see `Sampler.sample`."""
        trained, copied = self.policy.decoder, self.copied.decoder
        norms = block_norms(trained) | {"": final_norm(trained)}
        copies = block_norms(copied) | {"": final_norm(copied)}
        for name, norm in norms.items():
            copies[name].noise = norm.noise
        return self.engine.sample(*request, **of_rows)


class FoldedSampler:
    """A sampler, made by `around`, of a policy whose adapter is folded into its base meanwhile.

    It is made while the adapter is folded in, so it does no adapter's work. Outside of `sample` the
    base has its own bits, from copies that are kept: trainers multiply by base and adapter apart.
    """

    def __init__(self, policy: Policy, around: Callable[[Policy], Sampler]) -> None:
        self.policy = policy
        self.rollouts = 0
        bases = dense_bases(policy.model)
        self._kept = [(layer, base, base.weight.detach().clone()) for layer, base in bases]
        with self._folded():
            self.engine = around(policy)

    @contextmanager
    def _folded(self) -> Iterator[None]:
        try:
            fold_adapter(self.policy.model)
            yield
        finally:
            with torch.no_grad():
                for layer, base, kept in self._kept:
                    base.weight.copy_(kept)
                    layer.merged_adapters.clear()

    def receipt(self) -> dict[str, Any]:
        """Return facts: the rollouts that were folded, and what of the adapter rounding takes."""
        done = {"rollouts": self.rollouts, "update_lost": folding_loss(self.policy.model)}
        road = {"road": self.engine.road} if isinstance(self.engine, Engine) else {}
        return {"folded": done} | road

    def refresh(self) -> None:
        """See `Sampler.refresh`."""
        self.engine.refresh()

    def sample(self, *request: Any, **of_rows: Any) -> list[Completion]:
        """Fold, sample, and restore the base, also after an error; see `Sampler.sample`."""
        with self._folded():
            completions = self.engine.sample(*request, **of_rows)
        self.rollouts += 1
        return completions


def whole_parameters(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of a fully trained decoder's parameters, whole, by name; all ranks must ask."""
    shards = policy.shards
    for name, parameter in policy.decoder.named_parameters():
        own = parameter if shards is None else shards.parts[name]
        copied = own.detach().to(dtype, copy=True)
        yield name, copied if shards is None else shards.whole(name, copied)


def _copy_of(policy: Policy) -> Policy:
    """Return a frozen copy of the policy in its compute dtype; all ranks must ask."""
    trained: Any = policy.decoder
    decoder: Any = build_on_meta(trained.config)
    whole = dict(whole_parameters(policy, policy.compute_dtype))
    put_parameters(decoder, lambda name, shape: whole.get(name))
    decoder.generation_config = trained.generation_config
    wrap_norms(decoder)
    return Policy(
        model=decoder,
        tokenizer=policy.tokenizer,
        weight_format=policy.weight_format,
        training="none",
        compute_dtype=policy.compute_dtype,
    )
