"""NF4 in files: back bit for bit, and the same weights to bitsandbytes and to transformers."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from kernels import reference
from repro.models.checkpoint import MANIFEST, write_quantized
from repro.models.files.tensor_files import CheckpointError
from tests.repro.models.conftest import (
    edit_config,
    edit_tensors,
    load,
    quantized_linears,
    require_same_weights,
)

# A multiple of NF4's block of 64 everywhere.
SIZES = {"hidden_size": 64, "intermediate_size": 128}
CODES = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def qwen2(make_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nf4") / "qwen2"
    return write_quantized(make_checkpoint("qwen2", **SIZES), folder, "nf4")


def test_transformers_loads_it_and_says_the_same(
    architecture, make_checkpoint, tmp_path, token_ids
):
    dense = make_checkpoint(architecture, **SIZES)
    stored = write_quantized(dense, tmp_path / "nf4", "nf4")
    require_same_weights(load(dense, "nf4"), load(stored, "nf4"))
    manifest = json.loads((stored / MANIFEST).read_text())
    said = (manifest["format"], manifest["layout"], manifest["linears"])
    assert said == ("nf4", "bitsandbytes-nf4", 14)
    functional = pytest.importorskip("bitsandbytes.functional", reason="transformers loads by it")
    stock = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.bfloat16, device_map="cpu")
    stock.eval()
    ours = load(stored, "nf4", compute_dtype="bfloat16")
    for name, linear in quantized_linears(ours).items():
        weight = stock.get_submodule(name).weight
        codes = linear.weight.codes
        assert torch.equal(weight.data.reshape(-1).cpu(), ((codes << 4) | (codes >> 4)).reshape(-1))
        dense = functional.dequantize_4bit(weight.data, weight.quant_state)
        assert torch.equal(reference.dequantize(linear.weight, torch.bfloat16), dense), name
    one, other = (m(input_ids=token_ids).logits.float() for m in (stock, ours.model))
    # The same weights; its products round otherwise.
    assert float((one - other).abs().max()) < 0.05 * float(other.abs().max())


def state(**fields):
    """Return a change of these fields of the state that is stored with a projection's codes."""

    def change(tensors):
        name = f"{CODES}.quant_state.bitsandbytes__nf4"
        values = json.loads(tensors[name].numpy().tobytes()) | fields
        tensors[name] = torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t.pop(f"{CODES}.absmax"), "absmax is missing"),
        (lambda t: t.update({f"{CODES}.absmax": t[f"{CODES}.absmax"].half()}), "float16"),
        (lambda t: t[f"{CODES}.absmax"][:1].fill_(float("nan")), "absmax"),
        (lambda t: t[f"{CODES}.quant_map"][:1].fill_(0), "NF4 matrix"),
        (lambda t: t.update({CODES: t[CODES][:-1].clone()}), "the model needs"),
        (state(blocksize=128), "blocksize is 128.* 64"),
        (state(quant_type="fp4"), "quant_type is fp4"),
        (state(shape=[32, 128]), "shape is"),
    ],
)
def test_damaged_and_other_files_are_refused_by_name(qwen2, tmp_path, spoil, words):
    shutil.copytree(qwen2, tmp_path / "broken")
    edit_tensors(tmp_path / "broken", spoil)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(tmp_path / "broken", "nf4")
    assert "q_proj" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is 'fp4'"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "load_in_4bit is False"),
        ({"bnb_4bit_use_double_quant": True}, "bnb_4bit_use_double_quant is True"),
    ],
)
def test_another_kind_of_checkpoint_is_refused_by_field(qwen2, tmp_path, change, words):
    shutil.copytree(qwen2, tmp_path / "other")
    edit_config(tmp_path / "other", lambda config: config["quantization_config"].update(change))
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "other", "nf4")


def test_what_transformers_writes_is_read(make_checkpoint, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional", reason="compares with it")
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    stock = AutoModelForCausalLM.from_pretrained(
        make_checkpoint("qwen2", **SIZES),
        dtype=torch.float16,
        quantization_config=config,
        device_map="cpu",
    )
    stock.save_pretrained(tmp_path / "nf4")
    ours = quantized_linears(load(tmp_path / "nf4", "nf4"))
    assert len(ours) == 14
    for name, linear in ours.items():
        weight = stock.get_submodule(name).weight
        dequantised = functional.dequantize_4bit(weight.data, weight.quant_state)
        assert torch.equal(reference.dequantize(linear.weight, torch.float16), dequantised), name
