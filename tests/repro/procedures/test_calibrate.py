"""Calibration up to llm-compressor's door and behind it; the package itself is not in the suite."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from repro.models.checkpoint import MANIFEST, TINY_FOLDER, verify, write_quantized
from repro.models.files.tensor_files import CheckpointError
from repro.models.policy import load_policy
from repro.models.quantized_linear import QuantizedLinear
from repro.procedures import calibrate
from tests.repro.models.conftest import random_model
from tests.repro.models.llmcompressor_oracle import FACTS

VERSIONS = dict.fromkeys(calibrate.PACKAGES, "0")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a 16-bit checkpoint with a tokenizer."""
    folder = tmp_path / "source"
    random_model("qwen2", vocab_size=333).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY_FOLDER / name, folder / name)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    rows = [{"text": f"Tom has {i} apples and buys {i + 1} more."} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def smooth_and_round(folder: Path, out: Path, token_ids: list[list[int]], seed: int) -> None:
    """Do what AWQ's result is: factors moved from projections into the norm, then NVFP4A16.

    The config is the one that llm-compressor wrote.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    factors = torch.exp2(torch.arange(128) % 3 - 1).bfloat16()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.div_(factors)
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).weight.mul_(factors)
    smoothed = out.with_name("smoothed")
    model.save_pretrained(smoothed)
    write_quantized(smoothed, out)
    (out / MANIFEST).unlink()
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = json.loads(FACTS.read_text())["qwen2"]["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))


@pytest.fixture
def compressor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_compress", smooth_and_round)
    monkeypatch.setattr(calibrate, "version", VERSIONS.__getitem__)


def load(folder: Path, weight_format: Any) -> Any:
    return load_policy(folder, weight_format=weight_format)


@pytest.mark.usefixtures("compressor")
def test_a_calibrated_folder_is_loaded_as_stored(source: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [str(source), str(out), "--data", str(texts), "--samples", "5", "--tokens", "8"]
    assert calibrate.main(arguments) == 0
    policy, stored = load(out, "nvfp4"), load_file(out / "model.safetensors")
    assert policy.effects["recipe"] is None
    assert policy.effects["relative_weight_error_mean"] is None
    linears = {n: m for n, m in policy.decoder.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(linears) == 14
    for name, linear in linears.items():
        assert torch.equal(linear.weight.codes, stored[f"{name}.weight_packed"])
        scales = stored[f"{name}.weight_scale"].view(torch.uint8)
        assert torch.equal(linear.weight.block_scales.view(torch.uint8), scales)
        assert linear.weight.encode_scale == stored[f"{name}.weight_global_scale"]
    # The norms of the smoothed model, not of the source.
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(policy.decoder.get_parameter(norm).bfloat16(), stored[norm])
    assert not torch.equal(
        load(source, "bf16").decoder.get_parameter(norm).bfloat16(), stored[norm]
    )
    assert policy.tokenizer is not None


@pytest.mark.usefixtures("compressor")
def test_the_manifest_says_what_the_calibration_was(
    source: Path, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    calibrate.calibrate(source, out, data=str(texts), samples=5, tokens=8, seed=3)
    manifest = json.loads((out / MANIFEST).read_text())
    assert (manifest["algorithm"], manifest["format"], manifest["linears"]) == ("awq", "nvfp4", 14)
    said = manifest["calibration"]
    assert (said["data"], said["samples"], said["tokens"], said["seed"]) == (str(texts), 5, 8, 3)
    assert said["versions"] == VERSIONS
    assert verify(out) is not None
    plain = json.loads((write_quantized(source, tmp_path / "rtn").folder / MANIFEST).read_text())
    assert (plain["algorithm"], plain["calibration"]) == ("rtn", None)
    assert plain["source_sha256"] == manifest["source_sha256"]


def test_rows_are_chosen_by_the_seed_and_cut_at_the_length(source: Path, texts: Path) -> None:
    first = calibrate.encoded(source, str(texts), 5, 8, seed=0)
    assert [len(ids) for ids in first] == [8] * 5
    assert first == calibrate.encoded(source, str(texts), 5, 8, seed=0)
    assert first != calibrate.encoded(source, str(texts), 5, 8, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(source)
    whole = calibrate.encoded(source, str(texts), 12, 2048, seed=0)
    texts_again = sorted(tokenizer.decode(ids) for ids in whole)
    assert texts_again == sorted(json.loads(row)["text"] for row in texts.open())


class Template:
    """A tokenizer whose template shows what it was given."""

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool) -> str:
        """Join roles and contents."""
        assert not tokenize
        return " ".join(f"{m['role']}: {m['content']}" for m in messages)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "plain"}, "plain"),
        ({"messages": [{"role": "user", "content": "a"}]}, "user: a"),
        (
            # OpenThoughts-114k's own fields.
            {"system": "s", "conversations": [{"from": "user", "value": "q"},
                                              {"from": "assistant", "value": "a"}]},
            "system: s user: q assistant: a",
        ),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
         "user: q assistant: a"),
    ],
)  # fmt: skip
def test_a_row_is_a_text_or_a_conversation(row: dict[str, Any], text: str) -> None:
    assert calibrate.text_of(row, Template(), "data") == text


@pytest.mark.usefixtures("compressor")
def test_what_cannot_be_calibrated_is_said_in_a_sentence_and_leaves_nothing(
    source: Path,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = write_quantized(source, tmp_path / "stored").folder
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"answer": "1"}\n' * 9)
    new = tmp_path / "new"
    few = ["--samples", "9", "--data"]
    cases = [
        ([str(stored), str(new), *few, str(texts)], "is quantised already"),
        ([str(source), str(stored), *few, str(texts)], "never written over another"),
        ([str(source), str(new), "--data", str(texts)], "has 12 rows; 256 are asked for"),
        ([str(source), str(new), *few, str(empty)], "neither text, messages nor conversations"),
        ([str(source), str(new), *few, str(tmp_path / "no.jsonl")], "is not a file"),
    ]
    for arguments, words in cases:
        assert calibrate.main(arguments) == 2
        assert words in capsys.readouterr().err
        assert not new.exists()

    def half(folder: Path, out: Path, token_ids: list[list[int]], seed: int) -> None:
        smooth_and_round(folder, out, token_ids, seed)
        (out / "model.safetensors").write_bytes(b"")

    monkeypatch.setattr(calibrate, "_compress", half)
    assert calibrate.main([str(source), str(new), *few, str(texts)]) == 2
    assert not new.exists()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_another_format_than_nvfp4_is_not_a_calibrated_folder(source: Path, tmp_path: Path) -> None:
    other = write_quantized(source, tmp_path / "mxfp4", "mxfp4").folder
    with pytest.raises(CheckpointError, match="stores mxfp4; needed is nvfp4"):
        calibrate.require_readable(other)
