"""The reference on a GPU: the same bits as on the CPU where the format leaves no freedom."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.formats import RECIPES
from kernels.reference import dequantize, linear, quantize, shared_global_scale, token_logprobs
from kernels.reference_decode import decode_attention, sample_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="compares GPU with CPU; this machine has no GPU"
    ),
]


def _weight() -> Tensor:
    generator = torch.Generator().manual_seed(31)
    spread = torch.exp2(torch.randint(-40, 40, (512, 1), generator=generator))
    weight = torch.randn(512, 1024, generator=generator)
    weight[256:] *= spread[256:]
    weight[:2] = 0.0
    return weight


@pytest.mark.parametrize(
    ("format", "recipe"),
    [("nvfp4", "float32"), ("nvfp4", "bfloat16"), ("mxfp4", "float32"), ("nf4", "float32")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantising_on_the_gpu_gives_the_bits_of_the_cpu(
    format: str, recipe: str, dtype: torch.dtype, assertions: SimpleNamespace
) -> None:
    weight = _weight().to(dtype)
    host = quantize(weight, format, recipe=recipe)
    device = quantize(weight.cuda(), format, recipe=recipe)
    assert device.device.type == "cuda"
    for name, tensor in host.tensors().items():
        assertions.bitwise(device.tensors()[name].cpu(), tensor, name)
    for out in (torch.float32, torch.bfloat16):
        assertions.bitwise(dequantize(device, out).cpu(), dequantize(host, out), "dequantised")
        assertions.bitwise(dequantize(host.to("cuda"), out).cpu(), dequantize(host, out), "moved")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_shared_global_scale_of_the_gpu_is_that_of_the_cpu(
    recipe: str, assertions: SimpleNamespace
) -> None:
    parts = [_weight(), _weight()[:64] * 3]
    device = shared_global_scale([part.cuda() for part in parts], recipe)
    assertions.bitwise(device.cpu(), shared_global_scale(parts, recipe))


def test_linear_in_bfloat16_is_within_twice_plain_pytorch(assertions: SimpleNamespace) -> None:
    weight = quantize(torch.randn(256, 1024).cuda(), "nvfp4")
    x = torch.randn(33, 1024).cuda().bfloat16()
    plain = x @ dequantize(weight, torch.bfloat16).t()
    assertions.within_twice(linear(x, weight), plain, x.double() @ dequantize(weight).double().t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs_on_the_gpu_keep_float32_logits(
    dtype: torch.dtype, assertions: SimpleNamespace
) -> None:
    generator = torch.Generator().manual_seed(32)
    hidden = torch.randn(300, 256, generator=generator).to(dtype)
    weight = (torch.randn(5003, 256, generator=generator) * 0.2).to(dtype)
    ids = torch.randint(0, 5003, (300,), generator=generator)

    def results(device: str, work: torch.dtype) -> list[Tensor]:
        leaves = [t.to(device, work).requires_grad_() for t in (hidden, weight)]
        logp = torch.log_softmax(leaves[0] @ leaves[1].t() / 0.9, -1)
        chosen = logp.gather(1, ids.to(device).unsqueeze(1)).squeeze(1)
        entropy = -(logp.exp() * logp).sum(-1)
        gradients = torch.autograd.grad((chosen + entropy).sum(), leaves)
        return [chosen.detach(), entropy.detach(), *gradients]

    leaves = [t.cuda().requires_grad_() for t in (hidden, weight)]
    logprobs, entropy = token_logprobs(
        leaves[0], leaves[1], ids.cuda(), 0.9, chunk_bytes=64 * 5003 * 4
    )
    gradients = torch.autograd.grad((logprobs + entropy).sum(), leaves)
    plain, exact = results("cuda", torch.float32), results("cuda", torch.float64)
    assertions.within_twice(logprobs.detach(), plain[0], exact[0], "logprobs")
    assertions.within_twice(entropy.detach(), plain[1], exact[1], "entropy")
    rounded = results("cuda", dtype)
    for at, name in ((0, "gradient of hidden"), (1, "gradient of weight")):
        assertions.within_twice(gradients[at], rounded[2 + at], exact[2 + at], name)


def test_draws_on_the_gpu_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(33)
    logits = 3 * torch.randn(64, 1000, generator=generator)
    uniforms = torch.rand(64, generator=generator)
    for temperature in (1.0, 0.6):
        host = sample_tokens(logits, uniforms, temperature)
        device = sample_tokens(logits.cuda(), uniforms.cuda(), temperature)
        # A uniform within rounding of an edge may fall to either side.
        same = host[0] == device[0].cpu()
        assert int((~same).sum()) <= 1
        assert float((host[1] - device[1].cpu()).abs()[same].max()) < 1e-4


def test_decode_attention_on_the_gpu_is_within_twice_the_cpu(assertions: SimpleNamespace) -> None:
    generator = torch.Generator().manual_seed(34)
    cache = [torch.randn(9, 16, 2, 64, generator=generator).bfloat16() for _ in range(2)]
    q = torch.randn(3, 8, 64, generator=generator).bfloat16()
    table = torch.tensor([[0, 4, 8], [1, 2, 0], [7, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([48, 17, 1])
    host = decode_attention(q, *cache, table, lengths)
    exact = decode_attention(q.float(), *(part.float() for part in cache), table, lengths)
    device = decode_attention(
        q.cuda(), *(part.cuda() for part in cache), table.cuda(), lengths.cuda()
    )
    assertions.within_twice(device.cpu(), host, exact)
