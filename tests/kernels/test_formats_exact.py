"""The formats by enumeration and by property, against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.formats import (
    E2M1_MAGNITUDES,
    FORMATS,
    QuantizedWeight,
    pack_codes,
    swap_nibbles,
)
from kernels.reference import decoded_block_scales, dequantize, quantize

SIXTEEN = torch.arange(16, dtype=torch.uint8)


def unpack_codes(packed: Tensor) -> Tensor:
    """Undo `pack_codes`: (..., K / 2) bytes to (..., K) codes, uint8."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def _e2m1_exactly(code: int) -> Fraction:
    """Decode sign, exponent and mantissa by the definition of E2M1 (bias 1)."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    if exponent == 0:
        magnitude = Fraction(mantissa, 2)
    else:
        magnitude = (1 + Fraction(mantissa, 2)) * 2 ** (exponent - 1)
    return -magnitude if sign else magnitude


def _e4m3_exactly(bits: int) -> Fraction:
    """Decode a non-negative E4M3 by its definition (bias 7)."""
    exponent, mantissa = bits >> 3, bits & 7
    if exponent == 0:
        return Fraction(mantissa, 8) * Fraction(2) ** -6
    return (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def test_every_nvfp4_code_times_every_finite_e4m3_scale_dequantises_exactly() -> None:
    scales = torch.arange(127, dtype=torch.uint8).view(-1, 1).view(torch.float8_e4m3fn)
    weight = QuantizedWeight(
        format="nvfp4",
        codes=pack_codes(SIXTEEN.repeat(127, 1)),
        block_scales=scales,
        encode_scale=torch.tensor(1.0),
    )
    dense = dequantize(weight)
    for bits in range(127):
        for code in range(16):
            expected = _e2m1_exactly(code) * _e4m3_exactly(bits)
            assert Fraction(float(dense[bits, code])) == expected, (bits, code)
    # Two significant bits times four fit bfloat16's eight: no rounding there either.
    assert torch.equal(dequantize(weight, torch.bfloat16).float(), dense)


def test_every_mxfp4_code_times_every_exponent_dequantises_exactly() -> None:
    exponents = torch.arange(255, dtype=torch.uint8).view(-1, 1)
    weight = QuantizedWeight(
        format="mxfp4", codes=pack_codes(SIXTEEN.repeat(255, 2)), block_scales=exponents
    )
    dense = dequantize(weight)
    for exponent in range(255):
        for code in range(16):
            expected = _e2m1_exactly(code) * Fraction(2) ** (exponent - 127)
            if abs(expected) > torch.finfo(torch.float32).max:
                assert math.isinf(float(dense[exponent, code]))
            else:
                assert Fraction(float(dense[exponent, code])) == expected, (exponent, code)


def test_packing_is_a_bijection_with_the_even_element_low() -> None:
    low, high = torch.meshgrid(SIXTEEN, SIXTEEN, indexing="ij")
    codes = torch.stack((low, high), dim=-1).view(1, -1)
    packed = pack_codes(codes)
    assert sorted(packed.flatten().tolist()) == list(range(256))
    assert torch.equal(packed.flatten(), (low + 16 * high).flatten())
    assert torch.equal(unpack_codes(packed), codes)
    assert torch.equal(swap_nibbles(swap_nibbles(packed)), packed)
    assert torch.equal(unpack_codes(swap_nibbles(packed)).view(-1, 2), codes.view(-1, 2).flip(1))


def _nearest_even(y: Fraction) -> int:
    """Return the E2M1 code of a non-negative number by comparing distances, ties to even."""
    grid = [Fraction(v) for v in E2M1_MAGNITUDES]
    best = min(abs(y - v) for v in grid)
    nearest = [code for code, v in enumerate(grid) if abs(y - v) == best]
    return nearest[0] if len(nearest) == 1 else next(code for code in nearest if code % 2 == 0)


def test_e2m1_rounds_to_nearest_with_ties_to_the_even_code_and_saturates() -> None:
    edges = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, *E2M1_MAGNITUDES]
    points = [0.0, 5.999]
    for edge in map(torch.tensor, edges):
        for toward in (-math.inf, edge, math.inf):
            points.append(abs(float(torch.nextafter(edge, torch.as_tensor(toward)))))
    points += torch.linspace(0, 6, 997).tolist()
    # A 4 to 6 elsewhere in the block fixes the MXFP4 scale to one; then y itself is rounded.
    block = torch.zeros(len(points), 32)
    block[:, 0], block[:, 1], block[:, 2] = torch.tensor(points), 4.0, -torch.tensor(points)
    weight = quantize(block, "mxfp4")
    assert bool((weight.block_scales == 127).all())
    codes = unpack_codes(weight.codes)
    for at, point in enumerate(points):
        exact = Fraction(float(torch.tensor(point)))
        assert int(codes[at, 0]) == _nearest_even(exact), point
        assert int(codes[at, 2]) & 7 == _nearest_even(exact), point
    above = quantize(torch.full((1, 32), 7.99), "mxfp4")
    assert torch.equal(dequantize(above), torch.full((1, 32), 6.0))


@pytest.mark.parametrize("format", list(FORMATS))
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), decade=st.integers(-20, 20), spread=st.floats(0.0, 12.0))
def test_the_error_is_at_most_half_a_grid_step(
    format: str, seed: int, decade: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 128, generator=generator)
    weight = weight * torch.exp(spread * torch.rand(8, 128, generator=generator)) * 10.0**decade
    quantized = quantize(weight, format)
    block = quantized.block
    scale = decoded_block_scales(quantized).double().unsqueeze(-1)
    scaled = weight.double().view(8, -1, block) / scale
    grid = torch.tensor(sorted(FORMATS[format].values), dtype=torch.float64)
    # Saturation: a block scale rounded down puts amax up to 1/16 above 6 (NVFP4); MXFP4's floor
    # lets it reach 8. Such elements take the largest code.
    limited = scaled.clamp(grid[0], grid[-1])
    right = torch.searchsorted(grid, limited).clamp(1, 15)
    half = (grid[right] - grid[right - 1]) / 2
    values = dequantize(quantized).double().view(8, -1, block) / scale
    assert bool(((values - limited).abs() <= half * (1 + 1e-5)).all())
    above = 8.0 if format == "mxfp4" else grid[-1] * (1 + 1 / 16) + 1e-5
    normal = scale.squeeze(-1) * _encode(quantized) >= 2.0**-6  # not E4M3 subnormal
    assert bool((scaled.abs().amax(-1)[normal] <= above).all())


def _encode(weight: QuantizedWeight) -> float:
    return 1.0 if weight.encode_scale is None else float(weight.encode_scale)


@pytest.mark.parametrize("format", list(FORMATS))
def test_a_matrix_of_zeros_comes_back_as_zeros(format: str) -> None:
    quantized = quantize(torch.zeros(4, 128), format)
    assert torch.equal(dequantize(quantized), torch.zeros(4, 128))


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_and_strides_quantise_as_their_float32_values(
    format: str, dtype: torch.dtype
) -> None:
    weight = torch.randn(128, 192, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = quantize(weight.float().contiguous(), format)
    views = (weight, weight.t().contiguous().t(), torch.stack((weight, weight), -1)[..., 1])
    for view in views:
        actual = quantize(view, format)
        for name, tensor in expected.tensors().items():
            assert torch.equal(actual.tensors()[name].view(torch.uint8) if tensor.dim() else
                               actual.tensors()[name], tensor.view(torch.uint8) if tensor.dim()
                               else tensor), name  # fmt: skip


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_and_located(format: str, bad: float) -> None:
    weight = torch.randn(5, 192)
    weight[3, 130] = bad
    first = 130 // FORMATS[format].block * FORMATS[format].block
    with pytest.raises(ValueError, match=rf"row 3, columns {first} to"):
        quantize(weight, format)


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("shape", [(4, 40), (4, 0), (0, 64), (64,), (2, 2, 64)])
def test_a_shape_that_does_not_fit_is_refused(format: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape"):
        quantize(torch.zeros(shape), format)


def test_options_of_another_format_are_refused() -> None:
    weight = torch.randn(4, 64)
    with pytest.raises(ValueError, match="global_scale is given; mxfp4"):
        quantize(weight, "mxfp4", global_scale=torch.tensor(1.0))
    with pytest.raises(ValueError, match="recipe is 'bfloat16'; mxfp4 has float32 only"):
        quantize(weight, "mxfp4", recipe="bfloat16")
    with pytest.raises(ValueError, match="recipe is 'float16'; it must be one of"):
        quantize(weight, "nvfp4", recipe="float16")
    with pytest.raises(ValueError, match="must be one of nvfp4, mxfp4, nf4"):
        quantize(weight, "int4")
    with pytest.raises(ValueError, match="must be positive, finite"):
        quantize(weight, "nvfp4", global_scale=torch.tensor(0.0))
    with pytest.raises(ValueError, match="floating matrix"):
        quantize(torch.zeros(4, 64, dtype=torch.int32), "nf4")


@pytest.mark.parametrize("format", list(FORMATS))
def test_chunks_of_rows_change_no_bit(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 256, generator=torch.Generator().manual_seed(6))
    whole = quantize(weight, format)
    dense = dequantize(whole, torch.bfloat16)
    monkeypatch.setattr("kernels.reference_quantize._CHUNK", 256 * 5)
    parts = quantize(weight, format)
    assert torch.equal(parts.codes, whole.codes)
    assert torch.equal(dequantize(parts, torch.bfloat16), dense)
