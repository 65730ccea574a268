"""Random float32 policies of the three architectures, with adapters that do something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.models.policy import Policy, load_policy
from tests.repro.architectures import CLASSES, LLAMA3_ROPE

CHANGES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 48, "tie_word_embeddings": True},
    "llama": {"rope_parameters": dict(LLAMA3_ROPE)},
}
VOCABULARY = 101


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a random checkpoint without a tokenizer, end token 100."""
    made: dict[str, Path] = {}

    def write(architecture: str) -> Path:
        if architecture not in made:
            config_class, model_class = CLASSES[architecture]
            config = config_class(
                vocab_size=VOCABULARY,
                hidden_size=128,
                intermediate_size=192,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=160,
                initializer_range=0.12,
                eos_token_id=100,
                pad_token_id=0,
                bos_token_id=None,
                **CHANGES[architecture],
            )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(5)
                model = model_class(config)
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        if parameter.dim() == 1:
                            parameter.add_(torch.randn_like(parameter) * 0.3)
                        if "lm_head" in name or "embed_tokens" in name:
                            # Sharp enough that an argmax is not a matter of rounding.
                            parameter.mul_(3.0)
            made[architecture] = tmp_path_factory.mktemp(architecture)
            model.to(torch.bfloat16).save_pretrained(made[architecture])
        return made[architecture]

    return write


@pytest.fixture
def make_policy(random_folder: Callable[[str], Path]) -> Callable[..., Policy]:
    """Return a function that loads a random policy; adapters have B off zero."""

    def make(architecture: str = "qwen2", weight_format: str = "bf16", training: str = "lora"):
        policy = load_policy(
            random_folder(architecture),
            weight_format=weight_format,  # type: ignore[arg-type]
            training=training,  # type: ignore[arg-type]
            lora_rank=8,
            lora_alpha=16.0,
            seed=1,
        )
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        return policy

    return make


@pytest.fixture
def prompts() -> list[list[int]]:
    """Return five prompts of lengths 1 to 23."""
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randint(0, 100, (length,), generator=generator).tolist()
        for length in (7, 1, 23, 12, 7)
    ]
