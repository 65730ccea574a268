"""Checkpoint folders that say two things, or something in the wrong type: one sentence each."""

import json
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoModelForCausalLM

from repro.__main__ import USAGE, main
from repro.models.checkpoint import TINY_FOLDER, write_quantized
from repro.models.decoder import require_supported
from repro.models.files.tensor_files import CheckpointError
from repro.models.policy import load_policy, load_tokenizer
from tests.repro.models.conftest import edit_config
from tests.said import refusal


@pytest.fixture
def copied(make_checkpoint, tmp_path):
    """Return a function that copies a checkpoint of an architecture and changes its config."""

    def copy(architecture="qwen2", **fields):
        folder = tmp_path / "checkpoint"
        shutil.copytree(make_checkpoint(architecture), folder)
        edit_config(folder, lambda values: values.update(fields))
        return folder

    return copy


def refused(folder):
    """Return the one sentence with which loading and quantising both refuse a folder."""
    out = folder.with_name("out")
    said = refusal(lambda: load_policy(folder, weight_format="bf16"), ValueError)
    assert said == refusal(lambda: write_quantized(folder, out), ValueError)
    assert "\n" not in said
    assert not out.exists()
    return said


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("rms_norm_eps", "1e-6", "field rms_norm_eps is '1e-6'; "),
        ("layer_types", "full", "layer_types"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ("rope_parameters", "yarn", "field rope_parameters is 'yarn'; "),
        ("num_key_value_heads", 3, "num_key_value_heads is 3;"),
        ("intermediate_size", -1, "intermediate_size is -1;"),
        ("hidden_size", 2**70, "hidden_size is 1180591620717411303424;"),
        ("num_attention_heads", 2**20, "head_dim is 0;"),
        ("rms_norm_eps", -1.0, "rms_norm_eps is -1.0;"),
        ("rms_norm_eps", 1e30, "rms_norm_eps is 1e+30;"),
        ("num_labels", 2**40, "num_labels is 1099511627776;"),
        ("rope_parameters", {"rope_theta": 1e-30}, "rope_theta is 1e-30; needed"),
        ("pad_token_id", 2**31, "pad_token_id is 2147483648;"),
        ("eos_token_id", 97, "field eos_token_id is 97; needed is from 0 to below vocab_size, 97"),
        ("eos_token_id", [1, 5000], "field eos_token_id is [1, 5000]; needed"),
        ("eos_token_id", -1, "field eos_token_id is -1; needed"),
        ("partial_rotary_factor", 0.5, "field partial_rotary_factor is 0.5; needed is 1"),
        ("rope_parameters", {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25;"),
        ("num_hidden_layers", 2**31, "num_hidden_layers is 2147483648;"),
        ("rope_parameters", {"rope_theta": 2**70}, "field rope_theta is 11805916207174113"),
        ("id2label", ["a"], "field id2label is ['a']; "),
        ("dtype", "float99", "field dtype is 'float99'; "),
        ("rope_scaling", "yarn", "field rope_scaling is 'yarn'; "),
        ("return_dict", False, "field return_dict is False; "),
        ("quantization_config", "nvfp4", "field quantization_config is 'nvfp4'; "),
        ("quantization_config", {"quant_method": "compressed-tensors", "config_groups": "x"}, ""),
        ("model_type", ["qwen2"], "model_type is"),
        ("model_type", "gpt2", "'gpt2'; this project builds qwen2, qwen3, llama"),
        ("architectures", 7, "field architectures is 7; needed is ['Qwen2ForCausalLM']"),
        ("architectures", [], "architectures is []"),
        ("architectures", [1], "architectures is [1]"),
        ("architectures", ["OddForCausalLM"], "architectures is ['OddForCausalLM']"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("layer_types", ["full_attention", "sliding_attention"], "['sliding_attention']; needed"),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "rope_type is 'dynamic'"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(copied, field, value, sentence):
    said = refused(copied(**{field: value}))
    assert "config.json: " in said
    assert sentence in said


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "FSDPQwen2ForCausalLM", "QWen2ForCausalLM"])
def test_a_class_is_known_by_older_names(name):
    require_supported({"model_type": "qwen2", "architectures": [name]}, "config.json")


def test_sizes_whose_product_torch_cannot_hold_are_refused(copied):
    sizes = {"hidden_size": 2**27, "num_attention_heads": 2**20, "num_key_value_heads": 1}
    assert "head_dim is 1099511627776; needed" in refused(copied(head_dim=2**40, **sizes))


@pytest.mark.parametrize(
    "text",
    [None, "", "{", "[]", "{}", '{"a": 3}', '{"a": 3, "a": 3}', "[" * 100_000, '{"a":' * 100_000],
)
def test_a_config_that_is_none_is_refused(copied, text):
    folder = copied()
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    assert "config.json" in refused(folder)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("gone")])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "chat_template.jinja"])
def test_what_is_no_file_where_one_is_read_is_refused(copied, name, make):
    folder = copied()
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    assert f"{name} is " in refused(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [("_attn_implementation", "flash_attention_3"), ("attn_implementation", "fast")],
)
def test_what_transformers_does_not_read_back_is_a_sentence(copied, capsys, field, value):
    folder = copied(**{field: value})
    out = folder.with_name("out")
    assert main(["quantize", str(folder), str(out)]) == USAGE
    assert "transformers" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_a_deeply_nested_header_is_corrupt(copied, opening):
    folder, header = copied(), opening * 200_000
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "model.safetensors is not safetensors" in refused(folder)


def test_a_model_and_an_adapter_in_one_folder_are_refused(copied):
    folder = copied()
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter_config.json beside a model" in refused(folder)
    (folder / "config.json").unlink()
    assert "adapter_config.json" in refused(folder)


def test_the_index_of_an_earlier_save_does_not_hide_the_single_file(copied):
    folder = copied()
    index = {"weight_map": {"model.norm.weight": "model-00006-of-00007.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"left.over": torch.zeros(2)}, folder / "model-00001-of-00007.safetensors")
    ids = torch.arange(9)[None]
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_policy(folder, weight_format="bf16")
    torch.testing.assert_close(ours.model(input_ids=ids).logits, stock(input_ids=ids).logits)
    assert (write_quantized(folder, folder.with_name("out")) / "model.safetensors").is_file()


@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4"])
def test_a_tied_head_may_be_stored_again_with_the_same_values_alone(copied, weight_format):
    folder = copied()
    path = folder / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    # Of another dtype, as some tools store it.
    save_file({**tensors, "lm_head.weight": head.to(torch.float32)}, path)
    load_policy(folder, weight_format=weight_format)
    load_policy(folder, weight_format=weight_format, order=1)
    head[3, 5] += 1
    save_file({**tensors, "lm_head.weight": head}, path)
    assert "lm_head.weight differs from model.embed_tokens.weight" in refused(folder)
    save_file({**tensors, "lm_head.weight": head[:-1].clone()}, path)
    assert "lm_head.weight differs" in refused(folder)


@pytest.mark.parametrize("said", [True, False])
def test_a_tied_matrix_may_be_stored_as_the_head_alone(copied, said):
    folder = copied()
    path = folder / "model.safetensors"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = write_quantized(folder, folder.with_name("whole")) / "model.safetensors"
    save_model(model, path)
    assert "model.embed_tokens.weight" not in load_file(path)
    if not said:  # what shares memory is known by the tie of config.json, too
        save_file(load_file(path), path)
    ids = torch.arange(9)[None]
    for order in (None, 1):
        policy = load_policy(folder, weight_format="bf16", order=order)
        torch.testing.assert_close(policy.model(input_ids=ids).logits, model(ids).logits)
    shard = write_quantized(folder, folder.with_name("out")) / "model.safetensors"
    stored, expected = load_file(shard), load_file(whole)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored.items())


def test_of_tensors_that_share_memory_each_is_read_by_its_name(copied):
    folder = copied(tie_word_embeddings=False)
    path = folder / "model.safetensors"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first, second = (layer.mlp for layer in model.model.layers)
    second.down_proj.weight = first.down_proj.weight
    model.lm_head.weight = model.model.embed_tokens.weight
    save_model(model, path)
    ids = torch.arange(9)[None]
    policy = load_policy(folder, weight_format="bf16")
    torch.testing.assert_close(policy.model(input_ids=ids).logits, model(ids).logits)
    # Without the names of what was left out, nothing is guessed.
    save_file(load_file(path), path)
    assert "model.embed_tokens.weight is missing" in refused(folder)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", '{"tokenizer_class": 7}', "tokenizer"),
        ("tokenizer.json", None, "has no vocabulary"),
        ("tokenizer.json", "", "tokenizer.json"),
        ("special_tokens_map.json", "{", "tokenizer"),
    ],
)
def test_a_tokenizer_that_is_none_is_refused_by_its_file(tmp_path, name, text, sentence):
    for own in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_FOLDER / own, tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    assert sentence in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("special", "is_pad"), [(False, False), (True, False), (True, True)])
def test_a_token_beyond_the_embedding_is_refused_but_that_of_padding(
    tmp_path, special, is_pad, capsys
):
    folder = tmp_path / "checkpoint"
    shutil.copytree(TINY_FOLDER, folder)
    values = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    values["added_tokens"].append({"id": 333, "content": "<new>", "special": special, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(values))
    if is_pad:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<new>"}))
        tokenizer = load_tokenizer(folder)
        assert tokenizer.pad_token_id == 333
        return
    with pytest.raises(CheckpointError, match=r"vocab_size is 333, .*'<new>'"):
        load_policy(folder, weight_format="bf16")
    out = tmp_path / "out"
    assert main(["quantize", str(folder), str(out), "--device", "cpu"]) == USAGE
    assert "vocab_size is 333" in capsys.readouterr().err
    assert not out.exists()
