"""The formats by enumeration and by property, against exact arithmetic."""

import math

import pytest
import torch

from kernels.formats import FORMATS, QuantizedWeight, pack_codes
from kernels.reference import dequantize, quantize
from tests.kernels.conftest import assert_same_weight

SIXTEEN = torch.arange(16, dtype=torch.uint8)
# Every scale that is a number.
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
EXPONENTS = torch.arange(255, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("format", "scales", "exact", "more"),
    [
        ("nvfp4", E4M3, E4M3.double(), {"encode_scale": torch.tensor(1.0)}),
        ("mxfp4", EXPONENTS, 2.0 ** (EXPONENTS.double() - 127), {}),
    ],
)
def test_every_code_times_every_scale_dequantises_exactly(format, scales, exact, more):
    repeats = FORMATS[format].block // 16
    codes = pack_codes(SIXTEEN.repeat(len(scales), repeats))
    weight = QuantizedWeight(format=format, codes=codes, block_scales=scales[:, None], **more)
    values = torch.tensor(FORMATS[format].values, dtype=torch.float64)
    expected = (exact[:, None] * values).repeat(1, repeats)
    assert torch.equal(dequantize(weight), expected.float())
    # Two significant bits times four fit bfloat16's eight: no rounding there either.
    assert torch.equal(dequantize(weight, torch.bfloat16), expected.bfloat16())


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_and_strides_quantise_as_their_float32_values(format, dtype):
    weight = torch.randn(128, 192, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = quantize(weight.float().contiguous(), format)
    views = (weight, weight.t().contiguous().t(), torch.stack((weight, weight), -1)[..., 1])
    for view in views:
        assert_same_weight(quantize(view, format), expected)


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
