"""The adapter's arithmetic, its start, and its files, against stock peft."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kernels import reference
from repro.models.files.adapter_files import adapter_tensors, save_adapter
from repro.models.lora import adapter_layers, effective_weight
from repro.models.policy import Policy, load_policy, trainable_parameters
from repro.models.quantized_linear import QuantizedLinear

ALL_FORMATS = ("bf16", "nvfp4", "mxfp4", "nf4")


def load(folder: Any, weight_format: Any = "nvfp4", **more: Any) -> Policy:
    arguments = {"lora_rank": 8, "lora_alpha": 8.0, "seed": 0} | more
    return load_policy(folder, weight_format=weight_format, training="lora", **arguments)


def randomise(policy: Policy, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def dequantised_transformers(policy: Policy, folder: Path) -> Any:
    """Return transformers' plain model with the policy's base weights, float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, layer in adapter_layers(policy.model):
        base = layer.get_base_layer()
        if isinstance(base, QuantizedLinear):
            weight = reference.dequantize(base.weight)
            model.get_submodule(name).weight = torch.nn.Parameter(weight)
    return model


@pytest.mark.parametrize("weight_format", ALL_FORMATS)
def test_fresh_adapter_leaves_the_base_bit_equal(folder, token_ids, weight_format):
    base = load_policy(folder, weight_format=weight_format)
    adapted = load(folder, weight_format)
    assert torch.equal(
        adapted.model(input_ids=token_ids).logits, base.model(input_ids=token_ids).logits
    )


def test_start_depends_on_seed_and_module_but_not_on_the_format(make_checkpoint):
    folder = make_checkpoint("qwen2")
    starts = {}
    for weight_format in ALL_FORMATS:
        torch.manual_seed(hash(weight_format) % 1000)
        layers = dict(adapter_layers(load(folder, weight_format).model))
        starts[weight_format] = {name: layer.adapter()[0] for name, layer in layers.items()}
    for weight_format in ALL_FORMATS[1:]:
        for name, A in starts["bf16"].items():
            assert torch.equal(A, starts[weight_format][name])
    distinct = {tuple(A.flatten()[:4].tolist()) for A in starts["bf16"].values()}
    assert len(distinct) == len(starts["bf16"])
    other = dict(adapter_layers(load(folder, seed=1).model))
    assert not torch.equal(
        next(iter(other.values())).adapter()[0], starts["bf16"][next(iter(other))]
    )


def test_loading_leaves_the_global_generator_alone(make_checkpoint):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    load(make_checkpoint("qwen2"))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize(
    ("alpha", "rslora", "scaling"),
    [(4.0, False, 0.5), (8.0, False, 1.0), (16.0, False, 2.0), (8.0, True, 8 / math.sqrt(8))],
)
def test_saved_adapter_gives_the_same_logits_in_stock_peft(
    tmp_path, folder, token_ids, weight_format, alpha, rslora, scaling
):
    policy = load(folder, weight_format, lora_alpha=alpha, rslora=rslora, norms_trained=True)
    randomise(policy)
    assert next(adapter_layers(policy.model))[1].adapter()[2] == pytest.approx(scaling)
    ours = policy.model(input_ids=token_ids).logits
    save_adapter(policy, tmp_path / "adapter", base="some/base")
    plain = dequantised_transformers(policy, folder)
    without = plain(input_ids=token_ids).logits
    stock = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    logits = stock(input_ids=token_ids).logits
    # Same float32 operations up to the order of sums; without the adapter the difference is 1000x.
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)
    assert float((ours - without).abs().max()) > 0.1


@pytest.mark.parametrize("weight_format", ALL_FORMATS)
def test_effective_weight_gives_the_adapted_logits(folder, token_ids, weight_format):
    policy = load(folder, weight_format, lora_alpha=16.0)
    randomise(policy)
    plain = dequantised_transformers(policy, folder)
    for name, layer in adapter_layers(policy.model):
        plain.get_submodule(name).weight = torch.nn.Parameter(effective_weight(layer))
    torch.testing.assert_close(
        plain(input_ids=token_ids).logits,
        policy.model(input_ids=token_ids).logits,
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4", "nf4"])
def test_merge_into_a_4_bit_base_is_refused_with_the_reason(make_checkpoint, weight_format):
    policy: Any = load(make_checkpoint("qwen2"), weight_format)
    with pytest.raises(TypeError, match=f"{weight_format} base is refused.*4-bit grid"):
        policy.model.merge_and_unload()


def test_disabled_adapter_is_the_base_bit_for_bit(folder, token_ids):
    policy: Any = load(folder)
    fresh = policy.model(input_ids=token_ids).logits
    randomise(policy)
    assert not torch.equal(policy.model(input_ids=token_ids).logits, fresh)
    with policy.model.disable_adapter():
        assert torch.equal(policy.model(input_ids=token_ids).logits, fresh)


def test_adapter_files_hold_the_trained_parameters_bit_for_bit(tmp_path, folder):
    policy = load(folder, norms_trained=True)
    randomise(policy)
    save_adapter(policy, tmp_path, base="Qwen/Some")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "Qwen/Some"
    stored = load_file(tmp_path / "adapter_model.safetensors")
    trained = adapter_tensors(policy)
    assert stored.keys() == trained.keys()
    assert len(trained) == len(trainable_parameters(policy))
    for name, parameter in trained.items():
        assert torch.equal(stored[name], parameter), name
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "qerl_adapter.json",
    ]


def test_an_adapter_saved_without_its_norms_is_one_that_never_had_any(tmp_path, folder):
    policy = load(folder, norms_trained=True)
    save_adapter(policy, tmp_path, norms=False)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert stored.keys() == adapter_tensors(load(folder)).keys()
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] is None
