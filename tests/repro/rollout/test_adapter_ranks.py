"""Adapters of any rank, on every road: what the engine's kernels give is what the modules give."""

import pytest
import torch
from torch import nn

from kernels import dispatch
from kernels.triton import decode_adapter, portable_linear
from repro.rollout.gpu.fused_linears import DenseGroup, QuantizedGroup, takes_fused
from tests.interpreted import needs_interpreter
from tests.repro.rollout.conftest import fused, modules_of

CASES = [
    *(("bf16", rank) for rank in (4, 24, 100, 256)),
    *(("nvfp4", rank) for rank in (8, 256)),
    ("mxfp4", 100),
    ("nf4", 48),
]


def group_of(modules, weight_format):
    if weight_format == "bf16":
        return DenseGroup(modules)
    assert takes_fused(fused(modules))
    return QuantizedGroup(modules, overlap=False, beside=None, dtype=torch.float32)


def together(modules, x):
    return torch.cat([module(x) for module in modules], dim=-1)


@needs_interpreter
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize(("weight_format", "rank"), CASES)
def test_an_interpreted_rank_equals_the_modules(weight_format, rank, make_policy, monkeypatch):
    policy = make_policy("qwen2", weight_format, rank, seed=3)
    qkv = modules_of(policy, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = modules_of(policy, "mlp.gate_proj", "mlp.up_proj")
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    expected, gated = together(qkv, x), together(gate_up, x).chunk(2, dim=-1)
    monkeypatch.setattr(dispatch, "linear", portable_linear.linear)
    product = group_of(qkv, weight_format)(x)
    y = decode_adapter.add_adapter(
        product.base.contiguous(), product.z, product.b, product.ends, product.scaling,
        overlap=False,
    )  # fmt: skip
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    product = group_of(gate_up, weight_format)(x)
    y = decode_adapter.adapted_swiglu(
        product.base.contiguous(), product.z.contiguous(), product.b, product.scaling,
        overlap=False,
    )  # fmt: skip
    expected = nn.functional.silu(gated[0]) * gated[1]
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_every_format_takes_a_fused_road_and_names_it(make_policy):
    for weight_format, road in (("bf16", "dense"), ("nvfp4", "codes"), ("nf4", "codes")):
        policy = make_policy("qwen2", weight_format, 8, seed=4)
        modules = modules_of(policy, "mlp.gate_proj", "mlp.up_proj")
        x = torch.randn(200, 128, generator=torch.Generator().manual_seed(2))
        expected = together(modules, x)
        group = group_of(modules, weight_format)
        assert group.road == road
        group.refresh()
        if weight_format == "nvfp4":
            assert torch.equal(together(modules, x), expected)
