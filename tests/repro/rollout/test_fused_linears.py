"""Packed projections with adapters: within the weight's launch up to 16 rows, beside it beyond.

On the CPU the two launches are replaced by plain products that note what they were asked for.
"""

import json

import pytest
import torch
from torch.nn import functional

from kernels import reference, tuning
from kernels.cuda import hopper, linear
from kernels.packing import pack, unpack
from kernels.triton import decode_adapter
from repro.models.lora import base_linear
from repro.rollout.gpu.fused_linears import QuantizedGroup
from repro.rollout.linears import Product
from tests.repro.rollout.conftest import fused, modules_of

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
# Of the most rows one product gives layer and projection.
ROWS = [1, 8, 9, 16, 17, 64, 65, 4096]
PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "down": ("mlp.down_proj",),
}


def _updates(x, modules):
    """Return (M, N1 + N2 + ...): the adapters alone, with masters rounded to bfloat16."""
    parts = []
    for module in modules:
        A, B, scaling = module.adapter()
        z = x @ A.bfloat16().to(x.dtype).t()
        parts.append(scaling * (z @ B.bfloat16().to(x.dtype).t()))
    return torch.cat(parts, dim=-1)


def _plainly(x, modules):
    """Return (M, N1 + N2 + ...) by torch's products in x's type, adapters included."""
    parts = []
    for module in modules:
        base = base_linear(module)
        parts.append(reference.linear(x, base.weight, base.bias.to(x.dtype)))
    return torch.cat(parts, dim=-1) + _updates(x, modules)


def _with_update(product):
    """Return base + scaling * z B^T a projection."""
    if product.z is None or product.b is None:
        return product.base
    rank = product.b.shape[1]
    edges = (0, *product.ends, product.base.shape[1])
    parts = [
        product.z[:, i * rank : (i + 1) * rank] @ product.b[edges[i] : edges[i + 1]].float().t()
        for i in range(len(edges) - 1)
    ]
    return product.base + product.scaling * torch.cat(parts, dim=-1)


@pytest.fixture
def launches(monkeypatch):
    """Run on plain products and the H200's table; return what was launched, in order."""
    table = json.loads((tuning.FOLDER / f"{tuning.FALLBACK}.json").read_text(encoding="utf-8"))
    seen = []

    def packed_linear(x, weight, bias, adapter=None):
        seen.append("layer" if adapter is None else "layer with adapter")
        base = functional.linear(x, reference.dequantize(unpack(weight), x.dtype), bias)
        if adapter is None:
            return base
        z = x @ adapter.a.to(x.dtype).t()
        return _with_update(
            Product(base=base, z=z, b=adapter.b, ends=adapter.ends, scaling=adapter.scaling)
        )

    def project(x, a, **options):
        seen.append("projection")
        return x @ a.to(x.dtype).t()

    def dequantize_packs(weight, out, dtype):
        seen.append("scratch")
        return out.copy_(reference.dequantize(unpack(weight), dtype))

    monkeypatch.setattr(tuning, "stored_table", lambda device: table)
    monkeypatch.setattr(linear, "packed_linear", packed_linear)
    monkeypatch.setattr(linear, "_check", lambda x, weight, bias: None)
    monkeypatch.setattr(hopper, "dequantize_packs", dequantize_packs)
    monkeypatch.setattr(decode_adapter, "project", project)
    return seen


@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4", "nf4"])
@pytest.mark.parametrize("part", list(PARTS))
def test_an_adapter_rides_in_the_launch_up_to_16_rows(make_policy, launches, weight_format, part):
    policy = make_policy("qwen2", weight_format, 16, seed=31)
    modules = modules_of(policy, *PARTS[part])
    x = torch.randn(max(ROWS), 128, generator=torch.Generator().manual_seed(0))
    base = torch.cat([base_linear(module)(x) for module in modules], dim=-1)
    expected = base + _updates(x, modules)
    group = QuantizedGroup(fused(modules, pack), overlap=False, beside=None)
    # NF4's layers of 9 to 16 rows are the wide kernel's.
    within = 8 if weight_format == "nf4" else 16
    for M in ROWS:
        launches.clear()
        product = group(x[:M])
        alone = ["scratch"] if max(ROWS) == M else ["projection", "layer"]
        assert launches == (["layer with adapter"] if within >= M else alone)
        assert (product.z is None) == (within >= M)
        torch.testing.assert_close(_with_update(product), expected[:M])
    # Both ways see an update of the masters.
    with torch.no_grad():
        for module in modules:
            for factor in module.adapter()[:2]:
                factor.mul_(-3.0).add_(0.1)
    group.refresh()
    expected = base + _updates(x, modules)
    for M in (within, within + 1):
        torch.testing.assert_close(_with_update(group(x[:M])), expected[:M])


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (compute capability 9.0)")
def test_many_rows_by_a_scratch_agree_with_the_modules(make_policy):
    policy = make_policy("qwen2", "nvfp4", 32, seed=36, hidden_size=512)
    modules = [module.to("cuda", torch.bfloat16) for module in modules_of(policy, *PARTS["qkv"])]
    x = torch.randn(4096, 512, device="cuda").bfloat16()
    plain, exact = (_plainly(kind, modules) for kind in (x, x.float()))
    product = QuantizedGroup(fused(modules, pack), overlap=True, beside=None)(x)
    assert product.z is not None
    assert product.b is not None
    assert product.base.stride(0) > product.base.shape[1]
    y = decode_adapter.add_adapter(
        product.base, product.z, product.b, product.ends, product.scaling, overlap=True
    )
    allowed = 2 * (plain.float() - exact).abs().max() + exact.abs().max() * 2**-8
    assert (y.float() - exact).abs().max() <= allowed


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (compute capability 9.0)")
def test_captures_of_few_and_many_rows_replay_in_turns(make_policy):
    policy = make_policy("qwen2", "nvfp4", 32, seed=34, hidden_size=512)
    # bfloat16 reaches biases and factors; the codes stay.
    modules = [module.to("cuda", torch.bfloat16) for module in modules_of(policy, *PARTS["qkv"])]
    x = torch.randn(256, 512, device="cuda").bfloat16()
    plain, exact = (_plainly(kind, modules) for kind in (x, x.float()))
    group = QuantizedGroup(
        fused(modules, pack), overlap=True, beside=torch.cuda.Stream(priority=-1)
    )

    def run(M):
        product = group(x[:M])
        if product.z is None or product.b is None:
            return product.base
        return decode_adapter.add_adapter(
            product.base, product.z, product.b, product.ends, product.scaling,
            overlap=not product.joined,
        )  # fmt: skip

    stream, captures = torch.cuda.Stream(), {}
    for M in (256, 64, 16, 1, 17, 100):
        with torch.cuda.stream(stream):
            run(M)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captures[M] = (graph, run(M))
    allowed = 2 * (plain.float() - exact).abs().max() + exact.abs().max() * 2**-8
    for _ in range(3):
        for M, (graph, out) in captures.items():
            out.fill_(float("nan"))
            graph.replay()
            assert (out.float() - exact[:M]).abs().max() <= allowed, f"{M} rows"
            assert torch.equal(out, run(M)), f"{M} rows: captured and eager differ"
