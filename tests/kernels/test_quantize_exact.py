"""The quantiser without divisions: every case that could change a code, by exact arithmetic.

The code of |w| / d changes where RN(|w| / d) crosses one of the seven bounds of E2M1: where |w| / d
crosses the midpoint m between two neighbouring floats. For each m and bfloat16 w only the two
float32 d next to w / m can come close, so going through all of them proves a margin for all.
"""

from fractions import Fraction

import pytest
import torch

from kernels import reference
from kernels.formats import FORMATS, RECIPES
from tests.interpreted import needs_interpreter
from tests.kernels.conftest import assert_bitwise, assert_same_weight

# Four times the magnitudes between neighbouring E2M1 values.
BOUNDS = (1, 3, 5, 7, 10, 14, 20)
GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def _margins():
    """Return {(w, d): how far w / d is from a midpoint, relatively}, both by their mantissas."""
    margins = {}
    for bound in BOUNDS:
        # The midpoints between the float32 bound / 4 and its neighbours.
        t = Fraction(bound << (24 - (bound.bit_length() - 1)))
        below = Fraction(1, 2) if bound & (bound - 1) == 0 else Fraction(1)
        for midpoint in ((t + 1) / t * bound, (t - below) / t * bound):
            for w in range(128, 256):
                exact = Fraction(w) / midpoint
                while exact < 1 << 23:
                    exact *= 2
                while exact >= 1 << 24:
                    exact /= 2
                for d in (int(exact), int(exact) + 1):
                    if 1 << 23 <= d < 1 << 24:
                        gap = abs(exact / d - 1)
                        margins[w, d] = min(gap, margins.get((w, d), gap))
    return margins


def test_no_quotient_comes_close_to_a_change_of_code_but_one():
    """2**-33 is allowed: 2**-34 is added on purpose and the reciprocal's error is 2**-36."""
    close = {pair: gap for pair, gap in _margins().items() if gap < Fraction(1, 1 << 33)}
    assert list(close) == [(128, (1 << 24) - 1)]
    # There the exact quotient is above the midpoint, so adding is right.
    assert Fraction(1 << 24, (1 << 24) - 1) > 1 + Fraction(1, 1 << 24)


def _hard_weight(dtype):
    """Return weights whose quotients sit at and next to the bounds of E2M1, and extreme blocks."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(512, 256, generator=generator)
    amax = torch.exp2(torch.rand(512, 16, 1, generator=generator) * 16 - 12).bfloat16().float()
    blocks = weight.view(512, 16, 16)
    steps = amax / 6
    blocks[:, :, 1:15] = torch.tensor([bound / 4 for bound in BOUNDS] * 2) * steps
    blocks[:, :, 8:15] *= -1
    blocks[:, :, 0] = amax[:, :, 0]
    weight[0] = 0.0
    weight[1] = -0.0
    weight[2, ::3] = -1e-38
    weight[3] *= 1e-30
    weight[4, :16] = 100.0
    return weight.to(dtype)


@needs_interpreter
@pytest.mark.parametrize("factor", [1.0, 2.0**-60, 2.0**60, 3e-3])
@pytest.mark.parametrize("recipe", ["float32", "bfloat16"])
def test_the_portable_kernel_interpreted_has_the_references_bits(factor, recipe):
    from kernels.triton import quantize

    for dtype in (torch.bfloat16, torch.float32):
        weight = _hard_weight(torch.float32)[:64].mul(factor).to(dtype)
        expected = reference.quantize(weight, "nvfp4", recipe=recipe)
        assert_same_weight(quantize.quantize(weight, "nvfp4", recipe=recipe), expected, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU of compute capability 8.0 or newer")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("factor", [1.0, 2.0**-60, 2.0**60, 3e-3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_hard_weights_are_quantised_bit_for_bit_on_a_gpu(format, dtype, factor, recipe):
    from kernels.triton import quantize

    if dtype == torch.float16 and factor not in (1.0, 3e-3):
        pytest.skip("float16 holds no such weights")
    if format != "nvfp4" and recipe != "float32":
        pytest.skip("recipes are NVFP4's")
    weight = _hard_weight(torch.float32).mul(factor).to(dtype)
    scales = [None]
    if format == "nvfp4":
        own = reference.quantize(weight, format).global_scale
        # Its own; one that saturates block scales; one that makes most of them zero; an odd one.
        scales += [own.double() * share for share in (1.0, 1e-3, 1e4, 0.7)]
        scales.append(torch.tensor(2.0**-8 * factor, dtype=torch.float64))
    for scale in scales:
        expected = reference.quantize(weight, format, global_scale=scale, recipe=recipe)
        ours = quantize.quantize(weight.cuda(), format, global_scale=scale, recipe=recipe)
        assert_same_weight(ours.to("cpu"), expected, f"scale {scale}")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU of compute capability 8.0 or newer")
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_bfloat16_over_many_scales_is_quantised_bit_for_bit(recipe):
    """Every finite bfloat16 mantissa in every block scale, under encode scales of all kinds."""
    from kernels.triton import quantize

    mantissas = (torch.arange(0x3C00, 0x4300, dtype=torch.int32) << 16).view(torch.float32)
    generator = torch.Generator().manual_seed(3)
    for trial in range(24):
        amax = torch.exp2(torch.rand(16384, 1, generator=generator) * 12 - 5)
        picked = torch.randint(len(mantissas), (16384, 16), generator=generator)
        weight = torch.minimum(mantissas[picked], amax)
        weight = (weight * torch.randn(16384, 16, generator=generator).sign()).bfloat16()
        bits = (0x3F800000 + (0xFFFFFF if trial == 0 else trial * 348161 + 7)) & 0x3FFFFFFF
        g = torch.tensor(bits, dtype=torch.int32).view(torch.float32) * 2.0 ** (trial % 9)
        scale = g.double().reciprocal()
        expected = reference.quantize(weight, "nvfp4", global_scale=scale, recipe=recipe)
        ours = quantize.quantize(weight.cuda(), "nvfp4", global_scale=scale, recipe=recipe)
        for name in ("codes", "block_scales"):
            actual = getattr(ours, name).cpu().view(torch.uint8)
            assert_bitwise(actual, getattr(expected, name).view(torch.uint8), f"{name}, {trial}")
