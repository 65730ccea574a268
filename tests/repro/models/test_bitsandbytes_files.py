"""NF4 in files: back bit for bit, and the same weights to bitsandbytes and to transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kernels import reference
from repro.models.checkpoint import MANIFEST, write_quantized
from repro.models.policy import Policy, load_policy
from repro.models.quantized_linear import QuantizedLinear
from repro.models.tensor_files import CheckpointError

# A multiple of NF4's block of 64 everywhere.
SIZES = {"hidden_size": 64, "intermediate_size": 128}
CODES = "model.layers.0.self_attn.q_proj.weight"


def load(folder: Path, weight_format: Any = "nf4", compute_dtype: str = "float32") -> Policy:
    return load_policy(
        folder, weight_format=weight_format, training="none", lora_rank=1, lora_alpha=1.0, seed=0,
        compute_dtype=compute_dtype,
    )  # fmt: skip


def quantized_linears(policy: Policy) -> dict[str, QuantizedLinear]:
    modules = policy.decoder.named_modules()
    return {name: m for name, m in modules if isinstance(m, QuantizedLinear)}


@pytest.fixture
def dense(architecture: str, make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(architecture, **SIZES)


@pytest.fixture
def stored(dense: Path, tmp_path: Path) -> Path:
    return write_quantized(dense, tmp_path / "stored", "nf4").folder


def test_codes_and_scales_come_back_to_the_bit(dense: Path, stored: Path) -> None:
    direct, again = quantized_linears(load(dense)), quantized_linears(load(stored))
    assert len(direct) == len(again) == 14
    for name, linear in direct.items():
        other = again[name].weight.tensors()
        assert other.keys() == linear.weight.tensors().keys()
        for part, tensor in linear.weight.tensors().items():
            assert torch.equal(tensor, other[part]), (name, part)
    manifest = json.loads((stored / MANIFEST).read_text())
    said = (manifest["format"], manifest["layout"], manifest["linears"])
    assert said == ("nf4", "bitsandbytes-nf4", 14)
    with pytest.raises(ValueError, match="stores nf4 codes"):
        load(stored, "nvfp4")


def test_bitsandbytes_reads_the_same_weights_from_the_files(stored: Path) -> None:
    functional = pytest.importorskip(
        "bitsandbytes.functional", reason="needs bitsandbytes to compare with"
    )
    tensors = load_file(stored / "model.safetensors")
    for name, linear in quantized_linears(load(stored)).items():
        own = {
            key.removeprefix(f"{name}.weight."): value
            for key, value in tensors.items()
            if key.startswith(f"{name}.weight.")
        }
        state = functional.QuantState.from_dict(dict(own), device=torch.device("cpu"))
        assert tuple(state.shape) == linear.weight.shape
        theirs = functional.dequantize_4bit(tensors[f"{name}.weight"], state)
        assert torch.equal(theirs, reference.dequantize(linear.weight, torch.bfloat16)), name
        # What it would have written itself.
        state.dtype = torch.bfloat16
        written = state.as_dict(packed=True)
        assert written.keys() == own.keys()
        for key, value in written.items():
            assert torch.equal(value, own[key]), (name, key)


def test_transformers_loads_it_and_says_the_same(stored: Path, token_ids: Tensor) -> None:
    pytest.importorskip("bitsandbytes", reason="transformers loads NF4 by bitsandbytes")
    theirs = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.bfloat16, device_map="cpu")
    theirs.eval()
    ours = load(stored, compute_dtype="bfloat16")
    for name, linear in quantized_linears(ours).items():
        weight = theirs.get_submodule(name).weight
        codes = linear.weight.codes
        assert torch.equal(weight.data.reshape(-1).cpu(), ((codes << 4) | (codes >> 4)).reshape(-1))
    one, other = (m(input_ids=token_ids).logits.float() for m in (theirs, ours.model))
    # The same weights; its products round otherwise.
    assert float((one - other).abs().max()) < 0.05 * float(other.abs().max())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t.pop(f"{CODES}.absmax"), "absmax is missing"),
        (lambda t: t.update({f"{CODES}.absmax": t[f"{CODES}.absmax"].half()}), "float16"),
        (lambda t: t[f"{CODES}.absmax"][:1].fill_(float("nan")), "absmax"),
        (lambda t: t[f"{CODES}.quant_map"][:1].fill_(0), "is not that of an NF4 matrix"),
        (lambda t: t.update({CODES: t[CODES][:-1].clone()}), "the model needs"),
    ],
)
def test_damaged_files_are_refused_by_name(
    make_checkpoint: Callable[..., Path], tmp_path: Path, spoil: Any, words: str
) -> None:
    source = write_quantized(make_checkpoint("qwen2", **SIZES), tmp_path / "source", "nf4").folder
    folder = tmp_path / "broken"
    shutil.copytree(source, folder)
    (folder / MANIFEST).unlink()
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=words) as caught:
        load(folder)
    assert "q_proj" in str(caught.value)


def test_a_double_quantised_or_eight_bit_checkpoint_is_refused(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = write_quantized(make_checkpoint("qwen2", **SIZES), tmp_path / "source", "nf4").folder
    (source / MANIFEST).unlink()
    raw = json.loads((source / "config.json").read_text())
    for field, value in (("bnb_4bit_use_double_quant", True), ("load_in_4bit", False)):
        changed = raw | {"quantization_config": raw["quantization_config"] | {field: value}}
        (source / "config.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=field):
            load(source)
