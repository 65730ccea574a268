"""Quantise to 4 bits on a GPU, in Triton: bit-equal to the reference, one read and one write.

The scale chain is that of `kernels.reference_quantize`, in the same order of float32 operations;
`BF16` below is the recipe of that name. NVFP4 of bfloat16 weights takes a way without a division
per element, with the same bits. With d = s / g and 1 / d kept as a sum h + l, h of 16 bits, the
product w h is exact and one multiply-add gives RN(w (h + l)), which lies on the same side of every
bound of E2M1 as RN(w / d): over all bfloat16 w and float32 d, the quotients come no closer to a
change of code than 2**-33, but for d one unit below a power of two, which is why 2**-34 is added to
l. Codes then are three saturating multiply-adds, one for each slope of the map from magnitudes to
codes. `tests/kernels/test_quantize_exact.py` proves the bound by going through all cases. This
holds for g from 2**-7 to 2**30; other g take the divisions.

Easy to get wrong: on a GPU a plain `/` is not correctly rounded, so divisions are `div_rn`;
rounding to E4M3 is done on the bits, which also holds in Triton's interpreter, whose own
conversion is wrong; adding and subtracting 2**23 rounds to integers, ties to even, up to 2**22,
so magnitudes are cut to 8 first (6 is the largest code).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.formats import QuantizedWeight, format_named, require_options
from kernels.reference_quantize import check_weight, code_bounds, encode_scale_of
from kernels.triton import FUSED

_ELEMENTS = 4096
# The way without divisions: blocks per tile, and tiles per program.
_FAST_ROWS = 128
_FAST_TILES = 8

# The bits of float32 1e-38, the reference's lower bound of an NF4 scale that is divided by.
_LEAST_BITS = 7136238


@triton.jit
def _round(value):
    """Round half to even, for 0 <= value < 2^22."""
    return (value + 8388608.0) - 8388608.0


@triton.jit
def _bfloat16(value):
    """Round a finite value >= 0 to bfloat16, ties to even; float32."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(value):
    """Bits of the nearest E4M3, ties to even, for 0 <= value <= 448."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    subnormal = _round(tl.minimum(value, 1.0) * 512.0).to(tl.int32)
    return tl.where(value < 0.015625, subnormal, normal)


@triton.jit
def _e2m1_code(scaled, negative):
    """Code of the nearest E2M1 value, ties to even, with the sign given."""
    y = tl.minimum(tl.abs(scaled), 8.0)
    rounded = tl.minimum(_round(y * 2.0), _round(y) + 2.0)
    rounded = tl.minimum(tl.minimum(rounded, _round(y * 0.5) + 4.0), 7.0)
    return rounded.to(tl.int32) | tl.where(negative, 8, 0)


@triton.jit
def _step(amax, scales, row, valid, encode, KIND: tl.constexpr, BF16: tl.constexpr):
    """Store the block scales; return what weights are divided by (NVFP4), multiplied by (MXFP4)."""
    if KIND == 0:
        # Round the block scale to E4M3, where zero becomes 0.125, and store its bits.
        g = tl.load(encode) + tl.zeros_like(amax)
        sixth = tl.div_rn(amax, tl.zeros_like(amax) + 6.0)
        if BF16:
            sixth = _bfloat16(sixth)
        byte = _e4m3(tl.minimum(g * sixth, 448.0))
        byte = tl.where(byte == 0, 32, byte)
        tl.store(scales + row, byte.to(tl.uint8), mask=valid)
        # Decode it again: weights are divided by the rounded scale.
        bits = (((byte >> 3) + 120) << 23) | ((byte & 7) << 20)
        subnormal = (byte & 7).to(tl.float32) * 0.001953125
        decoded = tl.where(byte < 8, subnormal, bits.to(tl.float32, bitcast=True))
        return tl.div_rn(decoded, g)
    # MXFP4: floor(log2 amax) stands, with its bias, in the exponent of float32.
    exponent = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - 2, 0)
    tl.store(scales + row, exponent.to(tl.uint8), mask=valid)
    # The reciprocal of a power of two is exact: 2^(127 - exponent), subnormal never.
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _nf4_code(scaled, bounds):
    code = tl.zeros_like(scaled).to(tl.int32)
    for i in tl.static_range(15):
        code += (scaled > tl.load(bounds + i)).to(tl.int32)
    return code


@triton.jit
def _fast_scale(amax, g, inverse, BF16: tl.constexpr):
    """Return the bits of the block scale and d * 2^40, for g from 2^-7 to 2^30.

    RN(amax / 6) and RN(s / g) come from products with rounded reciprocals and one residual each.
    """
    # RN(amax / 6).
    sixth = amax * 0.16666667163372040
    sixth = tl.fma(tl.fma(sixth, -6.0, amax), 0.16666667163372040, sixth)
    if BF16:
        sixth = _bfloat16(sixth)
    # Round to E4M3 on the bits; subnormals by adding 2^23, whose bits are taken off again.
    scaled = tl.minimum(g * sixth, 448.0)
    bits = scaled.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    subnormal = (scaled * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    byte = tl.where(scaled < 0.015625, subnormal, normal)
    byte = tl.where(byte == 0, 32, byte)
    # E4M3's bits as float32's are the scale times 2^-120; the other 2^40 are d's.
    s = (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    # RN(s / g), times 2^40.
    q = s * inverse
    d = tl.fma(tl.fma(-q, g, s), inverse, q)
    return byte, d * 1099511627776.0


@triton.jit
def _fast_kernel(
    weight, encode, codes, scales, blocks,
    ROWS: tl.constexpr, TILES: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """NVFP4 of bfloat16 pairs; see the module's docstring."""
    row = tl.program_id(0).to(tl.int64) * (ROWS * TILES) + tl.arange(0, ROWS)
    pairs = tl.arange(0, 8)[None, :]
    g = tl.load(encode)
    fast = (g >= 0.0078125) & (g <= 1073741824.0)
    ones = tl.zeros((ROWS,), tl.float32) + 1.0
    inverse = tl.div_rn(ones, ones * g)
    # Load the first blocks: a word of int32 is a pair of bfloat16, (ROWS, 8).
    ahead = tl.load(weight + row[:, None] * 8 + pairs, mask=(row < blocks)[:, None], other=0)
    for i in range(TILES):
        pair = ahead
        valid = row < blocks
        at = row[:, None] * 8 + pairs
        # The next tile is on its way while this one is worked on.
        more = (row + ROWS < blocks) & (i + 1 < TILES)
        ahead = tl.load(weight + at + ROWS * 8, mask=more[:, None], other=0)
        if fast:
            # Magnitudes of even and odd elements, (ROWS, 8) each; the largest of each block.
            both = pair & 0x7FFF7FFF
            low = (both << 16).to(tl.float32, bitcast=True)
            high = (both & 0x7FFF0000).to(tl.float32, bitcast=True)
            amax = tl.max(tl.maximum(low, high), 1)
            byte, d = _fast_scale(amax, g, inverse, BF16)
            tl.store(scales + row, byte.to(tl.uint8), mask=valid)
            # The reciprocal of d in two parts, (ROWS, 1) each; see the module's docstring.
            y = tl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1
            )
            h = (y.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)
            rest = tl.fma(tl.fma(-d, h, 1.0), y, y * 5.820766091346741e-11)[:, None]
            h = h[:, None]
            # Divide, round to codes, and join two to a byte.
            low_code = _fast_code(tl.fma(low, rest, low * h))
            high_code = _fast_code(tl.fma(high, rest, high * h))
            # Bit 15 of each half: negative and not minus zero.
            signs = (both + 0x7FFF7FFF) & pair & -2147450880
            byte_pair = low_code | (high_code << 4) | (signs >> 12) | (signs >> 24)
        else:
            low = (pair << 16).to(tl.float32, bitcast=True)
            high = ((pair >> 16) << 16).to(tl.float32, bitcast=True)
            amax = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
            step = _step(amax, scales, row, valid, encode, 0, BF16)[:, None] + tl.zeros_like(low)
            low = tl.div_rn(low, step)
            high = tl.div_rn(high, step)
            byte_pair = _e2m1_code(low, low < 0) | (_e2m1_code(high, high < 0) << 4)
        tl.store(codes + at, byte_pair.to(tl.uint8), mask=valid[:, None])
        row += ROWS


@triton.jit
def _fast_code(scaled):
    """Bits of 2^23 + code of the nearest E2M1, ties to even, for scaled = |w / d| * 2^-40.

    RNE(4 sat(y / 2)) + RNE(2 sat(y / 2 - 1)) + RNE(sat(y / 2 - 2)): where a slope begins, the sum
    before it is even, so that ties go to even codes.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 a, b, c;
        fma.rn.sat.f32 a, $1, 0f53000000, 0f00000000;
        fma.rn.sat.f32 b, $1, 0f53000000, 0fBF800000;
        fma.rn.sat.f32 c, $1, 0f53000000, 0fC0000000;
        fma.rn.f32 a, a, 0f40800000, 0f4B000000;
        fma.rn.f32 a, b, 0f40000000, a;
        add.rn.f32 $0, a, c;
        }""",
        "=f,f",
        [scaled],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    ).to(tl.int32, bitcast=True)


@triton.jit
def _quantize_kernel(
    weight, encode, bounds, codes, scales, blocks,
    KIND: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PAIRS: tl.constexpr, LEAST: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < blocks
    # Load even and odd elements apart, (ROWS, BLOCK / 2) each, so that their codes meet in one byte
    # without any exchange.
    at = row[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    if PAIRS:
        pair = tl.load(weight + at, mask=valid[:, None], other=0)
        low = (pair << 16).to(tl.float32, bitcast=True)
        high = ((pair >> 16) << 16).to(tl.float32, bitcast=True)
    else:
        low = tl.load(weight + 2 * at, mask=valid[:, None], other=0.0).to(tl.float32)
        high = tl.load(weight + 2 * at + 1, mask=valid[:, None], other=0.0).to(tl.float32)
    # Reduce: each block's largest magnitude, (ROWS,).
    amax = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
    # Scale, round to codes, and store a byte for each pair.
    if KIND == 2:
        tl.store(scales + row, amax, mask=valid)
        # 1e-38 is subnormal in float32, so as a literal it would be float64: its bits are given.
        least = (tl.zeros_like(amax).to(tl.int32) + LEAST).to(tl.float32, bitcast=True)
        inverse = tl.div_rn(tl.zeros_like(amax) + 1.0, tl.maximum(amax, least))[:, None]
        low_code = _nf4_code(low * inverse, bounds)
        high_code = _nf4_code(high * inverse, bounds)
    else:
        step = _step(amax, scales, row, valid, encode, KIND, BF16)[:, None] + tl.zeros_like(low)
        if KIND == 0:
            low_scaled = tl.div_rn(low, step)
            high_scaled = tl.div_rn(high, step)
            low_code = _e2m1_code(low_scaled, low_scaled < 0)
            high_code = _e2m1_code(high_scaled, high_scaled < 0)
        else:
            low_scaled = low * step
            high_scaled = high * step
            low_code = _e2m1_code(low_scaled, low.to(tl.int32, bitcast=True) < 0)
            high_code = _e2m1_code(high_scaled, high.to(tl.int32, bitcast=True) < 0)
    tl.store(codes + at, (low_code | (high_code << 4)).to(tl.uint8), mask=valid[:, None])


def quantize_blocks(
    weight: Tensor, format: str, encode: Tensor | None, recipe: str = "float32"
) -> tuple[Tensor, Tensor]:
    """Return packed codes and block scales, without any check and without waiting.

    Parameters
    ----------
    weight : Tensor, (N, K), floating, contiguous
    format
        "nvfp4", "mxfp4" or "nf4".
    encode : Tensor or None, (), float32
        NVFP4's encode scale.
    recipe
        The arithmetic of NVFP4's block scales.

    Returns
    -------
    codes : Tensor, (N, K / 2), uint8
    scales : Tensor, (N, K / block), uint8 (E4M3 or E8M0 bits) or float32 (NF4)
    """
    spec = format_named(format)
    N, K = weight.shape
    kind = spec.number
    codes = torch.empty(N, K // 2, dtype=torch.uint8, device=weight.device)
    dtype = torch.float32 if kind == 2 else torch.uint8
    scales = torch.empty(N, K // spec.block, dtype=dtype, device=weight.device)
    bounds = code_bounds(format, weight.device) if kind == 2 else None
    blocks = N * K // spec.block
    rows = _ELEMENTS // spec.block
    pairs = weight.dtype == torch.bfloat16
    rounds = recipe == "bfloat16"
    source = weight.view(torch.int32) if pairs else weight
    if pairs and kind == 0 and weight.is_cuda:
        cut = (_FAST_ROWS, _FAST_TILES)
        _fast_kernel[(triton.cdiv(blocks, _FAST_ROWS * _FAST_TILES),)](
            source, encode, codes, scales, blocks, *cut, rounds, num_warps=4, **FUSED
        )
        return codes, scales
    constants = (kind, spec.block, rows, pairs, _LEAST_BITS, rounds)
    _quantize_kernel[(triton.cdiv(blocks, rows),)](
        source, encode, bounds, codes, scales, blocks, *constants, num_warps=4, **FUSED
    )
    return codes, scales


def quantize(
    weight: Tensor, format: str, *, global_scale: Tensor | None = None, recipe: str = "float32"
) -> QuantizedWeight:
    """Quantise a weight matrix, (N, K), on its device.

    `kernels.reference.quantize` is the specification: arguments, result and errors are the same.
    """
    spec = format_named(format)
    check_weight(weight, spec)
    require_options(spec, with_global_scale=global_scale is not None, recipe=recipe)
    weight = weight.detach().contiguous()
    least, most = torch.aminmax(weight)
    amax = torch.maximum(-least, most).float()
    if not bool(torch.isfinite(amax)):
        raise ValueError("weight holds a value that is not finite; quantising needs finite ones")
    encode = encode_scale_of(amax, recipe, global_scale) if spec.has_global_scale else None
    codes, scales = quantize_blocks(weight, format, encode, recipe)
    scales = scales.view(spec.scale_dtype)
    return QuantizedWeight(format=format, codes=codes, block_scales=scales, encode_scale=encode)
