"""The decoder architectures that the suite reads, by transformers' own classes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def qwen2_shape(hidden: int, *, layers: int = 1, vocabulary: int = 256) -> dict[str, Any]:
    """Return a small Qwen2's sizes, for `repro.models.random_policy.random_policy`."""
    return {
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }


SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# Llama 3's rotation, for a context of 32 positions stretched by 4.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def small_model(architecture: str, **changes: Any) -> Any:
    """Return a bfloat16 model of 2 layers with what its architecture may have of its own."""
    config_class, model_class = CLASSES[architecture]
    values: dict[str, Any] = SIZES | {"tie_word_embeddings": architecture != "llama"}
    if architecture == "qwen3":
        # Heads of 48, not 128 / 4: the size must come from the config, not from a division.
        values["head_dim"] = 48
    if architecture == "llama":
        values |= {"attention_bias": True, "rope_parameters": dict(LLAMA3_ROPE)}
    return model_class(config_class(**(values | changes))).to(torch.bfloat16).eval()
