"""4-bit projections are packed once, at loading, and trainer and engine read the same tensors."""

import pytest
import torch

from kernels import dispatch
from kernels.formats import FORMATS
from kernels.packing import PackedWeight
from repro.models.fused_weights import fused_weight
from repro.models.lora import adapter_layers, base_linear
from repro.models.random_policy import random_policy
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.spec.config import SamplingConfig
from tests.kernels.conftest import assert_same_weight
from tests.repro.architectures import qwen2_shape

SHAPE = qwen2_shape(256, layers=2)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def make(weight_format, device="cpu"):
    return random_policy(SHAPE, weight_format=weight_format, lora_rank=16, seed=0, device=device)


def layers(policy):
    return {name: base_linear(layer) for name, layer in adapter_layers(policy.model)}


@pytest.mark.parametrize("weight_format", FORMATS)
def test_loading_packs_every_projection_and_fuses_those_that_share_an_input(
    weight_format, monkeypatch
):
    plain = layers(make(weight_format))
    monkeypatch.setattr(dispatch, "reads_packed", lambda device, dtype: True)
    packed = layers(make(weight_format))
    assert len(packed) == 14
    for name, layer in packed.items():
        assert isinstance(layer.weight, PackedWeight), name
        assert_same_weight(layer.codes(), plain[name].weight, name)
    group = [packed[f"model.layers.1.self_attn.{part}_proj"] for part in "qkv"]
    fused = fused_weight(group)
    assert fused.shape == (256 + 128 + 128, 256)
    assert fused.packs.data_ptr() == group[0].weight.packs.data_ptr()
    assert fused_weight(group[:2]) is None


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (compute capability 9.0)")
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_pass_without_an_engine_is_to_the_bit_the_pass_with_one(weight_format):
    policy = make(weight_format, "cuda")
    ids = torch.arange(96, device="cuda").view(2, 48)
    with torch.no_grad():
        alone = policy.model(input_ids=ids).logits
    addresses = {name: layer.qweight.data_ptr() for name, layer in layers(policy).items()}
    engine = Engine(policy, EngineConfig(slots=2, max_positions=64, max_new_tokens=8))
    engine.sample([[1, 2, 3]], SamplingConfig(max_new_tokens=4), group_size=1, seeds=[0])
    with torch.no_grad():
        assert torch.equal(policy.model(input_ids=ids).logits, alone)
    engine.close()
    for name, layer in layers(policy).items():
        assert isinstance(layer.weight, PackedWeight), name
        assert layer.qweight.data_ptr() == addresses[name], name
