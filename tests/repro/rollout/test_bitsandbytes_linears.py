"""NF4 weights handed to bitsandbytes stay the weights they were."""

import pytest
import torch

from repro.models.random_policy import random_policy
from tests.repro.architectures import qwen2_shape

pytest.importorskip("bitsandbytes", reason="the extra `bitsandbytes` is absent")

from repro.rollout.gpu.bitsandbytes_linears import BitsandbytesGroup

SHAPE = qwen2_shape(128, vocabulary=512)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_group_with_its_adapter_is_what_the_modules_give(rows):
    policy = random_policy(
        SHAPE, weight_format="nf4", lora_rank=16, compute_dtype="bfloat16", seed=0, device="cpu"
    )
    layer = policy.decoder.model.layers[0]
    at, mlp = layer.self_attn, layer.mlp
    groups = ((at.q_proj, at.k_proj, at.v_proj), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,))
    for modules in groups:
        x = torch.randn(rows, modules[0].in_features).bfloat16()
        with torch.no_grad():
            product = BitsandbytesGroup(modules)(x)
            expected = torch.cat([module(x) for module in modules], dim=-1)
        parts = zip(
            product.z.float().split(16, dim=1),
            product.b.float().tensor_split(product.ends),
            strict=True,
        )
        actual = product.base + product.scaling * torch.cat([z @ b.t() for z, b in parts], dim=-1)
        assert (actual - expected).abs().max() <= 2**-7 * expected.abs().max()


def test_other_weights_are_refused():
    with pytest.raises(ValueError, match=r"NF4 .*Linear"):
        BitsandbytesGroup([torch.nn.Linear(64, 64, bias=False)])
