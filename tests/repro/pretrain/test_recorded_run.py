"""Pre-training as a run: whole checkpoints, every variant, their measures, for both tiers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from datetime import UTC, datetime

import pytest
import torch
from safetensors.torch import load_file

from repro.evidence.environment import capture_environment
from repro.evidence.procedure import Stopped
from repro.evidence.record import read_record
from repro.models.checkpoint import resolve, verify
from repro.models.policy import load_policy
from repro.pretrain import material
from repro.pretrain.policy_folders import write_policy
from repro.pretrain.recipes import RECIPES
from repro.pretrain.recorded_run import examined_by, policy_name, recipe_of
from repro.pretrain.training import new_model
from repro.run.carry_out import keep, procedure_named
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.pretrain.small import PROXY, TINY, write_humans


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Carry out the tiny policy's run by a small recipe, stopped once; return result and folder."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "tiny", TINY)
        patch.setattr(
            material, "_TINY_MANNER", dataclasses.replace(material._TINY_MANNER, max_new_tokens=12)
        )
        run = plan(find("pretrain_tiny"), Tier.SMOKE)[0]
        scale = dataclasses.replace(run.scale, quality_problems=5, threads=1)
        run = dataclasses.replace(run, scale=scale)
        asked = itertools.count()

        def start(should_stop):
            return procedure_named(run.procedure)(
                run, folder=folder, progress=lambda *at: None, should_stop=should_stop, threads=3
            )

        with pytest.raises(Stopped):
            start(lambda: next(asked) >= 8)
        assert not (folder / "policy").exists()
        yield start(lambda: False), folder / "policy"


def test_the_tiny_policy_s_run_leaves_a_checkpoint_that_loads_and_says_what_it_is(tiny):
    measured, folder = tiny
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in stored
    policy = load_policy(
        folder, weight_format="nvfp4", training="lora", lora_rank=4, lora_alpha=4.0, seed=0
    )
    assert policy.effects["linears"] == {"nvfp4": 14}
    summary = json.loads((folder / "pretraining.json").read_text())
    assert summary["recipe"]["corpus"]["careless_share"] == [0.1, 0.3, 0.5, 0.6, 0.65]
    assert summary["weights_sha256"] == measured.effects["checkpoint_sha256"]
    assert summary["quality"]["greedy"] == measured.metrics["accuracy_greedy"].value
    assert summary["halfway"]["step"] == 6


def test_the_tiny_policy_s_run_measures_what_its_target_reports(tiny):
    measured, _ = tiny
    assert set(measured.metrics) == {metric.name for metric in find("pretrain_tiny").metrics}
    assert set(measured.inputs) == {"recipe", "tokenizer"}
    assert len(measured.series["loss"]) == 1


def test_a_policy_without_a_recipe_is_refused_by_name():
    run = plan(find("pretrain_tiny"), Tier.SMOKE)[0]
    run = dataclasses.replace(run, arm=dataclasses.replace(run.arm, name="huge"))
    with pytest.raises(ValueError, match="recipe 'huge'; known recipes: tiny"):
        procedure_named("pretrain")(run, folder=None, progress=None, should_stop=None, threads=1)


def test_a_proxy_run_of_another_seed_is_another_policy_of_the_same_recipe():
    first, second = plan(find("pretrain_proxy"), Tier.PROXY, [0, 2], ["proxy_30m_needle4"])
    names = [policy_name(run) for run in (first, second)]
    assert names == ["proxy-30m-needle4", "proxy-30m-needle4-seed2"]
    assert recipe_of(first) == recipe_of(second)
    assert [examined_by(run) for run in (first, second)] == [0, 0]
    tiny = plan(find("pretrain_tiny"), Tier.SMOKE, [2])[0]
    assert policy_name(tiny) == "tiny"
    assert examined_by(tiny) == 2


def test_a_folder_appears_whole_or_not_at_all(tmp_path, tiny_tokenizer, monkeypatch):
    model = new_model(TINY, tiny_tokenizer, 0)
    monkeypatch.setattr(type(tiny_tokenizer), "save_pretrained", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_policy(tmp_path / "policy", model, tiny_tokenizer)
    assert list(tmp_path.iterdir()) == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Carry out a run of a small recipe under a real one's name; return what it measured."""
    root = tmp_path_factory.mktemp("proxy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "proxy-30m", dataclasses.replace(PROXY, steps=6))
        patch.setenv("REPRO_DATA", str(write_humans(root / "human")))
        patch.setenv("REPRO_POLICIES", str(root / "policies"))
        patch.setattr(material, "_PROXY_NEW_TOKENS", 12)
        patch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
        run = plan(find("pretrain_proxy"), Tier.PROXY)[0]
        scale = dataclasses.replace(run.scale, quality_problems=5, threads=1, human_data=True)
        run = dataclasses.replace(run, scale=scale)
        phases, asked = [], itertools.count()

        def start(should_stop):
            return procedure_named(run.procedure)(
                run,
                folder=root / "run",
                progress=lambda *at: phases.append(at[0]),
                should_stop=should_stop,
                threads=1,
            )

        with pytest.raises(Stopped):
            start(lambda: next(asked) >= 1)
        assert not (root / "policies").exists()
        yield start(lambda: False), phases, root / "policies"


def test_a_run_leaves_policies_in_every_variant_and_measures_them(made):
    measured, phases, policies = made
    assert {"pre-training", "measuring", "writing 4-bit policies"} <= set(phases)
    assert measured.effects["human_problems_trained"] == 8
    assert set(measured.metrics) >= {"accuracy_greedy", "accuracy_mawps", "accuracy_svamp"}
    assert {"recipe", "tokenizer", "human_problems", "svamp_test_problems"} <= set(measured.inputs)
    variants = ("", "-nvfp4", "-mxfp4", "-nf4")
    assert {path.name for path in policies.iterdir()} == {f"proxy-30m{name}" for name in variants}
    summary = json.loads((resolve("proxy-30m") / "pretraining.json").read_text())
    assert summary["weights_sha256"] == measured.effects["checkpoint_sha256"]
    rounded = {"nf4", "mxfp4", "nvfp4"}
    assert set(summary["four_bit"]) == rounded | {f"{name} stored" for name in rounded}
    assert summary["quality"]["human_problems"] == {"mawps": 3, "svamp": 3}
    assert summary["halfway"]["step"] == 3
    assert verify(resolve("proxy-30m-nvfp4")) is not None


def test_a_run_s_record_reads_back(made, tmp_path):
    measured, _, _ = made
    run = plan(find("pretrain_proxy"), Tier.PROXY)[0]
    path = keep(run, measured, datetime.now(UTC), tmp_path, capture_environment())
    record = read_record(path)
    assert record.effects["weights_sha256"] == measured.effects["checkpoint_sha256"]
    assert record.inputs["recipe"] == measured.inputs["recipe"]


def test_a_run_of_another_seed_leaves_policies_of_its_own_names(made, tmp_path, monkeypatch):
    _, _, policies = made
    before = (policies / "proxy-30m" / "pretraining.json").read_text()
    monkeypatch.setitem(RECIPES, "proxy-30m", dataclasses.replace(PROXY, steps=2))
    run = plan(find("pretrain_proxy"), Tier.PROXY, [1], ["proxy_30m"])[0]
    run = dataclasses.replace(run, scale=dataclasses.replace(run.scale, quality_problems=2))
    measured = procedure_named(run.procedure)(
        run, folder=tmp_path, progress=lambda *at: None, should_stop=lambda: False, threads=1
    )
    summary = json.loads((resolve("proxy-30m-seed1") / "pretraining.json").read_text())
    assert (summary["name"], summary["seed"]) == ("proxy-30m-seed1", 1)
    assert summary["quality"]["greedy"] == measured.metrics["accuracy_greedy"].value
    assert verify(resolve("proxy-30m-seed1-nvfp4")) is not None
    assert (policies / "proxy-30m" / "pretraining.json").read_text() == before


def test_the_variants_reload_as_what_they_were(made):
    def logits(name, weight_format):
        policy = load_policy(name, weight_format=weight_format)
        ids = policy.tokenizer("Ada has 3 eggs. Ada finds 12 eggs.\n", return_tensors="pt")
        with torch.no_grad():
            return policy.model(input_ids=ids["input_ids"]).logits

    dtypes = {t.dtype for t in load_file(resolve("proxy-30m") / "model.safetensors").values()}
    assert dtypes == {torch.bfloat16}
    assert torch.equal(logits("proxy-30m-nvfp4", "nvfp4"), logits("proxy-30m", "nvfp4"))
    assert torch.equal(logits("proxy-30m-mxfp4", "mxfp4"), logits("proxy-30m", "mxfp4"))
    assert torch.equal(logits("proxy-30m-nf4", "nf4"), logits("proxy-30m", "nf4"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none")
@pytest.mark.usefixtures("made")
def test_on_a_gpu_the_policies_are_made_and_measured_there():
    summary = json.loads((resolve("proxy-30m") / "pretraining.json").read_text())
    assert summary["device"] == torch.cuda.get_device_name()
    assert summary["quality"]["problems"] == 5
    assert all(0 <= habits["greedy"] <= 100 for habits in summary["four_bit"].values())
