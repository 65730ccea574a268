"""The Hopper layout: there and back without loss, and what the kernels' own steps make of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.formats import QuantizedWeight
from kernels.packing import PackedWeight, pack, unpack

MASK = 0x81C081C0


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _same(left: QuantizedWeight, right: QuantizedWeight) -> bool:
    a, b = left.tensors(), right.tensors()
    return a.keys() == b.keys() and all(torch.equal(_bits(a[k]), _bits(b[k])) for k in a)


def _weight(format: str, N: int, K: int, seed: int = 0) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(2 * torch.randn(N, 1, generator=generator))
    return reference.quantize(torch.randn(N, K, generator=generator) * spread, format)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4"])
@pytest.mark.parametrize(("N", "K"), [(16, 256), (33, 320), (1, 64), (100, 1088)])
def test_unpacking_returns_every_bit(format: str, N: int, K: int) -> None:
    weight = _weight(format, N, K)
    assert _same(unpack(pack(weight)), weight)


def test_blocks_with_a_zero_scale_keep_their_codes_and_weigh_nothing() -> None:
    weight = _weight("nvfp4", 32, 256)
    weight.block_scales.view(torch.uint8)[3, :4] = 0
    packed = pack(weight)
    assert _same(unpack(packed), weight)
    assert not bool(_emulated(packed)[3, :64].any())


def test_mxfp4_exponents_of_any_distance_come_back() -> None:
    weight = _weight("mxfp4", 16, 256)
    weight.block_scales[0, :4] = torch.tensor([0, 1, 127, 254], dtype=torch.uint8)
    assert _same(unpack(pack(weight)), weight)


def test_a_nan_scale_is_refused() -> None:
    weight = _weight("nvfp4", 16, 256)
    weight.block_scales.view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(ValueError, match="NaN"):
        pack(weight)


def _as_bf16(bits: Tensor) -> Tensor:
    """Value of the 16 bits of a bfloat16, in float64 (subnormals included)."""
    return (bits.to(torch.int32) << 16).view(torch.float32).double()


def _emulated(packed: PackedWeight) -> Tensor:
    """Repeat the narrow kernel's integer steps on E2M1 packs, lane by lane: (N, K) float64."""
    tiles, columns, _ = packed.packs.shape
    out = torch.zeros(tiles * 16, columns * 256, dtype=torch.float64)
    words = packed.packs[:, :, :2048].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    words = words.view(tiles, columns, 4, 32, 4)
    scales = packed.packs[:, :, 2048:].long()
    for lane in range(32):
        g, t = lane // 4, lane % 4
        entry = 4 * g + (t + g // 2) % 4
        for c in range(4):
            expanded = []
            for half in range(2):
                byte = scales[:, :, lane * 8 + 2 * c + half]
                raw = byte * 16 + 0x7580 if packed.format == "nvfp4" else byte * 128
                expanded.append(_as_bf16(raw))
            for j in range(4):
                w = words[:, :, c, entry, j]
                turned = [w] + [((w >> n) | (w << (32 - n))) & 0xFFFFFFFF for n in (3, 6)]
                pairs = [value & MASK for value in turned]
                pairs.append((((w & 0x001B001B) * 0x1084) & 0xFFFFFFFF) & MASK)
                for i, pair in enumerate(pairs):
                    row = torch.arange(tiles) * 16 + g + 8 * (i % 2)
                    at = c * 64 + t * 16 + 8 * (i // 2) + 2 * j
                    column = torch.arange(columns) * 256 + at
                    for n, bits in enumerate((pair & 0xFFFF, pair >> 16)):
                        value = _as_bf16(bits) * expanded[i % 2]
                        out[row[:, None], column[None, :] + n] = value
    N, K = packed.shape
    return out[:N, :K] * packed.gain.double()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_kernels_bit_steps_give_the_dequantised_values(format: str) -> None:
    weight = _weight(format, 48, 512)
    if format == "nvfp4":
        # Every finite positive E4M3 scale, subnormals among them.
        every = torch.arange(1, 127, dtype=torch.uint8)
        weight.block_scales.view(torch.uint8).view(-1)[: len(every)] = every
    emulated, dense = _emulated(pack(weight)), reference.dequantize(weight).double()
    assert torch.allclose(emulated, dense, rtol=3e-7, atol=0.0)
