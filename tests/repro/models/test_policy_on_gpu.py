"""The same policy on a GPU: same codes, same start of the adapter, the CPU's logits up to dtype."""

import pytest
import torch

from repro.models.checkpoint import write_quantized
from repro.models.lora import adapter_layers, effective_weight
from repro.models.norms import block_norms
from repro.models.policy import load_policy, trainable_parameters
from tests.repro.models.conftest import require_same_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none"),
]


def load(folder, weight_format, **more):
    arguments = {"training": "lora", "lora_rank": 8, "lora_alpha": 16.0, "seed": 0} | more
    return load_policy(folder, weight_format=weight_format, **arguments)


@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4", "nf4"])
def test_codes_and_scales_are_those_of_the_cpu(folder, weight_format):
    require_same_weights(load(folder, weight_format), load(folder, weight_format, device="cuda"))


@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4", "mxfp4", "nf4"])
def test_bfloat16_policy_on_the_gpu_has_the_cpu_logits_up_to_rounding(
    folder, token_ids, weight_format
):
    exact = load(folder, weight_format)
    policy = load(
        folder, weight_format, device="cuda", compute_dtype="bfloat16", norms_trained=True
    )
    generator = torch.Generator().manual_seed(5)
    adapters = dict(adapter_layers(exact.model))
    for name, layer in adapter_layers(policy.model):
        A, B, _ = layer.adapter()
        assert torch.equal(A.cpu(), adapters[name].adapter()[0])
        with torch.no_grad():
            B.copy_(torch.randn(B.shape, generator=generator) * 0.05)
            adapters[name].adapter()[1].copy_(B.cpu())
    for name, norm in block_norms(policy.model).items():
        noise = torch.randn(128, generator=generator) * 0.1
        norm.noise, block_norms(exact.model)[name].noise = noise.cuda(), noise
    logits = policy.model(input_ids=token_ids.cuda()).logits
    expected = exact.model(input_ids=token_ids).logits
    error = float((logits.float().cpu() - expected).norm() / expected.norm())
    # bfloat16 keeps 8 bits: a few roundings a layer; a wrong weight or scaling is above 0.1.
    assert error < 0.03
    logits.float().square().mean().backward()
    for key, parameter in trainable_parameters(policy).items():
        assert parameter.grad is not None, key
        assert parameter.grad.dtype == torch.float32
        assert bool(torch.isfinite(parameter.grad).all()), key


def test_checkpoint_quantised_on_the_gpu_has_the_same_bytes(folder, tmp_path):
    on_cpu = write_quantized(folder, tmp_path / "cpu")
    on_gpu = write_quantized(folder, tmp_path / "gpu", device="cuda")
    shards = [sorted(one.glob("*.safetensors")) for one in (on_cpu, on_gpu)]
    assert shards[0]
    for a, b in zip(*shards, strict=True):
        assert a.read_bytes() == b.read_bytes()


def test_policy_moves_between_devices_with_its_codes(make_checkpoint):
    policy = load(make_checkpoint("qwen2"), "nvfp4")
    layer = next(adapter_layers(policy.model))[1]
    before = effective_weight(layer)
    policy.model.to("cuda")
    assert layer.get_base_layer().device.type == "cuda"
    assert torch.allclose(effective_weight(layer).cpu(), before, rtol=1e-6, atol=1e-6)
