"""The linear layer where it may break: every choice of the tuned table, hostile weights, autograd.

Weights are drawn as codes and scales, so that every code (minus zero too) meets every scale. What
`torch.empty` returns is poisoned (tests/conftest.py). Errors are against float32 products.
"""

import functools

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kernels import dispatch, reference
from kernels.cuda import linear
from kernels.formats import FORMATS, QuantizedWeight
from kernels.packing import pack
from kernels.triton import portable_linear
from tests.kernels.conftest import assert_bitwise, assert_within_twice

PORTABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
HOPPER = PORTABLE and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (compute capability 9.0)")
portable = pytest.mark.skipif(not PORTABLE, reason="needs a GPU of compute capability 8.0 or newer")
pytestmark = pytest.mark.gpu

# Both sides of every M of the tuned table, and its ends.
ROWS = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 1025, 2048,
        2049, 4096, 4097, 8192)  # fmt: skip
# (N, K): the tuned layers of both blocks, N odd, K a multiple of the block only.
TUNED = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (7168, 5120), (5120, 5120),
         (55296, 5120), (5120, 27648))  # fmt: skip
ODD = {"nvfp4": (4613, 3600), "mxfp4": (4613, 3616), "nf4": (4613, 3648)}
SMALL = {"nvfp4": (333, 16), "mxfp4": (77, 96), "nf4": (129, 64)}


@functools.lru_cache(maxsize=2)
def _weight(format, shape, kind="random"):
    """Return a weight on the GPU: "random" with every scale, or one of the hostile `KINDS`."""
    (N, K), spec = shape, FORMATS[format]
    generator = torch.Generator("cuda").manual_seed(N + K)
    codes = torch.randint(0, 256, (N, K // 2), device="cuda", generator=generator).byte()
    blocks = (N, K // spec.block)
    low, high = {"nvfp4": (0, 127), "mxfp4": (100, 135), "nf4": (0, 1)}[format]
    if kind == "largest":
        # The largest E8M0 leaves no room for a sum in float32; 240 is 2**113.
        codes.fill_(0xF7)
        low, high = {"nvfp4": (126, 127), "mxfp4": (240, 241), "nf4": (1, 1)}[format]
    elif kind == "subnormal":
        low, high = {"nvfp4": (1, 8), "mxfp4": (1, 4), "nf4": (0, 1)}[format]
    elif kind == "zeros":
        codes.copy_((codes & 1) * 0x88)
    if format == "nf4":
        scales = torch.rand(blocks, device="cuda", generator=generator) * (high - low) + low
        scales = scales * {"largest": 1e4, "subnormal": 1e-36}.get(kind, 0.02)
    else:
        scales = torch.randint(low, high, blocks, device="cuda", generator=generator).byte()
    if kind == "zero_blocks":
        scales[:, ::2] = 0
        scales[::3] = 0
    g = torch.tensor(41234.5, device="cuda") if spec.has_global_scale else None
    scales = scales.view(spec.scale_dtype)
    return QuantizedWeight(format=format, codes=codes, block_scales=scales, encode_scale=g)


KINDS = ("largest", "subnormal", "zeros", "zero_blocks")


@functools.lru_cache(maxsize=2)
def _both(format, shape, kind="random"):
    """Return the dense float32 matrix and the packed weight."""
    weight = _weight(format, shape, kind)
    return reference.dequantize(weight), pack(weight)


def _rows(M, K, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(M)
    return torch.randn(M, K, device="cuda", generator=generator).to(dtype)


def _hold(ours, x, dense, what):
    plain = functional.linear(x, dense.to(x.dtype))
    exact = functional.linear(x.float(), dense)
    if not bool(torch.isfinite(plain).all()):
        pytest.fail(f"{what}: plain PyTorch itself overflows; the case says nothing")
    assert_within_twice(ours, plain, exact, what)


@hopper
@pytest.mark.parametrize("shape", TUNED)
def test_every_choice_of_the_table_is_close_to_float32(shape):
    dense, packed = _both("nvfp4", shape)
    for M in ROWS:
        x = _rows(M, shape[1])
        ours = linear.packed_linear(x, packed)
        assert_bitwise(linear.packed_linear(x, packed), ours, f"M {M}, second run")
        _hold(ours, x, dense, f"{shape}, M {M}")


@hopper
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sizes", [ODD, SMALL], ids=["odd", "small"])
def test_odd_shapes_are_close_to_float32_at_every_number_of_rows(format, sizes):
    N, K = sizes[format]
    dense, packed = _both(format, (N, K))
    for M in ROWS:
        # A slice of a wider matrix: rows are neither contiguous nor, at 3, aligned.
        x = _rows(M, K + 11)[:, M % 8 : M % 8 + K]
        ours = linear.packed_linear(x, packed)
        assert_bitwise(linear.packed_linear(x, packed), ours, f"M {M}, second run")
        _hold(ours, x, dense, f"{format} {N} {K}, M {M}")


@hopper
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_weights_are_multiplied(format, kind):
    dense, packed = _both(format, (517, 1344), kind)
    for M in (1, 7, 16, 40, 128, 300, 1500):
        x = _rows(M, 1344)
        _hold(linear.packed_linear(x, packed), x, dense, f"{format} {kind}, M {M}")


@portable
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_portable_layer_is_close_to_float32(format, dtype):
    for shape in (ODD[format], SMALL[format], (3584, 3584)):
        weight = _weight(format, shape)
        dense = reference.dequantize(weight)
        for M in (1, 2, 16, 17, 33, 64, 100, 128):
            x = _rows(M, shape[1] + 5, dtype)[:, 5:] / 8
            ours = portable_linear.linear(x, weight)
            again = portable_linear.linear(x, weight)
            assert_bitwise(again, ours, f"M {M}, second run")
            _hold(ours, x, dense, f"{format} {shape}, M {M}")


@portable
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_weights_are_multiplied_portably(format, kind):
    weight = _weight(format, (517, 1344), kind)
    dense = reference.dequantize(weight)
    bias = _rows(1, 517)[0]
    for M in (1, 3, 7, 16, 40, 128, 300):
        x = _rows(M, 1344).requires_grad_()
        ours = dispatch.linear(x, weight, bias)
        (dx,) = torch.autograd.grad(ours.sum(), x)
        plain, exact = (functional.linear(v, dense.to(v.dtype), bias.to(v.dtype))
                        for v in (x.detach(), x.detach().float()))  # fmt: skip
        assert_within_twice(ours.detach(), plain, exact, f"{format} {kind}, M {M}")
        ones = torch.ones_like(ours)
        wide = ones.float() @ dense
        assert_within_twice(dx, ones @ dense.bfloat16(), wide, f"{format} {kind}, dX, M {M}")


@hopper
@pytest.mark.parametrize("M", [5, 70, 600])
def test_checkpointed_and_captured_gradients_are_the_eager_ones(M):
    shape = (784, 1088)
    _, packed = _both("nvfp4", shape)
    x = _rows(M, shape[1]).requires_grad_()
    upstream = _rows(M, shape[0])

    def gradient(y):
        return y.detach(), torch.autograd.grad(y, x, upstream)[0]

    eager = gradient(dispatch.linear(x, packed))
    again = gradient(checkpoint(dispatch.linear, x, packed, use_reentrant=False))
    for part, actual, expected in zip(("y", "dx"), again, eager, strict=True):
        assert_bitwise(actual, expected, f"checkpointed {part}, M {M}")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        gradient(dispatch.linear(x, packed))
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            replayed = gradient(dispatch.linear(x, packed))
    for _ in range(2):
        for tensor in replayed:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for part, actual, expected in zip(("y", "dx"), replayed, eager, strict=True):
            assert_bitwise(actual, expected, f"replayed {part}, M {M}")
