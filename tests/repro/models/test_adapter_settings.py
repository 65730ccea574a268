"""Adapters of others against stock peft's logits; what is not plain LoRA is refused by field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from repro.models.files.adapter_files import CONFIG, TENSORS, adapter_tensors, load_adapted
from repro.models.files.adapter_settings import read_settings, settings_of
from repro.models.files.tensor_files import CheckpointError
from repro.models.policy import Policy

WHERE = Path("adapter_config.json")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_by_peft(base: Path, folder: Path, **settings: Any) -> None:
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


def load_stored(base: Path, folder: Path) -> Policy:
    return load_adapted(folder, checkpoint=base)


def logits_of_peft(base: Path, folder: Path, token_ids: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, folder).eval()(input_ids=token_ids).logits


LAYER = r"model\.layers\.1\.self_attn\.q_proj"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": r".*\.(up_proj|down_proj)"},
        {"target_modules": "all-linear"},
        {"exclude_modules": ["k_proj"]},
        {"exclude_modules": r"model\.layers\.0\..*"},
        {"layers_to_transform": [1]},
        {"layers_to_transform": 0, "layers_pattern": "layers"},
        {"alpha_pattern": {"q_proj": 40}},
        {"alpha_pattern": {LAYER: 40, "down_proj": 1}},
        {"rank_pattern": {"q_proj": 16, "up_proj": 2}},
        {"rank_pattern": {LAYER: 3}, "alpha_pattern": {"self_attn.o_proj": 2}},
        {"rank_pattern": {"v_proj": 5}, "alpha_pattern": {"v_proj": 7}, "use_rslora": True},
        {"modules_to_save": ["input_layernorm", "post_attention_layernorm"]},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": False},
    ],
    ids=str,
)
def test_what_is_plain_lora_in_other_words_has_pefts_logits(
    make_checkpoint: Callable[..., Path], tmp_path: Path, token_ids: Tensor, settings: Any
) -> None:
    base = make_checkpoint("qwen2")
    write_by_peft(base, tmp_path, **settings)
    expected = logits_of_peft(base, tmp_path, token_ids)
    ours = load_stored(base, tmp_path).model(input_ids=token_ids).logits
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)(input_ids=token_ids)
    moved = float((expected - plain.logits).abs().max())
    assert moved > 0.05  # the adapter does something
    assert float((ours - expected).abs().max()) < 1e-4 * moved


def test_an_adapter_that_eva_ranked_has_pefts_logits(
    make_checkpoint: Callable[..., Path], tmp_path: Path, token_ids: Tensor
) -> None:
    base = make_checkpoint("qwen2")
    write_by_peft(base, tmp_path, rank_pattern={"q_proj": 3}, alpha_pattern={"q_proj": 4})
    config = json.loads((tmp_path / CONFIG).read_text())
    config |= {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    ours = load_stored(base, tmp_path).model(input_ids=token_ids).logits
    expected = logits_of_peft(base, tmp_path, token_ids)
    assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_a_bfloat16_adapter_keeps_its_values(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    base = make_checkpoint("qwen2")
    write_by_peft(base, tmp_path)
    tensors = {name: t.bfloat16() for name, t in load_file(tmp_path / TENSORS).items()}
    save_file(tensors, tmp_path / TENSORS)
    for name, parameter in adapter_tensors(load_stored(base, tmp_path)).items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, tensors[name].float()), name


def plain_values() -> dict[str, Any]:
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
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "mica"),
        ("loftq_config", {"loftq_bits": 4}),
        ("corda_config", {"corda_method": "kpm"}),
        ("lora_ga_config", {"scale": "stable"}),
        ("target_parameters", ["mlp.experts.up_proj"]),
        ("modules_to_save", ["lm_head"]),
        ("modules_to_save", ["input_layernorm"]),
        ("trainable_token_indices", [1, 2]),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("megatron_config", {"a": 1}),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1e-4}),
        ("velora_config", {"num_groups": 2}),
        ("monteclora_config", {"num_samples": 2}),
        ("alora_invocation_tokens", [3]),
        ("ensure_weight_tying", True),
        ("a_field_of_a_later_release", 1),
        ("target_modules", ["q_proj", "lm_head"]),
        ("target_modules", ["embed_tokens"]),
        ("target_modules", r".*head|.*_proj"),
        ("target_modules", None),
    ],
)
def test_what_is_another_thing_is_refused_by_its_field(field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=field) as caught:
        settings_of(plain_values() | {field: value}, WHERE)
    assert str(WHERE) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": 0}, "rank r is 0"),
        ({"r": True}, "rank r is True"),
        ({"rank_pattern": {"q_proj": -1}}, "rank q_proj is -1"),
        ({"lora_alpha": None}, "alpha lora_alpha is None"),
        ({"lora_alpha": float("inf")}, "alpha lora_alpha is inf"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha q_proj is '8'"),
        ({"target_modules": r".*q_proj", "layers_to_transform": [1]}, "layers_to_transform"),
    ],
)
def test_broken_values_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        settings_of(plain_values() | changes, WHERE)


def test_every_field_that_peft_writes_is_decided_on() -> None:
    """A field that peft adds is refused until it is looked at; its default must not be."""
    assert settings_of(plain_values(), WHERE).scaling == 12 / 8


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
def test_tensors_that_do_not_fit_the_config_are_named(
    make_checkpoint: Callable[..., Path], tmp_path: Path, spoil: Any, words: str
) -> None:
    base = make_checkpoint("qwen2")
    write_by_peft(base, tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    spoil(tensors)
    save_file(tensors, tmp_path / TENSORS)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_stored(base, tmp_path)
    assert "_proj.lora_B" in str(caught.value)


def test_a_folder_without_its_config_and_targets_that_match_nothing_are_refused(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        read_settings(tmp_path / CONFIG)
    base = make_checkpoint("qwen2")
    write_by_peft(base, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text()) | {"target_modules": ["fc1"]}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="match no projection"):
        load_stored(base, tmp_path)
