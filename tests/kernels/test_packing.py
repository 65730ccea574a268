"""The Hopper layout: there and back without loss, zeros and extremes among it."""

import pytest
import torch

from kernels import reference
from kernels.packing import pack, unpack


def _bits(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _same(left, right):
    a, b = left.tensors(), right.tensors()
    return a.keys() == b.keys() and all(torch.equal(_bits(a[k]), _bits(b[k])) for k in a)


def _weight(format, N, K, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(2 * torch.randn(N, 1, generator=generator))
    return reference.quantize(torch.randn(N, K, generator=generator) * spread, format)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4"])
@pytest.mark.parametrize(("N", "K"), [(16, 256), (33, 320), (1, 64), (100, 1088)])
def test_unpacking_returns_every_bit(format, N, K):
    weight = _weight(format, N, K)
    assert _same(unpack(pack(weight)), weight)


def test_scales_of_any_size_come_back_with_their_codes_and_a_nan_is_refused():
    nvfp4, mxfp4 = _weight("nvfp4", 32, 256), _weight("mxfp4", 16, 256)
    nvfp4.block_scales.view(torch.uint8)[3, :4] = 0
    mxfp4.block_scales[0, :4] = torch.tensor([0, 1, 127, 254], dtype=torch.uint8)
    for weight in (nvfp4, mxfp4):
        assert _same(unpack(pack(weight)), weight)
    nvfp4.block_scales.view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(ValueError, match="NaN"):
        pack(nvfp4)
