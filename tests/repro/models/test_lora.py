"""The adapter's arithmetic, its start, and its files, against stock peft."""

import json
import math

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kernels import reference
from repro.models.files.adapter_files import adapter_tensors, save_adapter
from repro.models.lora import adapter_layers, effective_weight, fold_adapter, folding_loss
from repro.models.policy import load_policy, trainable_parameters
from repro.models.quantized_linear import QuantizedLinear
from repro.spec.arm import FOUR_BIT_FORMATS, WEIGHT_FORMATS
from tests.repro.rl.conftest import nudge


def load(folder, weight_format="nvfp4", **more):
    arguments = {"lora_rank": 8, "lora_alpha": 8.0, "seed": 0} | more
    return load_policy(folder, weight_format=weight_format, training="lora", **arguments)


def dequantised_transformers(policy, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, layer in adapter_layers(policy.model):
        base = layer.get_base_layer()
        if isinstance(base, QuantizedLinear):
            weight = reference.dequantize(base.weight)
            model.get_submodule(name).weight = torch.nn.Parameter(weight)
    return model


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_a_fresh_or_disabled_adapter_leaves_the_base_bit_equal(folder, token_ids, weight_format):
    base = load_policy(folder, weight_format=weight_format).model(input_ids=token_ids).logits
    adapted = load(folder, weight_format)
    assert torch.equal(adapted.model(input_ids=token_ids).logits, base)
    nudge(adapted, 0.05)
    assert not torch.equal(adapted.model(input_ids=token_ids).logits, base)
    with adapted.model.disable_adapter():
        assert torch.equal(adapted.model(input_ids=token_ids).logits, base)


def test_start_depends_on_seed_and_module_but_not_on_the_format(make_checkpoint):
    folder = make_checkpoint("qwen2")

    def start(weight_format, **more):
        layers = adapter_layers(load(folder, weight_format, **more).model)
        return {name: layer.adapter()[0] for name, layer in layers}

    first = start("bf16")
    for number, weight_format in enumerate(FOUR_BIT_FORMATS):
        torch.manual_seed(number)
        expected = torch.rand(3)
        torch.manual_seed(number)
        again = start(weight_format)
        # Loading leaves the global generator alone.
        assert torch.equal(torch.rand(3), expected)
        assert all(torch.equal(A, again[name]) for name, A in first.items())
    assert len({tuple(A.flatten()[:4].tolist()) for A in first.values()}) == len(first)
    other = start("bf16", seed=1)
    assert not any(torch.equal(A, other[name]) for name, A in first.items())


@pytest.mark.parametrize(
    ("weight_format", "alpha", "rslora", "scaling"),
    [
        ("bf16", 4.0, False, 0.5),
        ("bf16", 8.0, True, 8 / math.sqrt(8)),
        ("nvfp4", 8.0, False, 1.0),
        ("nvfp4", 16.0, False, 2.0),
    ],
)
def test_saved_adapter_gives_the_same_logits_in_stock_peft(
    tmp_path, folder, token_ids, weight_format, alpha, rslora, scaling
):
    policy = load(folder, weight_format, lora_alpha=alpha, rslora=rslora, norms_trained=True)
    nudge(policy, 0.05)
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


@pytest.mark.parametrize("weight_format", FOUR_BIT_FORMATS)
def test_merge_into_a_4_bit_base_is_refused_with_the_reason(make_checkpoint, weight_format):
    policy = load(make_checkpoint("qwen2"), weight_format)
    with pytest.raises(TypeError, match=f"{weight_format} base is refused.*4-bit grid"):
        policy.model.merge_and_unload()


@pytest.mark.parametrize("norms", [True, False])
def test_adapter_files_hold_the_trained_parameters_bit_for_bit(tmp_path, folder, norms):
    policy = load(folder, norms_trained=True)
    nudge(policy, 0.05)
    save_adapter(policy, tmp_path, base="Qwen/Some", norms=norms)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "Qwen/Some"
    assert bool(config["modules_to_save"]) == norms
    stored = load_file(tmp_path / "adapter_model.safetensors")
    trained = adapter_tensors(policy)
    assert len(trained) == len(trainable_parameters(policy))
    # Without its norms it is an adapter that never had any.
    assert stored.keys() == (trained if norms else adapter_tensors(load(folder))).keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, trained[name]), name
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "qerl_adapter.json",
    ]


def test_a_folded_adapter_is_a_sum_rounded_once_and_nothing_beside_it(folder, token_ids):
    policy = load(folder, "bf16", lora_alpha=16.0)
    assert folding_loss(policy.model) == 0
    nudge(policy, 0.05)
    assert 0 < folding_loss(policy.model) < 0.5
    plain = dequantised_transformers(policy, folder)
    for name, layer in adapter_layers(policy.model):
        rounded = effective_weight(layer, torch.bfloat16).float()
        plain.get_submodule(name).weight = torch.nn.Parameter(rounded)
    fold_adapter(policy.model)
    own, expected = (model(input_ids=token_ids).logits for model in (policy.model, plain))
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():  # of no effect any more
        for _, layer in adapter_layers(policy.model):
            layer.adapter()[1].add_(1.0)
    assert torch.equal(policy.model(input_ids=token_ids).logits, own)
    with pytest.raises(TypeError, match=r"nvfp4.* 16 bits"):
        fold_adapter(load(folder, "nvfp4").model)
