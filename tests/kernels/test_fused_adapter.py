"""Adapters in the launch of their layer: every element, the same bits, under capture, in turns."""

import dataclasses
import itertools
import json
import random

import pytest
import torch

from kernels import dispatch, reference, tuning
from kernels.cuda import compiler, linear
from kernels.cuda.fused_adapter import FILES, macros
from kernels.cuda.hopper import Adapter
from kernels.formats import FORMATS
from kernels.packing import PackedWeight, pack
from kernels.tune import LAYERS, with_adapter
from tests.kernels.conftest import assert_bitwise, assert_within_twice

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (compute capability 9.0)")
TABLE = json.loads((tuning.FOLDER / f"{tuning.FALLBACK}.json").read_text(encoding="utf-8"))


def _weight(N, K):
    packs = torch.zeros(-(-N // 16), -(-K // 256), 1, dtype=torch.uint8)
    return PackedWeight(format="nvfp4", shape=(N, K), packs=packs, gain=torch.ones(()), extras={})


@pytest.mark.parametrize(("format", "most"), [("nvfp4", 16), ("mxfp4", 16), ("nf4", 8)])
def test_the_tables_layers_take_an_adapter_up_to_a_row_count(monkeypatch, format, most):
    monkeypatch.setattr(tuning, "stored_table", lambda device: TABLE)
    for N, K in (shape for layers in LAYERS.values() for shape in layers.values()):
        weight = dataclasses.replace(_weight(N, K), format=format)
        fusing_rows = [M for M in range(1, 129) if linear.fuses_adapter(weight, M)]
        assert fusing_rows == list(range(1, most + 1)), f"{N} x {K}"


def test_the_source_numbers_formats_as_its_callers_do():
    source = (compiler.FOLDER / "fragments.cuh").read_text(encoding="utf-8")
    for format, spec in FORMATS.items():
        assert f"#define {format.upper()} {spec.number}\n" in source


@pytest.mark.parametrize("M", [8, 16])
def test_the_source_compiles(M):
    try:
        compiler.version()
    except compiler.CompileError as error:
        pytest.skip(f"needs NVRTC: {error}")
    for choice, joining in random.Random(M).sample(list(with_adapter(M)), 4):
        chosen = macros(_weight(512, 512), choice, M, 32, joining)
        assert compiler.build(FILES, chosen, "sm_90a")[:4] == b"\x7fELF"


def _layer(N, K, format="nvfp4"):
    generator = torch.Generator("cuda").manual_seed(N + K)
    dense = torch.randn(N, K, device="cuda", generator=generator) * 0.05
    quantized = reference.quantize(dense, format)
    return reference.dequantize(quantized), pack(quantized)


def _adapter(N, K, rank, ends, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    a = torch.randn(rank * (len(ends) + 1), K, device="cuda", generator=generator) * 0.05
    b = torch.randn(N, rank, device="cuda", generator=generator) * 0.05
    return Adapter(a=a.bfloat16(), b=b.bfloat16(), ends=ends, scaling=2.0)


def _sum(x, dense, adapter):
    y = x @ dense.to(x.dtype).t()
    rank = adapter.b.shape[1]
    for i, (start, end) in enumerate(itertools.pairwise((0, *adapter.ends, len(dense)))):
        z = x @ adapter.a[i * rank : (i + 1) * rank].to(x.dtype).t()
        y[:, start:end] += adapter.scaling * (z @ adapter.b[start:end].to(x.dtype).t())
    return y


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("M", [1, 2, 8, 9, 16, 24])
@pytest.mark.parametrize(
    ("N", "K", "rank", "ends", "format"),
    [
        (4608, 3584, 32, (3584, 4096), "nvfp4"),
        (1504, 1040, 32, (736,), "nvfp4"),  # projections meet inside tiles of every size
        (1001, 784, 64, (), "nvfp4"),
        (768, 4096, 128, (), "mxfp4"),
        (768, 512, 16, (256, 512), "nf4"),
        (768, 512, 48, (256,), "nvfp4"),
    ],
)
def test_every_element_is_within_twice_plain_bfloat16(M, N, K, rank, ends, format):
    dense, packed = _layer(N, K, format)
    adapter = _adapter(N, K, rank, ends, 1)
    x = torch.randn(M, K, device="cuda").bfloat16()
    if not linear.fuses_adapter(packed, M):
        with pytest.raises(ValueError, match="takes no adapter"):
            linear.packed_linear(x, packed, adapter=adapter)
        return
    exact, plain = _sum(x.float(), dense, adapter), _sum(x, dense, adapter)
    out = torch.full((M, N), float("nan"), dtype=torch.bfloat16, device="cuda")
    linear.packed_linear(x, packed, adapter=adapter, out=out)
    assert_within_twice(out, plain, exact, f"{N} x {K}, M {M}, rank {rank}")
    for _ in range(5):
        again = torch.full_like(out, float("nan"))
        linear.packed_linear(x, packed, adapter=adapter, out=again)
        assert_bitwise(again, out, "the same call again")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("M", [1, 16])
def test_layers_that_share_a_workspace_take_turns(M):
    # Each layer's x is the output of the one before, in one capture, replayed.
    shapes = [(1024, 512, (512,)), (512, 1024, ()), (768, 512, (256, 512)), (512, 768, ())]
    layers = [
        (_layer(N, K)[1], _adapter(N, K, 32, ends, i)) for i, (N, K, ends) in enumerate(shapes)
    ]
    x = torch.randn(M, 512, device="cuda").bfloat16()

    def run():
        y = x
        for _ in range(3):
            for weight, adapter in layers:
                y = linear.packed_linear(y, weight, adapter=adapter)
        return y

    eager = run()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = run()
    for _ in range(5):
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_bitwise(captured, eager, "replay")
        assert_bitwise(run(), eager, "eager between replays")


@pytest.mark.gpu
@hopper
def test_a_capture_without_a_workspace_is_refused():
    weight, adapter = _layer(512, 512)[1], _adapter(512, 512, 32, (), 0)
    x = torch.randn(1, 512, device="cuda").bfloat16()
    linear.packed_linear(x, weight, adapter=adapter)  # compiles
    stream = torch.cuda.Stream(priority=-1)
    with (
        pytest.raises(RuntimeError, match="run one before capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        linear.packed_linear(x, weight, adapter=adapter)


@pytest.mark.gpu
@hopper
def test_gradients_reach_x_and_the_bias():
    N, K, M = 272, 512, 70
    dense, packed = _layer(N, K)
    x = torch.randn(M, K, device="cuda").bfloat16().requires_grad_()
    bias = torch.randn(N, device="cuda").requires_grad_()
    upstream = torch.randn(M, N, device="cuda").bfloat16()
    y = dispatch.linear(x, packed, bias)
    grad_x, grad_bias = torch.autograd.grad(y, (x, bias), upstream)
    exact = upstream.float() @ dense
    assert_within_twice(grad_x, upstream @ dense.bfloat16(), exact, "gradient of x")
    plain = upstream.sum(0).float()
    assert_within_twice(grad_bias, plain, upstream.float().sum(0), "gradient of the bias")


def test_wrong_inputs_are_named():
    weight = pack(reference.quantize(torch.randn(32, 256), "nvfp4"))
    with pytest.raises(ValueError, match="last dimension is 255"):
        linear.packed_linear(torch.zeros(2, 255, dtype=torch.bfloat16), weight)
    with pytest.raises(ValueError, match="float32"):
        linear.packed_linear(torch.zeros(2, 256), weight)
    with pytest.raises(ValueError, match="on cpu"):
        linear.packed_linear(torch.zeros(2, 256, dtype=torch.bfloat16), weight)
    with pytest.raises(ValueError, match="rank is 24"):
        Adapter(a=torch.zeros(24, 256), b=torch.zeros(32, 24))
    with pytest.raises(ValueError, match="need 64"):
        Adapter(a=torch.zeros(32, 256), b=torch.zeros(32, 32), ends=(16,))
