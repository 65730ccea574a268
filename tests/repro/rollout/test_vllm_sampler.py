"""The vLLM sampler against a stand-in for `vllm.LLM` that computes from what it is handed."""

import dataclasses
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from repro.models.files.adapter_files import load_adapted
from repro.models.files.tensor_files import CheckpointError
from repro.models.loading import read_description
from repro.models.memory_plan import training_memory
from repro.models.norms import block_norms
from repro.models.policy import end_token_ids, load_policy
from repro.procedures.train import train_and_evaluate
from repro.rollout.torch_sampler import TorchSampler
from repro.rollout.vllm_sampler import VllmSampler, served_folder
from repro.run.preflight import refusal
from repro.spec.arm import PlantedRounding
from repro.spec.config import SamplingConfig
from repro.spec.shapes import SHAPES
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.spec.variants import with_overrides, with_steps
from repro.targets import find
from tests.repro.run.test_execute import fewer
from tests.repro.small_runs import context_of, fresh_policy


class StandInEngine:
    """As `vllm.LLM`: an adapter is loaded at its id's first request and served from then on."""

    def __init__(self, model, **options):
        self.options, self.resets, self.requests = options, 0, []
        self.format = read_description(Path(model)).stored_format or "bf16"
        self.folder, self.answers = model, {"reason": ""}
        self.policy = load_policy(model, weight_format=self.format, compute_dtype=options["dtype"])
        self.set = lambda model: 0
        self.served = 0

    def generate(self, prompts, sampling_params, *, use_tqdm=True, lora_request=None):
        """Answer each request by the plain sampler."""
        self.requests.append(lora_request)
        if lora_request is not None and lora_request.lora_int_id != self.served:
            self.served = lora_request.lora_int_id
            self.policy = load_adapted(
                lora_request.lora_path,
                checkpoint=self.folder,
                weight_format=self.format,
                compute_dtype=self.options["dtype"],
            )
            self.set(self.policy.decoder)
        first = sampling_params[0]
        assert first.stop_token_ids == sorted(end_token_ids(self.policy))
        assert first.logprobs == 0
        batch = TorchSampler(self.policy).sample(
            [prompt["prompt_token_ids"] for prompt in prompts],
            SamplingConfig(
                temperature=first.temperature, top_p=first.top_p, max_new_tokens=first.max_tokens
            ),
            group_size=1,
            seeds=[parameters.seed for parameters in sampling_params],
        )
        return [SimpleNamespace(outputs=[self.output(own)]) for own in batch]

    def output(self, own):
        """Return a completion as vLLM does."""
        drawn = zip(own.token_ids, own.sampled_logprobs, strict=True)
        return SimpleNamespace(
            token_ids=own.token_ids,
            logprobs=[{token: SimpleNamespace(logprob=value)} for token, value in drawn],
            finish_reason=self.answers["reason"] or own.finish_reason,
        )

    def apply_model(self, func):
        """Return what `func` returns for the model of each worker, of which there is one."""
        self.set = func
        return [func(self.policy.decoder)]

    def reset_prefix_cache(self):
        """Count the resets."""
        self.resets += 1
        return True


@pytest.fixture
def vllm(monkeypatch, tmp_path):
    module, request = ModuleType("vllm"), ModuleType("vllm.lora.request")
    module.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    vars(module).update(LLM=StandInEngine, SamplingParams=SimpleNamespace, __version__="9.9")
    request.LoRARequest = lambda name, number, path: SimpleNamespace(
        lora_int_id=number, lora_path=path
    )
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.lora", ModuleType("vllm.lora"))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(**changes):
    ask = {"weight_format": "nvfp4", "training": "lora", "lora_rank": 4} | changes
    return fresh_policy("tiny", lora_alpha=8, norms_trained=True, **ask)


@pytest.fixture
def sampler(vllm):
    with VllmSampler(load(), max_positions=64) as own:
        yield own


SAMPLING = SamplingConfig(temperature=0.8, max_new_tokens=8)


def sample(sampler, **changes):
    ask = {"group_size": 2, "seeds": [3, 4, 5, 6]} | changes
    return sampler.sample([[10, 20], [30]], SAMPLING, **ask)


def run_of(name, *, steps=4, **settings):
    target = with_overrides(with_steps(find("table1"), steps), Tier.SMOKE, settings)
    (run,) = plan(target, Tier.SMOKE, 1, [name])
    return dataclasses.replace(run, scale=fewer(run.scale))


def trained(run, folder):
    return train_and_evaluate(run, context_of(folder))


CAPPED = {"loss": {"importance_cap": 2.0}}


def test_a_run_on_it_is_the_run_on_our_own_sampler(vllm, tmp_path):
    own = trained(run_of("nvfp4_lora_aqn", arm=CAPPED), tmp_path / "own")
    run = run_of("nvfp4_lora_aqn", arm=CAPPED, sampler="vllm")
    assert refusal(run) is None
    measured = trained(run, tmp_path / "vllm")
    assert measured.series["reward"] == own.series["reward"]
    assert measured.series["loss"] == pytest.approx(own.series["loss"], abs=1e-6)
    assert measured.facts["answers"] == own.facts["answers"]
    assert measured.facts["sampler"] == "VllmSampler"
    assert "sampler" not in own.facts
    receipt = measured.facts["vllm"]
    assert receipt["version"] == "9.9"
    assert receipt["channels_changed"] > 0
    # The policy as it stands, noise included, is what was sampled from; the clean one is not.
    assert receipt["abs_diff_mean_clean"] < 1e-5
    assert receipt["abs_diff_mean_noisy"] < 1e-5
    assert max(measured.series["sampler_trainer_abs_diff_mean"]) > 1e-4


def test_the_folder_is_written_once_of_the_arms_own_weights_and_checked(vllm):
    policy = load()
    folder, digest = served_folder(policy)
    weights = folder / "model.safetensors"
    stamp = weights.stat().st_mtime_ns
    assert read_description(folder).stored_format == "nvfp4"
    assert (folder, digest) == served_folder(load())
    assert weights.stat().st_mtime_ns == stamp
    assert served_folder(load(weight_format="mxfp4"))[0] != folder
    assert served_folder(load(weight_format="bf16"))[0] == policy.folder
    spoilt = bytearray(weights.read_bytes())
    spoilt[-1] ^= 1
    weights.write_bytes(spoilt)
    with pytest.raises(CheckpointError, match=r"model.safetensors has SHA-256"):
        served_folder(policy)


def test_noise_that_is_swallowed_is_an_error(sampler):
    sample(sampler)
    for norm in block_norms(sampler.policy.decoder).values():
        norm.noise = torch.full_like(norm.weight, 1e-12)
    with pytest.raises(ValueError, match="gain"):
        sample(sampler)


def test_a_completion_that_vllm_gave_up_is_not_taken_for_a_long_one(sampler):
    sampler.llm.answers["reason"] = "abort"
    with pytest.raises(RuntimeError, match=r"\d+ tokens .*'abort'"):
        sample(sampler)


def test_a_temperature_that_vllm_would_raise_is_refused(sampler):
    with pytest.raises(ValueError, match=r"temperature is 0.005.* 0.01"):
        sampler.sample([[1]], SamplingConfig(temperature=0.005), group_size=1, seeds=[3])
    assert sampler.llm.requests == []


def test_an_engine_in_another_process_is_refused(vllm, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match=r"MULTIPROCESSING is '1'; .* needs '0'"):
        VllmSampler(load(), max_positions=64)


def test_a_cache_that_is_not_reset_is_an_error(sampler, monkeypatch):
    monkeypatch.setattr(sampler.llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(RuntimeError, match="prefix cache"):
        sample(sampler)


@pytest.mark.parametrize(
    ("arm", "settings", "reason"),
    [
        ("nvfp4_lora", {}, r"importance_cap is None; .* --set arm.loss.importance_cap=2"),
        ("bf16_full", {"arm": CAPPED}, "bf16_full trains the base"),
        ("nvfp4_lora", {"arm": CAPPED, "permuted": True}, "changes the weights"),
    ],
)
def test_what_vllm_cannot_serve_is_refused(vllm, arm, settings, reason):
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refusal(run_of(arm, steps=30, sampler="vllm", **settings)))


def test_a_planted_rounding_a_dose_and_a_machine_without_vllm_are_refused(vllm, monkeypatch):
    run = run_of("bf16_lora", sampler="vllm", arm=CAPPED)
    planted = dataclasses.replace(run.arm, rounding=PlantedRounding(format="nf4"))
    assert "changes the weights" in str(refusal(dataclasses.replace(run, arm=planted)))
    assert "is a dose" in str(refusal(dataclasses.replace(run, procedure="dose")))
    folded = dataclasses.replace(run.arm, rollout_adapter="folded")
    folding = dataclasses.replace(run, arm=folded)
    assert "rollout_adapter folded" in str(refusal(folding))
    folding = dataclasses.replace(folding, scale=dataclasses.replace(run.scale, sampler="own"))
    assert refusal(folding) is None
    assert "in procedure dose" in str(refusal(dataclasses.replace(folding, procedure="dose")))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'qerl-repro[vllm]'" in str(refusal(run))


def test_the_plan_holds_a_second_copy_and_gives_vllm_the_cache():
    scale, arm = find("table1").scales[Tier.PAPER], find("table1").arm("nvfp4_lora")
    own = training_memory(arm, scale)
    served = training_memory(arm, dataclasses.replace(scale, sampler="vllm"))
    assert served.least - own.least == served.served > 5e9
    step = dataclasses.replace(served.step, shape=SHAPES["0.5b"])
    assert dataclasses.replace(served, step=step).served < served.served
    device = 80 * 10**9
    assert own.peak(device) < served.peak(device) < device
    assert served.served < served.served_share(device) * device < 0.6 * device
