"""Calibration: the same function, a smaller error after rounding, nothing written by halves."""

from __future__ import annotations

import json

import pytest
import torch

from repro.data.tiny_corpus import CorpusConfig, iterate_documents
from repro.models.calibration import ALPHAS, _channel_scales, write_calibrated
from repro.models.checkpoint import TINY_FOLDER, resolve, verify, write_quantized
from repro.models.policy import load_policy, load_tokenizer
from repro.models.tensor_files import CheckpointError


def text(seed, rows):
    """Return documents of the tiny policy's corpus end to end, (rows, 128)."""
    tokenizer = load_tokenizer(TINY_FOLDER)
    ids = []
    for document in iterate_documents(seed, CorpusConfig()):
        ids += tokenizer(document.prompt + document.completion)["input_ids"]
        ids.append(tokenizer.eos_token_id)
        if len(ids) >= rows * 128:
            return torch.tensor(ids[: rows * 128]).view(rows, 128)


TOKENS, OTHERS = text(1, 16), text(2, 16)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated") / "tiny"
    return write_calibrated("tiny", folder, TOKENS)


def logits(folder, weight_format="bf16"):
    policy = load_policy(
        folder, weight_format=weight_format, training="none", lora_rank=1, lora_alpha=1.0, seed=0
    )
    with torch.no_grad():
        return policy.model(input_ids=OTHERS).logits.log_softmax(-1)


def test_the_function_stays_and_the_weights_do_not(calibrated):
    before, after = logits("tiny"), logits(calibrated.folder)
    assert not torch.equal(before, after)
    assert (after - before).norm() / before.norm() < 0.01


def test_every_group_s_error_is_at_most_that_of_plain_rounding(calibrated):
    assert len(calibrated.error_ratios) == 4 * 3
    assert all(ratio <= 1.0 for ratio in calibrated.error_ratios.values())
    assert min(calibrated.error_ratios.values()) < 0.95
    assert set(calibrated.alphas.values()) <= set(ALPHAS)


def test_rounded_it_is_nearer_to_the_policy_than_plain_rounding(calibrated):
    exact = logits("tiny")

    def divergence(folder):
        rounded = logits(folder, "nvfp4")
        return float((exact.exp() * (exact - rounded)).sum(-1).mean())

    assert 0 < divergence(calibrated.folder) < divergence("tiny")


def test_scales_are_the_published_formula():
    magnitude = torch.tensor([0.25, 1.0, 4.0])
    torch.testing.assert_close(_channel_scales(magnitude, 0.0), torch.ones(3))
    torch.testing.assert_close(_channel_scales(magnitude, 0.5), torch.tensor([0.5, 1.0, 2.0]))
    scales = _channel_scales(torch.tensor([0.0, 1.0]), 0.5)
    assert torch.isfinite(scales).all()
    assert scales.min() > 0


def test_the_checkpoint_verifies_and_quantises_under_its_own_name(calibrated, tmp_path):
    assert verify(calibrated.folder) is not None
    manifest = json.loads((calibrated.folder / "qerl_manifest.json").read_text())
    assert (manifest["algorithm"], manifest["scaled_for"]) == ("awq scales", "nvfp4")
    write_quantized(calibrated.folder, tmp_path / "codes", algorithm="awq")
    manifest = json.loads((tmp_path / "codes" / "qerl_manifest.json").read_text())
    assert manifest["algorithm"] == "awq"
    stored = logits(tmp_path / "codes", "nvfp4")
    assert torch.equal(stored, logits(calibrated.folder, "nvfp4"))
    with pytest.raises(CheckpointError, match="quantised already"):
        write_calibrated(tmp_path / "codes", tmp_path / "again", TOKENS)


def test_an_existing_folder_is_left_alone(tmp_path):
    with pytest.raises(FileExistsError, match="never written over"):
        write_calibrated("tiny", tmp_path, TOKENS)
    assert list(tmp_path.iterdir()) == []


def test_a_shared_input_with_fewer_key_heads_leaves_the_output_projection_alone(calibrated):
    names = {name.rsplit(".", 1)[1] for name in calibrated.alphas}
    assert names == {"q_proj", "gate_proj", "down_proj"}
    assert resolve("tiny") != calibrated.folder
