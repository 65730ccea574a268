"""Quantise and dequantise in plain PyTorch: the specification of the three formats.

NVFP4, round to nearest, no calibration

    g     = R(R(1 / amax(|W|)) * 2688)                   encode scale, one per tensor; 448 * 6
    s     = E4M3(min(g * R(amax(|block|) / 6), 448))     block scale; 0 is replaced by 0.125
    code  = E2M1(W / (s / g))                            ties to the even code
    value = E2M1[code] * (s / g)

Every operation is float32 in exactly this order: `amax / 6` is rounded before the product with g,
and s / g before the division of W. Simplifying either changes codes. The *recipe* defines R:

==============  ================================================================================
`float32`       R is the identity. compressed-tensors' result where W is float32.
`bfloat16`      R rounds to bfloat16. Its result, and llm-compressor's NVFP4A16, where W is
                bfloat16, as published checkpoints are: PyTorch keeps a tensor's dtype through
                `1 / amax`, the product and `amax / 6`.
==============  ================================================================================

On bfloat16 weights of a network the two differ in nearly every g, in 2 % of the block scales and
in 1 % of the codes; neither is nearer to W. Linears that an inference engine fuses (q, k, v; gate,
up) must share one g, the smallest of theirs: `shared_global_scale`.

MXFP4, the conversion of the OCP standard (section 6.3)

    e     = floor(log2(amax(|block|))) - 2, at least -127     block scale 2**e, stored as e + 127
    code  = E2M1(W / 2**e)                            ties to even, saturating at 6

(compressed-tensors first rounds amax up to the next power of two when it would round there; that
variant is not the standard's and is not implemented.)

NF4, as bitsandbytes does it

    scale = amax(|block|)
    code  = nearest NORMAL_FLOAT to W * (1 / scale), ties to the lower code

Weights of any floating type are converted to float32 first, which is exact for the 16-bit types.
Work goes in chunks of rows small enough for the cache, so the memory beyond input and output is a
few MB whatever the size. A float32 product W * (1/s) is not the same as W / s; only NF4 takes the
product.

Sources: arXiv 2510.11696 section 2 and its released `quantize_nvfp4.py`; the compressed-tensors
and bitsandbytes packages, against which the tests compare bit for bit, each recipe on weights of
its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kernels.formats import (
    E2M1_MAX,
    E4M3,
    E4M3_MAX,
    E8M0,
    Format,
    QuantizedWeight,
    byte_table,
    codebook,
    e8m0_table,
    format_named,
    pack_codes,
    require_options,
)

# Elements handled at once: 1 MB of float32, so that the passes over a chunk stay in cache.
_CHUNK = 1 << 18

# Replaces a block scale that rounds to zero, so that nothing divides by zero (the released
# recipe's value; the codes of such a block are all zero whatever it is).
_ZERO_BLOCK_SCALE = 0.125


def quantize(
    weight: Tensor, format: str, *, global_scale: Tensor | None = None, recipe: str = "float32"
) -> QuantizedWeight:
    """Quantise a weight matrix to 4 bits.

    Raises `ValueError` on an unknown format, a shape that does not fit, a value that is not finite,
    or an option that the format does not have.

    Parameters
    ----------
    weight : Tensor, (N, K), any floating type
        K a multiple of the format's block; every value finite. Need not be contiguous.
    format
        "nvfp4", "mxfp4" or "nf4".
    global_scale : Tensor, ()
        NVFP4 only: the decode-direction global scale to use, from `shared_global_scale`; None
        computes this matrix's own.
    recipe
        NVFP4 only: "float32" or "bfloat16", the arithmetic of its scales.

    Returns
    -------
    QuantizedWeight
        On the weight's device.
    """
    spec = format_named(format)
    check_weight(weight, spec)
    require_options(spec, with_global_scale=global_scale is not None, recipe=recipe)
    with torch.no_grad():
        block_amax = _block_amax(weight, spec)
        if spec.scale_dtype == E4M3:
            return _quantize_nvfp4(weight, spec, block_amax, global_scale, recipe)
        if spec.scale_dtype == E8M0:
            return _quantize_mxfp4(weight, spec, block_amax)
        return _quantize_nf4(weight, spec, block_amax)


def shared_global_scale(weights: Sequence[Tensor], recipe: str = "float32") -> Tensor:
    """Return the NVFP4 global scale that several matrices share (q, k, v; gate, up).

    Parameters
    ----------
    weights : sequence of Tensor, (N_i, K_i)
        At least one.
    recipe
        As for `quantize`.

    Returns
    -------
    Tensor, (), float64
        Decode direction: the largest of the matrices' own. float64, so that `quantize` recovers
        the float32 encode scale from it without error.
    """
    if not weights:
        raise ValueError("weights is empty; a shared global scale needs at least one matrix")
    spec = format_named("nvfp4")
    amaxes = []
    for weight in weights:
        check_weight(weight, spec)
        amaxes.append(_block_amax(weight, spec).amax())
    return encode_scale_of(torch.stack(amaxes).amax(), recipe).double().reciprocal()


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the dense matrix (N, K): computed in float32, rounded once to a floating `dtype`."""
    scales = decoded_block_scales(weight)
    N, K = weight.shape
    rows = max(1, _CHUNK // K)
    dense = torch.empty(N, K, dtype=dtype, device=weight.device)
    for at in range(0, N, rows):
        dense[at : at + rows] = _dequantize_rows(
            weight, weight.codes[at : at + rows], scales[at : at + rows]
        )
    return dense


def decoded_block_scales(weight: QuantizedWeight) -> Tensor:
    """Return the factor of each block's codes, (N, K / block), float32."""
    scales = weight.block_scales
    if weight.encode_scale is not None:
        return scales.float() / weight.encode_scale
    if scales.dtype == E8M0:
        return e8m0_table(weight.device)[scales.int()]
    return scales


def check_weight(weight: Tensor, spec: Format) -> None:
    """Raise `ValueError` unless a weight is a matrix that a format can hold."""
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"weight is {weight.dtype} of shape {tuple(weight.shape)}; "
            f"{spec.name} needs a floating matrix (N, K)"
        )
    spec.require_whole_blocks("weight.shape is", *weight.shape)


def _chunks(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, contiguous float32 copy or view of those rows)."""
    N, K = weight.shape
    step = max(1, _CHUNK // K)
    for at in range(0, N, step):
        rows = slice(at, min(at + step, N))
        yield rows, weight[rows].float().contiguous()


def _block_amax(weight: Tensor, spec: Format) -> Tensor:
    """Return the largest magnitude of each block, (N, K / block) float32, all finite."""
    N, K = weight.shape
    amax = torch.empty(N, K // spec.block, dtype=torch.float32, device=weight.device)
    for rows, chunk in _chunks(weight.detach()):
        amax[rows] = chunk.view(len(chunk), -1, spec.block).abs().amax(-1)  # (rows, K / block)
    finite = torch.isfinite(amax)
    if not bool(finite.all()):
        row, block = (int(i) for i in (~finite).nonzero()[0])
        raise ValueError(
            f"weight holds NaN or infinity (as float32) in row {row}, columns "
            f"{block * spec.block} to {(block + 1) * spec.block - 1}; {spec.name} needs finite ones"
        )
    return amax


def _rounded(values: Tensor, recipe: str) -> Tensor:
    """Round float32 values as a recipe does after every operation, (...), float32."""
    return values.bfloat16().float() if recipe == "bfloat16" else values


def encode_scale_of(amax: Tensor, recipe: str, global_scale: Tensor | None = None) -> Tensor:
    """Return g, (), float32: that of a global scale, or 2688 / amax where none is given.

    1 where that overflows, as compressed-tensors does. Computed from the reciprocal, with two
    roundings, as PyTorch divides a number by a tensor.
    """
    if global_scale is not None:
        g = global_scale.to(amax.device).double().reciprocal().float().reshape(())
        if not (bool(torch.isfinite(g)) and float(g) > 0):
            raise ValueError(f"global_scale is {float(global_scale)}; it must be positive, finite")
        return g
    inverse = _rounded(amax.clamp(min=torch.finfo(torch.float32).tiny).reciprocal(), recipe)
    g = _rounded(inverse * (E4M3_MAX * E2M1_MAX), recipe)
    return torch.where(torch.isfinite(g), g, torch.ones_like(g))


def _packed_codes(
    weight: Tensor, spec: Format, steps: Tensor, nearest: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return packed codes, (N, K / 2), by the code `nearest` to each element and its block's step.

    `nearest` takes blocks, (rows, K / block, block), and their steps, (rows, K / block, 1).
    """
    N, K = weight.shape
    codes = torch.empty(N, K // 2, dtype=torch.uint8, device=weight.device)
    for rows, chunk in _chunks(weight):
        blocks = chunk.view(len(chunk), -1, spec.block)
        codes[rows] = pack_codes(nearest(blocks, steps[rows].unsqueeze(-1)).view(chunk.shape))
    return codes


def _quantize_nvfp4(
    weight: Tensor, spec: Format, block_amax: Tensor, global_scale: Tensor | None, recipe: str
) -> QuantizedWeight:
    g = encode_scale_of(block_amax.amax(), recipe, global_scale)
    # By a tensor: by a number PyTorch multiplies with the rounded reciprocal on GPUs.
    sixth = _rounded(block_amax / block_amax.new_tensor(E2M1_MAX), recipe)
    scales = (g * sixth).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    decoded = scales.float()
    decoded = torch.where(decoded == 0, _ZERO_BLOCK_SCALE, decoded)

    def nearest(blocks: Tensor, step: Tensor) -> Tensor:
        scaled = blocks / step
        # compressed-tensors gives -0.0 the code 0, but a negative that rounds to zero the code 8.
        return e2m1_codes(scaled, scaled < 0)

    codes = _packed_codes(weight, spec, decoded / g, nearest)
    scales = decoded.to(torch.float8_e4m3fn)
    return QuantizedWeight(format=spec.name, codes=codes, block_scales=scales, encode_scale=g)


def _quantize_mxfp4(weight: Tensor, spec: Format, block_amax: Tensor) -> QuantizedWeight:
    # The exponent field of a float32 is floor(log2) + 127. It is 0 for subnormals and zero, which
    # lie below the smallest scale 2**-127 anyway.
    exponents = ((block_amax.view(torch.int32) >> 23) - 2).clamp(min=0).to(torch.uint8)
    steps = e8m0_table(weight.device)[exponents.int()]

    def nearest(blocks: Tensor, step: Tensor) -> Tensor:
        return e2m1_codes(blocks / step, torch.signbit(blocks))

    codes = _packed_codes(weight, spec, steps, nearest)
    return QuantizedWeight(format=spec.name, codes=codes, block_scales=exponents)


def e2m1_codes(scaled: Tensor, negative: Tensor) -> Tensor:
    """Round to E2M1, ties to the even code, saturating at 6.

    The magnitudes of the codes have steps of 1/2 up to 2, of 1 up to 4 and of 2 up to 6, so the
    code of y is the rounding to integers of 2y, y + 2 and y/2 + 4, whichever is least; rounding
    half to even then is ties to the even code. The sums are taken after rounding: y + 2 itself is
    not exact in float32, and would make ties of values just above one.

    Parameters
    ----------
    scaled : Tensor, float32
        Weights over their block's step.
    negative : Tensor, bool, as many elements
        Which get the sign bit.

    Returns
    -------
    Tensor, uint8, the shape of `scaled`
    """
    y = scaled.abs_()
    code = torch.round(y * 2)
    torch.minimum(code, torch.round(y).add_(2), out=code)
    torch.minimum(code, y.mul_(0.5).round_().add_(4), out=code)
    code = code.clamp_(max=7).to(torch.uint8)
    return code.bitwise_or_(negative.view(torch.uint8).view(code.shape) << 3)


@lru_cache(maxsize=16)
def code_bounds(format: str, device: torch.device) -> Tensor:
    """Return the bounds between neighbouring values of a format like NF4, (15,), float32."""
    values = codebook(format, device)
    return (values[:-1] + values[1:]) / 2


def _quantize_nf4(weight: Tensor, spec: Format, absmax: Tensor) -> QuantizedWeight:
    bounds = code_bounds(spec.name, weight.device)

    def nearest(blocks: Tensor, inverse: Tensor) -> Tensor:
        return torch.bucketize(blocks * inverse, bounds, out_int32=True).to(torch.uint8)

    codes = _packed_codes(weight, spec, 1.0 / absmax.clamp(min=1e-38), nearest)
    return QuantizedWeight(format=spec.name, codes=codes, block_scales=absmax)


def _dequantize_rows(weight: QuantizedWeight, codes: Tensor, scales: Tensor) -> Tensor:
    """Look each byte up as a pair of values and scale in place; (rows, K) float32."""
    # A pair of float32 as one int64: a single gather of 8-byte elements.
    pairs = byte_table(weight.format, weight.device).view(torch.int64).flatten()  # (256,)
    values = pairs.index_select(0, codes.reshape(-1).int()).view(torch.float32)  # (rows K,)
    # By block: (rows, K / block, block)
    values.view(*scales.shape, weight.block).mul_(scales.unsqueeze(-1))
    return values.view(codes.shape[0], -1)  # (rows, K)
