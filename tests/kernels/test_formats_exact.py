"""The formats by enumeration and by property, against exact arithmetic."""

import math
from fractions import Fraction

import pytest
import torch

from kernels.formats import FORMATS, QuantizedWeight, pack_codes, swap_nibbles
from kernels.reference import dequantize, quantize
from tests.kernels.conftest import assert_bitwise

SIXTEEN = torch.arange(16, dtype=torch.uint8)


def unpack_codes(packed):
    """Undo `pack_codes`: (..., K / 2) bytes to (..., K) codes, uint8."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def _e2m1_exactly(code):
    """Decode sign, exponent and mantissa by the definition of E2M1 (bias 1)."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    if exponent == 0:
        magnitude = Fraction(mantissa, 2)
    else:
        magnitude = (1 + Fraction(mantissa, 2)) * 2 ** (exponent - 1)
    return -magnitude if sign else magnitude


def _e4m3_exactly(bits):
    """Decode a non-negative E4M3 by its definition (bias 7)."""
    exponent, mantissa = bits >> 3, bits & 7
    if exponent == 0:
        return Fraction(mantissa, 8) * Fraction(2) ** -6
    return (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def test_every_nvfp4_code_times_every_finite_e4m3_scale_dequantises_exactly():
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


def test_every_mxfp4_code_times_every_exponent_dequantises_exactly():
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


def test_packing_is_a_bijection_with_the_even_element_low():
    low, high = torch.meshgrid(SIXTEEN, SIXTEEN, indexing="ij")
    codes = torch.stack((low, high), dim=-1).view(1, -1)
    packed = pack_codes(codes)
    assert sorted(packed.flatten().tolist()) == list(range(256))
    assert torch.equal(packed.flatten(), (low + 16 * high).flatten())
    assert torch.equal(unpack_codes(packed), codes)
    assert torch.equal(swap_nibbles(swap_nibbles(packed)), packed)
    assert torch.equal(unpack_codes(swap_nibbles(packed)).view(-1, 2), codes.view(-1, 2).flip(1))


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_and_strides_quantise_as_their_float32_values(format, dtype):
    weight = torch.randn(128, 192, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = quantize(weight.float().contiguous(), format)
    views = (weight, weight.t().contiguous().t(), torch.stack((weight, weight), -1)[..., 1])
    for view in views:
        actual = quantize(view, format)
        for name, tensor in expected.tensors().items():
            assert_bitwise(actual.tensors()[name], tensor, name)


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_and_located(format, bad):
    weight = torch.randn(5, 192)
    weight[3, 130] = bad
    first = 130 // FORMATS[format].block * FORMATS[format].block
    with pytest.raises(ValueError, match=rf"row 3, columns {first} to"):
        quantize(weight, format)


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("shape", [(4, 40), (4, 0), (0, 64), (64,), (2, 2, 64)])
def test_a_shape_that_does_not_fit_is_refused(format, shape):
    with pytest.raises(ValueError, match=r"shape"):
        quantize(torch.zeros(shape), format)


def test_options_of_another_format_are_refused():
    weight = torch.randn(4, 64)
    with pytest.raises(ValueError, match="global_scale is given; mxfp4"):
        quantize(weight, "mxfp4", global_scale=torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"'bfloat16'.*mxfp4.*float32"):
        quantize(weight, "mxfp4", recipe="bfloat16")
    with pytest.raises(ValueError, match="'float16'"):
        quantize(weight, "nvfp4", recipe="float16")
    with pytest.raises(ValueError, match="nvfp4, mxfp4, nf4"):
        quantize(weight, "int4")
    with pytest.raises(ValueError, match="positive"):
        quantize(weight, "nvfp4", global_scale=torch.tensor(0.0))
    with pytest.raises(ValueError, match="floating matrix"):
        quantize(torch.zeros(4, 64, dtype=torch.int32), "nf4")


@pytest.mark.parametrize("format", list(FORMATS))
def test_chunks_of_rows_change_no_bit(format, monkeypatch):
    weight = torch.randn(37, 256, generator=torch.Generator().manual_seed(6))
    whole = quantize(weight, format)
    dense = dequantize(whole, torch.bfloat16)
    monkeypatch.setattr("kernels.reference_quantize._CHUNK", 256 * 5)
    parts = quantize(weight, format)
    assert torch.equal(parts.codes, whole.codes)
    assert torch.equal(dequantize(parts, torch.bfloat16), dense)
