"""Construction, storage and refusal of `QuantizedWeight`; the Hopper layout, there and back."""

import math

import pytest
import torch
from safetensors.torch import load, save

from kernels.formats import FORMATS, TRAINED_SPREAD, QuantizedWeight, random_weight
from kernels.ops_linear import weight_bytes
from kernels.packing import pack, unpack
from kernels.reference import dequantize, quantize
from repro.spec.arm import FOUR_BIT_FORMATS
from tests.kernels.conftest import assert_same_weight


def _weight(format, N=48, K=128, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(2 * torch.randn(N, 1, generator=generator))
    return quantize(torch.randn(N, K, generator=generator) * spread, format)


def test_settings_name_the_formats_that_there_are():
    assert set(FOUR_BIT_FORMATS) == set(FORMATS)


@pytest.mark.parametrize(
    ("format", "scales"),
    [("nvfp4", [117, 118, 123, 108]), ("mxfp4", [119, 120, 120, 121]), ("nf4", [98, 154, 236, 60])],
)
def test_random_weights_are_those_of_the_records_and_spread_like_trained_ones(format, scales):
    weight = random_weight(format, 48, 896, torch.Generator().manual_seed(5))
    assert weight.codes[0, :4].tolist() == [99, 206, 239, 189]
    assert weight.block_scales.view(torch.uint8)[-1, -4:].tolist() == scales
    assert TRAINED_SPREAD < float(dequantize(weight).std()) < 1.6 * TRAINED_SPREAD


@pytest.mark.parametrize("format", list(FORMATS))
def test_a_weight_survives_safetensors_and_moves_whole(format):
    weight = _weight(format)
    # Two scalars beside them.
    assert weight.nbytes == weight_bytes(format, 48, 128) + 8 * FORMATS[format].has_global_scale
    tensors = weight.tensors()
    back = QuantizedWeight.from_tensors(format, load(save(tensors)), (48, 128))
    assert_same_weight(back, weight)
    moved = weight.to("meta")
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}
    assert moved.shape == (48, 128)
    for dropped in tensors.keys() & {"global_scale", "encode_scale"}:
        # Either of the two gives the other.
        rest = {name: tensor for name, tensor in tensors.items() if name != dropped}
        other = QuantizedWeight.from_tensors(format, rest).tensors()[dropped]
        assert float(other) == pytest.approx(float(tensors[dropped]), rel=2e-7)


def test_a_layout_that_does_not_fit_is_refused():
    weight = _weight("nvfp4")
    good = weight.tensors()
    cases = [
        ({**good, "codes": good["codes"].int()}, "codes is torch.int32"),
        ({**good, "codes": good["codes"][:, :-1]}, "multiple of 16"),
        ({**good, "codes": good["codes"].flatten()}, r"\(N, K/2\) is needed"),
        ({**good, "block_scales": good["block_scales"][:-1]}, r"block_scales is .* \(47, 8\)"),
        ({**good, "block_scales": good["block_scales"].float()}, "block_scales is torch.float32"),
        ({**good, "encode_scale": good["encode_scale"].reshape(1)}, "encode_scale is"),
        ({"codes": good["codes"], "block_scales": good["block_scales"]}, "global_scale is missing"),
        ({**good, "codes": good["codes"].to("meta")}, "the codes are on meta"),
    ]
    for tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            QuantizedWeight.from_tensors("nvfp4", tensors)
    with pytest.raises(ValueError, match=r"\(48, 128\); \(48, 64\) is needed"):
        QuantizedWeight.from_tensors("nvfp4", good, (48, 64))
    with pytest.raises(ValueError, match="must be one of"):
        QuantizedWeight.from_tensors("fp4", good)


def test_scales_that_no_writer_produces_are_refused():
    never = {"nvfp4": (0x7F, 0x80, 0xB8), "mxfp4": (255,), "nf4": (math.nan, math.inf, -1.0, -0.0)}
    for format, values in never.items():
        for value in values:
            tensors = _weight(format).tensors()
            scales = tensors["block_scales"]
            (scales.view(torch.uint8) if scales.itemsize == 1 else scales)[2, 1] = value
            with pytest.raises(ValueError, match=f"{format} block_scales holds NaN"):
                QuantizedWeight.from_tensors(format, tensors)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("N", "K"), [(16, 256), (33, 320), (1, 64), (100, 1088)])
def test_unpacking_returns_every_bit(format, N, K):
    weight = _weight(format, N, K)
    assert_same_weight(unpack(pack(weight)), weight)


def test_scales_of_any_size_come_back_with_their_codes_and_a_nan_is_refused():
    nvfp4, mxfp4 = _weight("nvfp4", 32, 256), _weight("mxfp4", 16, 256)
    nvfp4.block_scales.view(torch.uint8)[3, :4] = 0
    mxfp4.block_scales[0, :4] = torch.tensor([0, 1, 127, 254], dtype=torch.uint8)
    for weight in (nvfp4, mxfp4):
        assert_same_weight(unpack(pack(weight)), weight)
    nvfp4.block_scales.view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(ValueError, match="NaN"):
        pack(nvfp4)
