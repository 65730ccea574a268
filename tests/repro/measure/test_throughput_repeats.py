"""Seeds that share a loaded model, on a small shape with a host clock."""

import dataclasses
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from repro.evidence.receipts import violations
from repro.evidence.record import read_record
from repro.measure import device_state, throughput
from repro.measure.rollout_cells import random_prompts
from repro.measure.vllm_rollout import VllmEngine
from repro.models.files.merged_files import write_base
from repro.models.lora import adapter_layers, base_linear, fold_adapter
from repro.models.policy import load_policy
from repro.models.random_policy import random_policy
from repro.run.carry_out import carried_together, carry_out
from repro.run.preflight import missing_package
from repro.spec.config import RunConfig
from repro.spec.target import plan
from repro.spec.throughput_scale import ThroughputPoint, ThroughputScale
from repro.spec.tier import GIB, Tier
from repro.targets import find
from repro.targets.table1 import BF16_LORA, BF16_LORA_FOLDED, NVFP4_LORA
from tests.repro.measure import conftest as small
from tests.repro.small_runs import context_of

SIZES = {"vocab_size": 512, "max_position_embeddings": 8192}
LONG = ThroughputPoint(name="long", shape="a", prompt_tokens=8, new_tokens=24, batches=(1, 2))
SHORT = dataclasses.replace(LONG, name="short", new_tokens=4)
POINTS = (LONG, SHORT, dataclasses.replace(SHORT, name="other", shape="b", batches=(3,)))


def small_policy(weight_format="nvfp4", rank=32):
    return small.small_policy(weight_format, rank, **SIZES)


@pytest.fixture
def loaded(monkeypatch, host_clock):
    """Let the procedure run on this processor; return the shapes that it loads."""
    shapes: list[str] = []

    def load(run, shape):
        shapes.append(shape)
        return small_policy(run.arm.weight_format, run.arm.lora_rank)

    # With its first adapter peft imports bitsandbytes, which must see the devices that are there.
    small_policy()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *a: (139 * GIB, 140 * GIB))
    monkeypatch.setattr(throughput, "device_bytes", lambda device: 140 * GIB)
    monkeypatch.setattr(throughput, "_policy", load)
    monkeypatch.setattr(throughput, "not_fitting", lambda scale, arm, total_bytes: {})
    monkeypatch.setattr(throughput, "release", lambda: None)
    monkeypatch.setattr(device_state, "release", lambda: None)
    monkeypatch.setattr(throughput, "copy_rate", lambda: 1e15)
    monkeypatch.setattr(throughput, "matmul_rate", lambda: 1e15)
    return shapes


def runs_of(scale, seeds=3):
    return [
        RunConfig(
            target="rollout", target_version=1, tier="systems", procedure="throughput",
            arm=NVFP4_LORA, scale=scale, seed=seed,
        )
        for seed in range(seeds)
    ]  # fmt: skip


def test_all_seeds_of_an_arm_load_each_shape_once_into_a_clean_device(
    loaded, tmp_path, monkeypatch
):
    asked: list[int] = []
    monkeypatch.setattr(throughput, "require_clean", lambda: asked.append(len(loaded)))
    runs = runs_of(ThroughputScale(points=POINTS))
    results = throughput.measure_seeds(runs, context_of(tmp_path))
    assert (loaded, asked) == (["a", "b"], [0, 1])
    assert len(results) == 3
    for measured in results:
        assert measured.facts["repeats_together"] == 3
        assert measured.facts["adapter_modules"] == 28
        for name in ("short_1", "short_2", "other_3"):
            assert (measured.metrics[f"tokens_per_second_{name}"].value or 0) > 0
    rates = [measured.metrics["tokens_per_second_short_1"].value for measured in results]
    assert len(set(rates)) == 3


WITH_ADAPTER = {"version": "9.9", "training": "lora"}


def served_elsewhere(policy, point, batches, **options):
    """Return what stands in for a `VllmEngine`."""

    def sample(prompts, sampling, **of_rows):
        return [SimpleNamespace(token_ids=[0] * sampling.max_new_tokens)] * len(prompts)

    receipt = {"version": "9.9", "training": policy.training} | options
    return SimpleNamespace(policy=policy, receipt=receipt, sample=sample, close=lambda: None)


@pytest.mark.parametrize("vllm", [(), (NVFP4_LORA.name,)], ids=["own engine", "vLLM"])
def test_each_seed_gets_a_record_of_its_own_that_counts(loaded, tmp_path, monkeypatch, vllm):
    monkeypatch.setattr("repro.run.carry_out.capture_environment", dict)
    monkeypatch.setattr(throughput, "VllmEngine", served_elsewhere)
    runs = runs_of(ThroughputScale(points=(LONG,), vllm=vllm))
    paths = carry_out(runs, tmp_path, context_of(tmp_path / "work"))
    assert [path.name for path in paths] == ["seed-0.json", "seed-1.json", "seed-2.json"]
    for path, run in zip(paths, runs, strict=True):
        record = read_record(path)
        assert record.digest == run.digest()
        assert violations(record) == []
        assert record.facts["products"] == ("vllm" if vllm else "own")
        assert record.facts.get("vllm") == (WITH_ADAPTER if vllm else None)
        assert {"tokens_per_second_long_1", "tokens_per_second_long_2"} <= set(record.metrics)


def test_an_adapter_is_folded_in_before_an_engine_is_made(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "VllmEngine", served_elsewhere)
    scale = ThroughputScale(points=(SHORT,), vllm=("by_vllm", "fp8"), fp8=("fp8",))
    arms = [dataclasses.replace(BF16_LORA_FOLDED, name=name) for name in ("by_vllm", "own")]
    arms += [dataclasses.replace(BF16_LORA, name="fp8")]
    runs = [dataclasses.replace(runs_of(scale, 1)[0], arm=arm) for arm in arms]
    by_vllm, own, fp8 = (throughput.measure_seeds([r], context_of(tmp_path))[0] for r in runs)
    for measured in (by_vllm, own):
        assert 0 < measured.facts["folded"]["a"]["update_lost"] < 1
        assert measured.facts["folded"]["a"]["sampler_trainer_kl"] > 0
        assert measured.facts["folded"]["a"]["seconds"] > 0
        assert (measured.metrics["tokens_per_second_short_2"].value or 0) > 0
    assert (by_vllm.facts["products"], own.facts["products"]) == ("vllm", "own")
    # A folded base is all that vLLM is given, and an adapter beside one that it rounds.
    assert by_vllm.facts["vllm"] == WITH_ADAPTER | {"training": "none"}
    assert fp8.facts["vllm"] == WITH_ADAPTER | {"quantization": "fp8"}


@pytest.mark.parametrize(("noise", "lost", "rounds", "refused"), [
    (0.05, False, False, ""), (0.05, True, False, "nearer with it"), (0.8, False, False, "nats"),
    (0.8, False, True, ""), (0.4, True, True, "nearer with it"),
    (math.nan, False, False, "number"), (100.0, False, False, "nats"), (100.0, False, True, "by"),
])  # fmt: skip
def test_vllm_must_serve_the_base_and_the_adapter(noise, lost, rounds, refused):
    own, far, moved = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    bare = own + 0.5 * moved
    theirs = (bare if lost else own) + noise * far
    engine: Any = object.__new__(VllmEngine)
    vars(engine).update(_rounds=rounds, channels_changed=0, receipt={}, policy=small_policy("bf16"))
    answers = [torch.stack([of, theirs]) for of in (own, bare)]
    engine._logprobs = lambda *of_rollout: answers.pop(0)
    if refused:
        with pytest.raises(ValueError, match=refused):
            engine._compare()
    else:
        engine._compare()
        assert engine.receipt["correlation"] > 0.5


@torch.no_grad()
def test_the_kl_of_a_fold_is_that_of_the_policies_and_zero_without_a_change(host_clock):
    policy, apart = small_policy("bf16"), small_policy("bf16")
    tokens = torch.tensor(random_prompts(1, 256, SIZES["vocab_size"], 0))
    facts = throughput.fold(policy)
    p, q = (one.model(tokens).logits[0].log_softmax(-1) for one in (policy, apart))
    assert facts["sampler_trainer_kl"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item())
    assert facts["sampler_trainer_kl"] > 1e-9
    for _, layer in adapter_layers(apart.model):
        layer.adapter()[1].zero_()
    assert throughput.fold(apart)["sampler_trainer_kl"] == 0


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}])
def test_vllm_is_given_a_base_and_how_to_round_it(options, monkeypatch):
    given: dict[str, Any] = {}

    def engine(model, **more):
        (file,) = Path(model).glob("*.safetensors")
        given.update(more, weights=load_file(file))
        raise NotImplementedError

    module: Any = ModuleType("vllm")
    module.LLM, module.__version__ = engine, "9.9"
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    policy = small_policy("bf16")
    folds = not options
    if folds:
        fold_adapter(policy.model)
        policy = dataclasses.replace(policy, training="none")
    with pytest.raises(NotImplementedError):
        VllmEngine(policy, SHORT, (1, 2), **options)
    assert given["enable_lora"] is not folds
    assert given.get("quantization") == options.get("quantization")
    assert given["max_num_seqs"] == 2
    name, layer = next(adapter_layers(policy.model))
    assert torch.equal(given["weights"][f"{name}.weight"].float(), base_linear(layer).weight)


def test_a_random_base_is_loaded_as_it_was_written(tmp_path):
    tokens = torch.arange(9)[None]
    policy = random_policy(small.SHAPE, weight_format="nvfp4", lora_rank=0, seed=0, device="cpu")
    write_base(policy, tmp_path)
    again = load_policy(tmp_path, weight_format="nvfp4", compute_dtype="bfloat16")
    assert torch.equal(policy.model(tokens).logits, again.model(tokens).logits)


def test_the_seeds_of_an_arm_go_together_and_other_runs_alone():
    groups = carried_together(plan(find("table9"), Tier.SYSTEMS))
    assert len(groups) == 6
    for group in groups:
        assert [run.seed for run in group] == [0, 1, 2, 3, 4]
        assert len({run.arm for run in group}) == 1
    alone = carried_together(plan(find("table1"), Tier.SMOKE, seeds=2))
    assert all(len(group) == 1 for group in alone)


def test_an_arm_without_its_package_is_not_run_and_says_so(monkeypatch):
    runs = plan(find("figure11"), Tier.SYSTEMS, seeds=1)
    runs += plan(find("rollout_vllm"), Tier.SYSTEMS, seeds=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lacking = {run.arm.name: missing_package(run) for run in runs}
    assert lacking["nvfp4_lora_r16"] is lacking["nvfp4_lora"] is None
    assert "it is not installed" in (lacking["nf4_lora_r16_bitsandbytes"] or "")
    assert "needs vllm" in (lacking["nvfp4_lora_vllm"] or "")
