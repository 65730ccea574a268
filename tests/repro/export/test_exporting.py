"""`export`: what other programs load is what was trained, or nothing is written."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from repro.__main__ import main
from repro.export.comparing import distance, logits_of, probes_of
from repro.export.quantising import READERS
from repro.models.checkpoint import TINY_FOLDER
from repro.models.files.adapter_files import (
    ORIGIN,
    TENSORS,
    load_adapted,
    named_base,
    read_adapter,
    save_adapter,
)
from repro.models.files.merged_files import merged_tensor, write_merged
from repro.models.norms import block_norms
from repro.models.policy import load_policy
from repro.procedures.train import keep_policy
from repro.spec.arm import PlantedRounding
from repro.spec.hub import PINNED_BYTES, gguf_copy_of
from tests.repro.export.conftest import trained_policy
from tests.said import unsaid


def test_an_adapter_of_a_gguf_file_names_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pin = f"{PINNED_BYTES}{'ab' * 32}"
    made = gguf_copy_of(pin)
    shutil.copytree(TINY_FOLDER, made)
    (made / "SOURCE.json").write_text(json.dumps({"gguf": "m.gguf", "gguf_sha256": "ab" * 32}))
    local = tmp_path / "m.gguf"
    local.touch()
    in_hub = tmp_path / "models--owner--name" / "snapshots" / "c" / "m.gguf"
    named = "owner/name:m.gguf"
    for checkpoint, base in ((named, named), (str(local), str(local)), (str(in_hub), named)):
        assert named_base(checkpoint, made) == (base, pin)
    policy = trained_policy()
    policy.checkpoint, policy.folder = named, made
    save_adapter(policy, tmp_path / "a")
    assert main(["export", str(tmp_path / "a"), str(tmp_path / "out")]) == 0
    assert "gguf_file=" in capsys.readouterr().out
    for folder in (tmp_path / "a", tmp_path / "out"):
        assert (read_adapter(folder).base, read_adapter(folder).revision) == (named, pin)
        assert str(tmp_path / "cache") not in "".join(p.read_text() for p in folder.glob("*.json"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    assert load_adapted(tmp_path / "out").folder == made


@pytest.mark.parametrize(
    ("weight_format", "origin"), [("bf16", True), ("bf16", False), ("nvfp4", True)]
)
def test_an_adapter_loads_as_it_was_trained(weight_format, origin, run_of, tmp_path):
    policy = trained_policy(weight_format)
    shutil.copytree(run_of(weight_format) / "adapter", tmp_path / "a")
    if not origin:  # as another program writes it
        (tmp_path / "a" / ORIGIN).unlink()
    again = load_adapted(tmp_path / "a")
    rows = probes_of(policy)
    assert again.weight_format == weight_format
    assert torch.equal(logits_of(policy.model, rows), logits_of(again.model, rows))


@pytest.mark.parametrize(
    ("kind", "named"),
    # The first says how far the base is from codes that were made in memory.
    [("adapter", "bf16|peft"), ("merged", "16 bits")],
)
def test_every_kind_of_export_is_compared_and_says_so(kind, named, run_of, tmp_path, capsys):
    assert main(["export", str(run_of("nvfp4")), str(tmp_path / "out"), "--as", kind]) == 0
    assert unsaid(capsys.readouterr().out, f"{named}|mean KL|training moved") == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("weight_format", ["nvfp4", "nf4"])
def test_an_adapter_is_exported_for_codes(weight_format, run_of, tmp_path, capsys):
    package = READERS[weight_format].replace("-", "_")
    pytest.importorskip(package, reason="peft reads the base by it")
    base, out = tmp_path / "base", tmp_path / "out"
    assert main(["quantize", "tiny", str(base), "--format", weight_format]) == 0
    assert main(["export", str(run_of(weight_format)), str(out), "--base", str(base)]) == 0
    printed = capsys.readouterr().out
    assert "mean KL" in printed
    assert "bf16" not in printed
    assert read_adapter(out).base == str(base)


def test_a_base_that_peft_cannot_read_here_is_a_sentence(run_of, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(READERS, "nvfp4", "no-such-package")
    assert main(["quantize", "tiny", str(tmp_path / "base")]) == 0
    line = ["export", str(run_of("nvfp4")), str(tmp_path / "out"), "--base", str(tmp_path / "base")]
    assert main(line) == 2
    assert "pip install no-such-package" in capsys.readouterr().err


def test_added_noise_is_in_no_file(tmp_path):
    policy = trained_policy(norms_trained=True)
    save_adapter(policy, tmp_path / "quiet")
    write_merged(policy, tmp_path / "quiet_merged")
    for norm in block_norms(policy.model).values():
        norm.noise = torch.full_like(norm.weight, 0.5, dtype=torch.float32).detach()
    save_adapter(policy, tmp_path / "noisy")
    write_merged(policy, tmp_path / "noisy_merged")
    for quiet, noisy in (
        (tmp_path / "quiet" / TENSORS, tmp_path / "noisy" / TENSORS),
        tuple(tmp_path / f"{n}_merged" / "model.safetensors" for n in ("quiet", "noisy")),
    ):
        one, other = load_file(quiet), load_file(noisy)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_full_training_keeps_a_16_bit_model(tmp_path):
    policy = load_policy("tiny", weight_format="bf16", training="full")
    with torch.no_grad():
        policy.decoder.get_parameter("model.norm.weight").mul_(2.0)
    keep_policy(policy, tmp_path)
    again = load_policy(tmp_path / "model", weight_format="bf16")
    name = "model.norm.weight"
    assert torch.equal(again.decoder.get_parameter(name), merged_tensor(policy, name).float())
    assert again.tokenizer is not None


def test_a_merge_that_lost_the_adapter_leaves_nothing(run_of, tmp_path, capsys, monkeypatch):
    def without_adapter(policy, folder):
        shutil.copytree(TINY_FOLDER, folder)
        return folder

    monkeypatch.setattr("repro.export.exporting.write_merged", without_adapter)
    assert main(["export", str(run_of("bf16")), str(tmp_path / "out"), "--as", "merged"]) == 2
    assert "mean KL" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_adapter_that_training_left_at_nothing_has_nothing_to_merge(run_of, tmp_path, capsys):
    adapter = tmp_path / "adapter"
    shutil.copytree(run_of("nvfp4") / "adapter", adapter)
    tensors = load_file(adapter / TENSORS)
    idle = {name: tensor * ("lora_A" in name) for name, tensor in tensors.items()}
    save_file(idle, adapter / TENSORS)
    out = tmp_path / "out"
    assert main(["export", str(adapter), str(out), "--as", "merged"]) == 2
    assert "training changed nothing" in capsys.readouterr().err
    assert not out.exists()
    folder = str(TINY_FOLDER)
    for inside in (f"{folder}/out", f"{adapter}/out"):
        assert main(["export", str(adapter), inside, "--as", "merged"]) == 2
        assert f"{inside} lies in" in capsys.readouterr().err
    assert main(["export", str(adapter), str(out), "--base", folder]) == 0
    assert "training changed nothing" in capsys.readouterr().out
    save_file({name: tensor * 1e30 for name, tensor in tensors.items()}, adapter / TENSORS)
    assert main(["export", str(adapter), str(tmp_path / "other")]) == 2
    assert f"{adapter} gives" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("weight_format", "order", "rounding", "word"),
    [
        ("nvfp4", 3, None, "another order than"),
        ("bf16", 3, PlantedRounding(format="nvfp4", factor=2.0), "another order and rounding"),
    ],
)
def test_permuted_channels_leave_merged(weight_format, order, rounding, word, tmp_path, capsys):
    policy = trained_policy(weight_format, order=order, rounding=rounding)
    keep_policy(policy, tmp_path / "run")
    rows = probes_of(policy)
    again = load_adapted(tmp_path / "run" / "adapter")
    assert distance(logits_of(policy.model, rows), logits_of(again.model, rows)).mean == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "a")]) == 2
    assert word in capsys.readouterr().err
    out = tmp_path / "merged"
    assert main(["export", str(tmp_path / "run"), str(out), "--as", "merged"]) == 0
    stock = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert distance(logits_of(policy.model, rows), logits_of(stock, rows)).mean < 1e-3
    assert not (tmp_path / "a").exists()
