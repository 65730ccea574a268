"""Loading a policy: what is quantised, what is trainable, and what is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from repro.models.norms import block_norms, final_norm, wrap_norms
from repro.models.policy import trainable_parameters
from tests.repro.models.conftest import load, require_same_weights


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_bf16_policy_has_the_logits_of_transformers_in_its_dtype(
    architecture, make_checkpoint, token_ids, compute_dtype
):
    dtype, folder = getattr(torch, compute_dtype), make_checkpoint(architecture, rms_norm_eps=1e-3)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    logits = load(folder, "bf16", compute_dtype=compute_dtype).model(input_ids=token_ids).logits
    assert logits.dtype == dtype
    assert torch.equal(logits, stock(input_ids=token_ids).logits)


@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4", "mxfp4", "nf4"])
def test_adapters_and_trained_norms_are_float32_masters(folder, token_ids, weight_format):
    policy = load(folder, weight_format, "lora", norms_trained=True, compute_dtype="bfloat16")
    parameters = trainable_parameters(policy)
    norms = [parameter for name, parameter in parameters.items() if "layernorm" in name]
    assert (len(norms), sum("lora_" in name for name in parameters)) == (4, 2 * 14)
    assert len(parameters) == 4 + 2 * 14
    facts = policy.facts
    assert (facts["linears"], facts["norms_trained"]) == ({weight_format: 14}, len(norms))
    error = facts["relative_weight_error_mean"]
    assert (error is None) == (weight_format == "bf16")
    # Gaussian weights lose 9 to 10 % in NVFP4; an unquantised or garbled one would not.
    assert weight_format != "nvfp4" or 0.08 < error < 0.11
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}
    logits = policy.model(input_ids=token_ids).logits
    assert logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()
    for parameter in norms:
        assert bool(parameter.grad.abs().sum() > 0)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_full_training_reaches_every_parameter_in_float32(folder, token_ids, compute_dtype):
    policy = load(folder, "bf16", "full", compute_dtype=compute_dtype)
    parameters = trainable_parameters(policy)
    assert {id(p) for p in parameters.values()} == {id(p) for p in policy.model.parameters()}
    logits = policy.model(input_ids=token_ids).logits.float()
    logits.square().mean().backward()
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        # Keys' biases shift all scores of a query alike: softmax makes their gradient zero.
        assert name.endswith("k_proj.bias") or bool(parameter.grad.abs().sum() > 0), name
    assert policy.facts["compute"].startswith(compute_dtype)
    if compute_dtype == "bfloat16":  # it really multiplies in it
        exact = load(folder, "bf16", "full").model(input_ids=token_ids).logits
        assert 1e-4 < float((logits - exact).abs().max() / exact.abs().max()) < 0.1


def test_wrapping_keeps_names(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    names = list(model.state_dict())
    with pytest.raises(TypeError, match="call wrap_norms first"):
        block_norms(model)
    assert len(wrap_norms(model)) == 2 * 2 + 1
    assert list(model.state_dict()) == names
    assert list(block_norms(model)) == [
        f"model.layers.{layer}.{norm}"
        for layer in (0, 1)
        for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    assert final_norm(model) is model.model.norm


def test_casting_the_model_leaves_codes_and_scales_alone(folder):
    policy = load(folder)
    policy.model.to(torch.float16).half()
    require_same_weights(policy, load(folder))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_format": "int4"}, "weight_format is 'int4'"),
        ({"training": "qlora"}, "training is 'qlora'"),
        ({"weight_format": "nvfp4", "training": "full"}, "full training needs bf16"),
        ({"training": "none", "norms_trained": True}, "norms_trained adds"),
        ({"compute_dtype": "int8"}, "no compute_dtype 'int8'"),
        ({"training": "lora", "lora_rank": 0}, "LoRA rank is 0"),
    ],
)
def test_contradictory_arguments_are_refused(make_checkpoint, arguments, message):
    with pytest.raises(ValueError, match=message):
        load(make_checkpoint("qwen2"), **arguments)


def test_width_that_the_format_cannot_block_names_the_projection(make_checkpoint):
    folder = make_checkpoint("qwen2", hidden_size=96)
    load(folder, "nvfp4")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight.*64"):
        load(folder, "nf4")

    folder = make_checkpoint("qwen2", intermediate_size=200)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.down_proj\.weight.*16"):
        load(folder, "nvfp4")
