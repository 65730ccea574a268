"""Adapters of others against stock peft's logits; what is not plain LoRA is refused by field."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from repro.models.files.adapter_files import (
    TENSORS,
    adapter_tensors,
    load_adapted,
    read_adapter,
    settings_of,
)
from repro.models.files.tensor_files import CheckpointError

WHERE = Path("adapter_config.json")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_by_peft(base, folder, **settings):
    """Let peft make, randomise and save an adapter."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    values = {"r": 8, "lora_alpha": 12, "target_modules": ALL, "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, LoraConfig(**(values | settings)))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    adapted.save_pretrained(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"target_modules": "all-linear"},
        {"target_modules": [*ALL, "Wqkv"]},
        {"modules_to_save": ["input_layernorm", "post_attention_layernorm"]},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": False},
    ],
    ids=str,
)
def test_what_is_plain_lora_in_other_words_has_pefts_logits(
    make_checkpoint, tmp_path, token_ids, settings
):
    base = make_checkpoint("qwen2")
    write_by_peft(base, tmp_path, **settings)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = model(input_ids=token_ids).logits
    expected = PeftModel.from_pretrained(model, tmp_path).eval()(input_ids=token_ids).logits
    ours = load_adapted(tmp_path, checkpoint=base).model(input_ids=token_ids).logits
    moved = float((expected - plain).abs().max())
    assert moved > 0.05  # the adapter does something
    assert float((ours - expected).abs().max()) < 1e-4 * moved
    # One of 16 bits keeps its values.
    tensors = {name: t.bfloat16() for name, t in load_file(tmp_path / TENSORS).items()}
    save_file(tensors, tmp_path / TENSORS)
    for name, parameter in adapter_tensors(load_adapted(tmp_path, checkpoint=base)).items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, tensors[name].float()), name


def plain_values():
    """Return the values that peft writes for plain LoRA on the seven projections."""
    config = LoraConfig(r=8, lora_alpha=12, target_modules=ALL, task_type="CAUSAL_LM")
    return {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("task_type", "SEQ_CLS"),
        ("use_dora", True),
        ("bias", "all"),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "eva"),
        ("corda_config", {"corda_method": "kpm"}),
        ("target_parameters", ["mlp.experts.up_proj"]),
        ("target_modules", ["q_proj", "v_proj"]),
        ("target_modules", [*ALL, "lm_head"]),
        ("target_modules", 7),
        ("modules_to_save", ["lm_head"]),
        ("modules_to_save", ["input_layernorm"]),
        ("trainable_token_indices", [1, 2]),
        ("layers_to_transform", [1]),
        ("layers_to_transform", 0),
        ("rank_pattern", {"q_proj": 16}),
        ("alpha_pattern", {"q_proj": 40}),
        ("a_field_of_a_later_release", 1),
        ("r", 0),
        ("r", True),
        ("lora_alpha", float("inf")),
        ("lora_alpha", 10**400),
        ("lora_alpha", "8"),
        ("use_rslora", "false"),
    ],
)
def test_what_is_another_thing_is_refused_by_its_field(field, value):
    # A field that peft adds is refused until it is looked at; what it writes by itself is not.
    assert settings_of(plain_values(), WHERE)["lora_rank"] == 8
    with pytest.raises(CheckpointError, match=field) as caught:
        settings_of(plain_values() | {field: value}, WHERE)
    assert str(WHERE) in str(caught.value)


Q_B = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t.pop(Q_B), "is missing"),
        (lambda t: t.update({Q_B.replace("q_proj", "z_proj"): t[Q_B].clone()}), "has no place"),
        (lambda t: t.update({Q_B: t[Q_B][:, :4].clone()}), r"needed is a float \(128, 8\)"),
        (lambda t: t.update({Q_B: t[Q_B].to(torch.int32)}), "is torch.int32"),
        (lambda t: t[Q_B][:1].fill_(float("nan")), "NaN"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(make_checkpoint, tmp_path, spoil, words):
    base = make_checkpoint("qwen2")
    write_by_peft(base, tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    spoil(tensors)
    save_file(tensors, tmp_path / TENSORS)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_adapted(tmp_path, checkpoint=base)
    assert "_proj.lora_B" in str(caught.value)


@pytest.mark.parametrize("base", [None, "", "/no/such/folder", "no-such-folder"])
def test_a_base_that_is_not_here_is_named_with_the_file_that_names_it(tmp_path, base):
    values = plain_values() | {"base_model_name_or_path": base}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"adapter_config.json: base_model_name_or_path is"):
        load_adapted(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight_format", "fp3"),
        ("order", "1"),
        ("order", [1]),
        ("rounding", "nvfp4"),
        ("rounding", {"format": "nvfp4", "factor": "2"}),
        ("rounding", {"format": "nvfp4", "factor": -2}),
        ("rounding", {"format": "nvfp4", "seed": 2}),
    ],
)
def test_what_training_wrote_beside_an_adapter_is_refused_by_its_field(tmp_path, field, value):
    (tmp_path / "adapter_config.json").write_text(json.dumps(plain_values()))
    own = {"weight_format": "bf16", "order": None} | {field: value}
    (tmp_path / "qerl_adapter.json").write_text(json.dumps(own))
    with pytest.raises(CheckpointError, match=rf"qerl_adapter.json: {field} is"):
        read_adapter(tmp_path)
