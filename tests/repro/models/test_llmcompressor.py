"""What llm-compressor's NVFP4A16 stores of bfloat16 checkpoints, and what is stored here."""

import json

import pytest
from safetensors.torch import load_file

from repro.models.checkpoint import write_quantized
from repro.models.files.compressed_tensors import quantization_config, stored_format
from tests.repro.architectures import CLASSES
from tests.repro.models.llmcompressor_oracle import FACTS, digest
from tests.repro.models.odd_checkpoints import write_odd


@pytest.mark.parametrize("architecture", CLASSES)
def test_every_stored_tensor_equals_llm_compressors(architecture, tmp_path):
    facts = json.loads(FACTS.read_text(encoding="utf-8"))[architecture]
    written = write_quantized(write_odd(architecture, tmp_path / "source"), tmp_path / "out")
    tensors = load_file(written / "model.safetensors")
    assert {name: digest(tensor) for name, tensor in tensors.items()} == facts["tensors"]


@pytest.mark.parametrize("architecture", CLASSES)
def test_its_config_is_read_and_ours_says_the_same(architecture):
    written = json.loads(FACTS.read_text(encoding="utf-8"))[architecture]["quantization_config"]
    assert stored_format(written, FACTS) == "nvfp4"
    ours = quantization_config("nvfp4")
    for key in ("quant_method", "quantization_status", "format", "ignore", "kv_cache_scheme"):
        assert ours[key] == written[key]
    said = ours["config_groups"]["group_0"]["weights"]
    assert said == {key: written["config_groups"]["group_0"]["weights"][key] for key in said}
