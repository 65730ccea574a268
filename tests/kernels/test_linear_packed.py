"""The linear layer over packed weights: its gradients, and errors that tell."""

import pytest
import torch

from kernels import dispatch, reference
from kernels.cuda import linear
from kernels.cuda.hopper import Adapter
from kernels.packing import pack
from tests.kernels.conftest import assert_within_twice

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (compute capability 9.0)")


@pytest.mark.gpu
@hopper
def test_gradients_reach_x_and_the_bias():
    N, K, M = 272, 512, 70
    quantized = reference.quantize(torch.randn(N, K, device="cuda") * 0.05, "nvfp4")
    dense, packed = reference.dequantize(quantized), pack(quantized)
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
