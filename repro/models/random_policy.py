"""Real model shapes with random weights, built straight on a device in any weight format.

Time and memory do not depend on the values of weights, so the `systems` tier needs no download: the
shapes are those of the published checkpoints, the values random with a real model's spread. 4-bit
projections are drawn as codes and scales; a dense copy of the model never exists.

Easy to get wrong: weights of zero run faster than real ones (the card draws less power and clocks
higher), so everything is random, LoRA's B included, which is zero in a fresh adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from kernels.formats import TRAINED_SPREAD, QuantizedWeight, random_weight
from repro.models.fused_weights import fuse_projections
from repro.models.loading import build_on_meta, linears_of, put_parameters
from repro.models.lora import adapter_layers, attach_adapter
from repro.models.norms import wrap_norms
from repro.models.policy import Policy, base_bytes, resolve_dtype, set_trainable
from repro.spec.arm import WeightFormat
from repro.spec.checks import require
from repro.spec.config import derive_seed
from repro.spec.facts import Facts
from repro.spec.shapes import shape_named


def shape_config(name: str) -> dict[str, Any]:
    """Return the config values of a shape such as `qwen2.5-7b`; `ValueError` lists the sizes."""
    shape = shape_named(name.removeprefix("qwen2.5-"))
    return {
        "model_type": "qwen2",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.key_heads,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": shape.tied,
    }


def random_policy(
    shape: str | dict[str, Any],
    *,
    weight_format: WeightFormat,
    lora_rank: int,
    lora_alpha: float | None = None,
    compute_dtype: str | torch.dtype = "bfloat16",
    seed: int,
    device: str | torch.device,
    full: bool = False,
) -> Policy:
    """Return a policy of a shape with random weights, on `device`.

    Parameters
    ----------
    shape
        A name that `shape_config` knows, or config values with `model_type`.
    lora_rank
        0 leaves the adapter out. A and B are both random.
    lora_alpha
        None takes the rank: a scaling of 1.
    full
        Train every parameter, as float32 masters, instead of an adapter; needs bf16 weights.

    Returns
    -------
    Policy
        Without tokenizer; nothing but the adapter is trainable, unless `full`.
    """
    require(
        not full or (weight_format == "bf16" and lora_rank == 0),
        f"full training of {weight_format} weights with LoRA rank {lora_rank}; it needs bf16 and 0",
    )
    values = shape_config(shape) if isinstance(shape, str) else dict(shape)
    dtype, target = resolve_dtype(compute_dtype), torch.device(device)
    stored_dtype = torch.float32 if full else dtype
    model: Any = build_on_meta(AutoConfig.for_model(**values))
    generator = torch.Generator(target).manual_seed(derive_seed(seed, "random weights"))

    def value_of(name: str, shape: tuple[int, ...]) -> Tensor:
        value = torch.empty(shape, dtype=torch.bfloat16, device=target)
        value = value.normal_(0.0, TRAINED_SPREAD, generator=generator).to(stored_dtype)
        # Gains scatter about one; everything else about zero.
        return value + 1 if "norm" in name else value

    def codes_of(_name: str, shape: tuple[int, int]) -> QuantizedWeight:
        return random_weight(weight_format, *shape, generator)

    put_parameters(model, value_of, codes_of if weight_format != "bf16" else None)
    wrap_norms(model)
    facts = Facts(linears=linears_of(model), base_bytes=base_bytes(model))
    fuse_projections(model, dtype)
    adapted: nn.Module = model
    if lora_rank:
        alpha = float(lora_rank) if lora_alpha is None else lora_alpha
        adapted = attach_adapter(model, rank=lora_rank, alpha=alpha, seed=seed)
        for _, layer in adapter_layers(adapted):
            with torch.no_grad():
                layer.adapter()[1].normal_(0.0, TRAINED_SPREAD, generator=generator)
    policy = Policy(
        model=adapted.eval(),
        tokenizer=None,
        weight_format=weight_format,
        training="full" if full else "lora" if lora_rank else "none",
        compute_dtype=dtype,
        facts=facts,
    )
    if full:
        set_trainable(policy, norms_trained=False)
    return policy
