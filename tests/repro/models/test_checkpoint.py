"""Quantised checkpoints: ours in other programs, and every way to be broken."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kernels import reference
from repro.models.checkpoint import MANIFEST, TINY_FOLDER, digests_of_read, verify, write_quantized
from repro.models.files.tensor_files import CheckpointError
from repro.models.loading import SUMMARY_FILE
from tests.repro.models.conftest import (
    edit_config,
    edit_tensors,
    load,
    quantized_linears,
    require_same_weights,
)

# Another project's implementation of the layout; what is written equals it in test_llmcompressor.
pytest.importorskip("compressed_tensors", reason="transformers reads these layouts by it")


def own(**fields):
    """Return a change of these fields of a quantization config."""
    return lambda config: config.update(fields)


def group(**fields):
    return lambda config: config["config_groups"]["group_0"].update(fields)


def weights(**fields):
    """Return a change of these fields of what that group says of weights."""
    return lambda config: config["config_groups"]["group_0"]["weights"].update(fields)


@pytest.fixture(scope="module")
def stored(make_checkpoint, tmp_path_factory):
    """Return a quantised Qwen2; a test that changes it copies it."""
    folder = tmp_path_factory.mktemp("stored") / "qwen2"
    return write_quantized(make_checkpoint("qwen2"), folder)


@pytest.fixture
def copied(stored, tmp_path):
    return Path(shutil.copytree(stored, tmp_path / "copied"))


@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4"])
def test_a_checkpoint_written_here_says_the_same_in_transformers(
    folder, tmp_path, token_ids, weight_format
):
    written = write_quantized(folder, tmp_path / "quantized", weight_format)
    manifest = json.loads((written / MANIFEST).read_text())
    said = (manifest["format"], manifest["layout"], manifest["linears"])
    assert said == (weight_format, f"{weight_format}-pack-quantized", 14)
    stock = AutoModelForCausalLM.from_pretrained(written, dtype=torch.bfloat16).eval()
    logits = stock(input_ids=token_ids).logits  # compressed-tensors decompresses at first use
    ours = load(written, weight_format, compute_dtype="bfloat16")
    require_same_weights(load(folder, weight_format), ours)
    for name, linear in quantized_linears(ours).items():
        dense = reference.dequantize(linear.weight, torch.bfloat16)
        assert torch.equal(stock.get_submodule(name).weight, dense), name
    # Equal weights and the same bfloat16 arithmetic: equal bits, no tolerance.
    assert torch.equal(ours.model(input_ids=token_ids).logits, logits)


def test_groups_that_straddle_shards_share_their_scale(architecture, make_checkpoint, tmp_path):
    source = make_checkpoint(architecture, max_shard_size="20KB")
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({index[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"}) == 3
    written = write_quantized(source, tmp_path / "out", max_shard_bytes=20_000)
    assert len([*written.glob("model-*")]) > 3
    whole = write_quantized(make_checkpoint(architecture), tmp_path / "whole")
    require_same_weights(load(whole), load(written))


def test_companion_files_are_copied_and_code_is_not(make_checkpoint, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(make_checkpoint("qwen2"), source)
    (source / "tokenizer_config.json").write_text("{}")
    (source / "merges.txt").write_text("a b\n")
    for other in ("modeling_custom.py", "my_token_notes.txt"):
        (source / other).write_text("raise SystemExit")
    out = write_quantized(source, tmp_path / "out")
    assert (out / "merges.txt").read_text() == "a b\n"
    assert (out / "generation_config.json").is_file()
    read = {"config.json", "generation_config.json", "merges.txt", "tokenizer_config.json"}
    assert digests_of_read(out).keys() == read | {"model.safetensors"}
    assert not (out / "modeling_custom.py").exists()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_the_manifest_names_the_source_and_of_a_hub_name_the_commit(tmp_path):
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("c" * 40)
    shutil.copytree(TINY_FOLDER, snapshot)
    origins = [
        json.loads((write_quantized(source, tmp_path / name, "nf4") / MANIFEST).read_text())
        for name, source in (("hub", snapshot), ("own", TINY_FOLDER))
    ]
    assert [(origin["source"], origin.get("revision")) for origin in origins] == [
        ("owner/name", "c" * 40), (TINY_FOLDER.name, None),
    ]  # fmt: skip


def test_the_manifest_says_how_it_was_made_and_its_sums_find_a_bit_flip(copied):
    manifest = json.loads((copied / MANIFEST).read_text())
    assert (manifest["algorithm"], manifest["recipe"]) == ("rtn", "bfloat16")
    assert manifest["sha256"].keys() == {"config.json", "model.safetensors"}
    assert load(copied).facts["checkpoint_sha256"] == verify(copied)
    path = copied / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1000] ^= 4
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has SHA-256 .* bytes changed"):
        load(copied)


def test_a_policy_trained_here_keeps_the_recipe_of_its_records(make_checkpoint, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(make_checkpoint("qwen2"), source)
    (source / SUMMARY_FILE).write_text("{}")
    stored = write_quantized(source, tmp_path / "stored")
    assert json.loads((stored / MANIFEST).read_text())["recipe"] == "float32"
    policies = [load(folder) for folder in (source, stored, make_checkpoint("qwen2"))]
    assert [policy.facts["recipe"] for policy in policies] == ["float32", None, "bfloat16"]
    scales, stored_scales, foreign_scales = (
        {name: float(linear.weight.encode_scale) for name, linear in quantized_linears(p).items()}
        for p in policies
    )
    assert scales == stored_scales != foreign_scales


def test_existing_folders_other_formats_and_quantised_sources_are_refused(stored, tmp_path):
    with pytest.raises(FileExistsError, match="never written over"):
        write_quantized(stored, stored)
    with pytest.raises(ValueError, match="stored formats are nvfp4, mxfp4, nf4"):
        write_quantized(stored, tmp_path / "new", "int4")
    with pytest.raises(CheckpointError, match="quantised already"):
        write_quantized(stored, tmp_path / "new")
    with pytest.raises(ValueError, match="stores nvfp4 codes"):
        load(stored, "bf16")


DENSE = "model.layers.1.mlp.up_proj.weight"
PACKED = "model.layers.1.mlp.up_proj.weight_packed"
SCALE = "model.layers.1.mlp.up_proj.weight_scale"
GLOBAL = "model.layers.1.mlp.up_proj.weight_global_scale"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[DENSE][3, 5].fill_(math.nan), f"{DENSE} holds NaN"),
        (lambda t: t.pop(DENSE), f"{DENSE} is missing"),
        (lambda t: t.update({DENSE: t[DENSE][:-1].clone()}), f"{DENSE} has shape .191, 128."),
        (lambda t: t.update({DENSE: t[DENSE].to(torch.int8)}), f"{DENSE} has dtype torch.int8"),
        (lambda t: t.update({"model.layers.2.x": t[DENSE].clone()}), "layers.2.x"),
        (lambda t: t.pop("model.layers.0.self_attn.q_proj.bias"), "q_proj.bias is missing"),
        (lambda t: t[SCALE].view(torch.uint8)[2, 1].fill_(0x7F), f"{SCALE}.*holds NaN"),
        (lambda t: t.pop(SCALE), f"{SCALE} is missing"),
        (lambda t: t.pop(PACKED), f"{PACKED} is missing"),
        (lambda t: t.update({PACKED: t[PACKED].to(torch.int32)}), f"{PACKED} is torch.int32"),
        (
            lambda t: t.update({PACKED: t[PACKED][:, :-8].clone()}),
            rf"{PACKED} is torch.uint8 .192, 56.",
        ),
        (lambda t: t.update({SCALE: t[SCALE].float()}), f"{SCALE} is torch.float32"),
        (lambda t: t[GLOBAL].fill_(math.inf), "encode_scale holds NaN, infinity"),
        (lambda t: t[GLOBAL].fill_(0.0), "global_scale holds NaN, infinity"),
        (lambda t: t[GLOBAL].neg_(), "or a negative scale"),
    ],
)
def test_a_broken_checkpoint_names_its_fault(make_checkpoint, stored, tmp_path, change, message):
    dense = message.startswith((f"{DENSE} ", "layers.2.x", "q_proj"))
    folder = tmp_path / "broken"
    shutil.copytree(make_checkpoint("qwen2") if dense else stored, folder)
    edit_tensors(folder, change)
    for weight_format in ("bf16", "nvfp4") if dense else ("nvfp4",):
        with pytest.raises(CheckpointError, match=message) as caught:
            load(folder, weight_format)
        assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        weights(observer="memoryless_mse"),
        own(ignore=["re:.*lm_head"], transform_config={}, sparsity_config={}),
        group(targets=["re:.*_proj$"]),
    ],
)
def test_configs_that_say_the_same_in_other_words_are_read(stored, copied, change):
    edit_config(copied, lambda config: change(config["quantization_config"]))
    require_same_weights(load(stored), load(copied))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (own(quant_method="gptq"), "quant_method is 'gptq'"),
        (own(config_groups={}), "no config_groups"),
        (group(format="pack-quantized"), "'pack-quantized'"),
        (weights(group_size=32), "group_size is 32"),
        (group(input_activations={"num_bits": 4}), "input_activations is {'num_bits': 4}"),
        (own(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (own(transform_config={"config_groups": {"u": {}}}), "transform_config is"),
        (own(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is"),
        (own(moe_sparsity_config={"a": 1}), "moe_sparsity_config is"),
        (own(quantization_status="frozen"), "quantization_status is 'frozen'"),
        (own(of_a_later_release=1), "of_a_later_release is 1; only None"),
        (weights(actorder="group"), r"weights\.actorder is 'group'"),
        (weights(block_structure=[16, 16]), r"weights\.block_structure is"),
        (own(config_groups={"NVFP4A16": ["Linear"]}), "object"),
    ],
)
def test_other_quantisation_configs_are_refused_by_field(copied, change, message):
    edit_config(copied, lambda config: change(config["quantization_config"]))
    with pytest.raises(CheckpointError, match=message):
        load(copied)
