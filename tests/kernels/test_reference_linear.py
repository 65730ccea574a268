"""Linear, norm, SwiGLU, rotary and decoding attention of the reference."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from kernels import reference
from kernels.reference import dequantize, linear, quantize, rms_norm, rotary, swiglu
from kernels.reference_step import Heads, LayerCache, Rotation, attend_step
from tests.kernels.conftest import assert_bitwise, assert_within_twice


def _normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(5,), (2, 3), ()])
def test_linear_and_its_gradient_are_those_of_the_dequantised_weight(format, dtype, lead):
    weight = quantize(_normal(24, 128, seed=1), format)
    bias = _normal(24, seed=2).to(dtype).requires_grad_()
    x = _normal(*lead, 128, seed=3).to(dtype).requires_grad_()
    grad = _normal(*lead, 24, seed=4).to(dtype)
    y = linear(x, weight, bias)
    y.backward(grad)
    dense = dequantize(weight, dtype)
    x2, bias2 = x.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    y2 = nn.functional.linear(x2, dense, bias2)
    y2.backward(grad)
    exact = x.detach().double() @ dequantize(weight).double().t() + bias.detach().double()
    assert_within_twice(y.detach(), y2.detach(), exact, "y")
    exact = grad.double() @ dequantize(weight).double()
    assert_within_twice(x.grad, x2.grad, exact, "gradient of x")
    exact = grad.double().reshape(-1, 24).sum(0)
    assert_within_twice(bias.grad, bias2.grad, exact, "gradient of the bias")


def test_linear_keeps_no_dense_weight_between_forward_and_backward():
    weight = quantize(_normal(64, 128, seed=1), "nvfp4")
    x = _normal(3, 128, seed=2).requires_grad_()
    alive = []
    original = reference.dequantize

    def recorded(*args, **kwargs):
        dense = original(*args, **kwargs)
        alive.append(weakref.ref(dense))
        return dense

    saved = []

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "dequantize", recorded)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = linear(x, weight)
        gc.collect()
        assert len(alive) == 1
        assert alive[0]() is None
        assert not saved
        y.sum().backward()
        assert len(alive) == 2
    assert x.grad is not None


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gain_dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_bit_equal_to_transformers_qwen2(x_dtype, gain_dtype):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    norm = Qwen2RMSNorm(96, eps=1e-6)
    norm.weight = nn.Parameter((1 + _normal(96, seed=1)).to(gain_dtype))
    x = (_normal(4, 5, 96, seed=2) * 3).to(x_dtype)
    gain, expected = norm.weight.detach(), norm(x).detach()
    for noise in (None, torch.zeros(96)):
        assert_bitwise(rms_norm(x, gain, 1e-6, noise), expected, f"noise {noise}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_bit_equal_to_transformers_mlp(dtype):
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    mlp = Qwen2MLP(Qwen2Config(hidden_size=8, intermediate_size=64)).to(dtype)
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = (nn.Identity() for _ in range(3))
    gate_up = _normal(3, 4, 64, seed=1).to(dtype)
    gate, up = gate_up.chunk(2, -1)
    mlp.gate_proj.forward = lambda _: gate
    mlp.up_proj.forward = lambda _: up
    assert_bitwise(swiglu(gate_up), mlp(gate_up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_is_bit_equal_to_transformers(dtype):
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    q, k = _normal(2, 5, 4, 16, seed=1).to(dtype), _normal(2, 5, 2, 16, seed=2).to(dtype)
    angle = torch.arange(5)[:, None] * 10000.0 ** (-torch.arange(8) / 8)
    cos = angle.cos().repeat(1, 2).expand(2, 5, 16).to(dtype)
    sin = angle.sin().repeat(1, 2).expand(2, 5, 16).to(dtype)
    expected = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    for ours, other in zip(rotary(q, k, cos, sin), expected, strict=True):
        assert_bitwise(ours, other.transpose(1, 2).contiguous())


def test_shapes_and_types_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"dimension is 32.*64"):
        linear(_normal(2, 32, seed=2), quantize(_normal(16, 64, seed=1), "mxfp4"))
    x, gain = torch.randn(2, 8), torch.ones(8)
    for noise in (torch.zeros(4), torch.zeros(8, dtype=torch.bfloat16), torch.tensor(0.0)):
        with pytest.raises(ValueError, match=r"torch.float32.* \(8,\)"):
            rms_norm(x, gain, 1e-6, noise)
    with pytest.raises(ValueError, match=r"dimension is 8.*4"):
        rms_norm(x, torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="must be even"):
        swiglu(torch.zeros(2, 3))


def test_a_row_that_does_not_run_attends_to_nothing_and_writes_nothing():
    keys, values = torch.full((2, 2, 4, 1, 8), math.nan)
    qkv, turn = torch.ones(2, 32), torch.ones(1, 8)
    at, table = torch.tensor([-1, 0], dtype=torch.int32), torch.tensor([[0], [1]])
    cache, turns = LayerCache(keys=keys, values=values), Rotation(cos=turn, sin=0 * turn)
    out = attend_step(qkv, at, table, cache, Heads(query=2, scaling=1.0), turns)
    assert torch.equal(out, torch.tensor([[0.0], [1.0]]).expand(2, 16))
    assert keys[0].isnan().all()
    assert values[0].isnan().all()
