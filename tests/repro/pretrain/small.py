"""A small recipe."""

from __future__ import annotations

from repro.pretrain.recipes import Recipe

TINY = Recipe(
    hidden_size=64,
    layers=2,
    heads=2,
    key_value_heads=1,
    intermediate_size=64,
    steps=12,
    tokens_per_batch=600,
    warmup_steps=2,
    checkpoint_every=100,
    quality_problems=5,
    threads=1,
)
