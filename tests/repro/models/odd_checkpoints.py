"""Checkpoints of two layers whose bfloat16 weights are made of bits, the same on every machine.

A value comes from an integer hash of (tensor, row, column), so digests can be stored. The matrices
reach what scales of weights get wrong: many magnitudes, zeros of both signs, subnormals, single
outliers, and q, k, v (gate, up) that share one global scale.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.repro.architectures import small_model

# The exponent field of a projection's largest values, by its place in the network; 127 is 1.0.
EXPONENTS = (120, 97, 123, 240, 131, 119, 121, 116, 122, 90, 0, 30, 28, 0)
ZERO, SUBNORMAL = "layers.1.mlp.down_proj.weight", "layers.1.self_attn.o_proj.weight"


def hashed(seed: int, count: int) -> Tensor:
    """Return `count` integers from 0 to 2**31 - 1, int64, by an integer hash."""
    x = (torch.arange(count, dtype=torch.int64) + (seed << 32)) * 0x9E3779B97F4A7C1 + seed
    for shift, factor in ((29, 0x3C79AC492BA7B65), (31, 0x1C69B3F74AC4AE3)):
        x = (x ^ (x >> shift)) * factor
    return (x ^ (x >> 33)) & 0x7FFFFFFF


def odd_matrix(seed: int, shape: tuple[int, ...], exponent: int) -> Tensor:
    """Return bfloat16 values below 2**(exponent - 126), with blocks of 16 of every kind."""
    count = int(torch.Size(shape).numel())
    bits, kind = hashed(seed, count), hashed(seed + 7919, -(-count // 16))
    depth = (kind % 11).repeat_interleave(16)[:count]  # a block's magnitude
    fall = (bits >> 16) % 6  # an element's, within its block
    field = (exponent - depth - fall).clamp(min=0)
    values = ((bits & 1) << 15) | (field << 7) | ((bits >> 1) & 0x7F)
    special = ((kind >> 8) % 16).repeat_interleave(16)[:count]
    values = torch.where(special == 0, values & 0x8000, values)  # zeros of both signs
    values = torch.where(special == 1, values & 0x807F, values)  # subnormals
    outlier = (special == 2) & (torch.arange(count) % 16 == 5)
    values = torch.where(outlier, values & 0x807F | (exponent << 7), values)
    return values.to(torch.int32).to(torch.int16).view(torch.bfloat16).view(shape).clone()


def write_odd(architecture: str, folder: Path) -> Path:
    """Write a bfloat16 checkpoint of an architecture with such weights and return its folder."""
    with torch.random.fork_rng(devices=[]):
        model = small_model(architecture)
    projections = 0
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters(), start=1):
            exponent = 123
            if name.endswith("_proj.weight"):
                exponent = EXPONENTS[projections]
                projections += 1
            values = odd_matrix(seed, tuple(parameter.shape), exponent)
            if name.endswith(ZERO):
                values.zero_()
            if name.endswith(SUBNORMAL):
                values = (values.view(torch.int16) & -32641).view(torch.bfloat16)
            parameter.copy_(values)
    model.save_pretrained(folder)
    return folder
