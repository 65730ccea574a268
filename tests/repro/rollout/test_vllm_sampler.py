"""The vLLM sampler against a stand-in that has the signatures of vLLM's public interface."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from repro.models.norms import block_norms, final_norm
from repro.models.policy import Policy
from repro.rl.noise import perturbed
from repro.rollout.vllm_sampler import VllmSampler
from repro.spec.arm import NoiseConfig
from repro.spec.config import SamplingConfig

MakePolicy = Callable[..., Policy]


@dataclass
class StandInParameters:
    """Keyword names as in `vllm.SamplingParams`; any other is an error."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True


@dataclass(frozen=True)
class StandInRequest:
    """As `vllm.lora.request.LoRARequest`, whose integer id must be positive."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        assert self.lora_int_id > 0
        assert (Path(self.lora_path) / "adapter_model.safetensors").is_file()


@dataclass
class StandInEngine:
    """As `vllm.LLM`: keyword arguments of its `EngineArgs`, results as its `RequestOutput`."""

    model: str
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    hf_overrides: dict[str, str] | None = None
    enforce_eager: bool = False
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_lora: bool = False
    max_lora_rank: int = 16
    max_loras: int = 1
    enable_prefix_caching: bool | None = None
    logprobs_mode: str = "raw_logprobs"
    resets: int = 0
    requests: list[Any] = field(default_factory=list)
    network: Any = None
    finish_reason: str = "stop"

    def generate(
        self,
        prompts: Sequence[dict[str, list[int]]],
        sampling_params: Sequence[StandInParameters],
        *,
        use_tqdm: bool = True,
        lora_request: StandInRequest | None = None,
    ) -> list[Any]:
        """Answer each request with its seed's digits, most of them ending early."""
        self.requests.append((list(prompts), list(sampling_params), lora_request))
        outputs = []
        for prompt, parameters in zip(prompts, sampling_params, strict=True):
            assert set(prompt) == {"prompt_token_ids"}
            assert parameters.logprobs == 0
            ids = [1 + (parameters.seed or 0) % 7, 5]
            logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in ids]
            output = SimpleNamespace(
                token_ids=ids, logprobs=logprobs, finish_reason=self.finish_reason
            )
            outputs.append(SimpleNamespace(outputs=[output]))
        return outputs

    def apply_model(self, func: Callable[[nn.Module], Any]) -> list[Any]:
        """Return what `func` returns for the model of each worker, of which there is one."""
        return [func(self.network)]

    def reset_prefix_cache(self) -> bool:
        """Count the resets."""
        self.resets += 1
        return True


def network_like(policy: Policy) -> nn.Module:
    """Return modules with the norms' names, in bfloat16, as vLLM's model has them."""
    network = nn.Module()
    norms = {**block_norms(policy.decoder), "model.norm": final_norm(policy.decoder)}
    for name, norm in norms.items():
        *path, leaf = name.split(".")
        parent = network
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        module = nn.Module()
        module.weight = nn.Parameter(norm.weight.detach().bfloat16(), requires_grad=False)
        parent.add_module(leaf, module)
    return network


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = StandInEngine, StandInParameters  # type: ignore[attr-defined]
    request = ModuleType("vllm.lora.request")
    request.LoRARequest = StandInRequest  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.lora", ModuleType("vllm.lora"))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture
def sampler(vllm: None, make_policy: MakePolicy) -> Any:
    policy = dataclasses.replace(make_policy("qwen2", "nvfp4"), effects={"norms_trained": 4})
    own_sampler = VllmSampler(policy, "checkpoint", max_positions=64)
    own_sampler._llm.network = network_like(policy)
    yield own_sampler
    own_sampler.close()


SAMPLING = SamplingConfig(temperature=0.8, max_new_tokens=8)


def sample(sampler: VllmSampler, **changes: Any) -> Any:
    ask: dict[str, Any] = {"group_size": 2, "seeds": [3, 4, 5, 6]} | changes
    return sampler.sample([[1, 2], [3]], SAMPLING, **ask)


def test_each_row_has_its_seed_and_its_sampled_logprob(sampler: Any) -> None:
    batch = sample(sampler)
    assert [c.token_ids for c in batch.completions] == [(4, 5), (5, 5), (6, 5), (7, 5)]
    assert batch.completions[0].sampled_logprobs == (-0.5, -0.5)
    prompts, parameters, _ = sampler._llm.requests[0]
    assert [p["prompt_token_ids"] for p in prompts] == [[1, 2], [1, 2], [3], [3]]
    assert [p.seed for p in parameters] == [3, 4, 5, 6]
    assert sampler._llm.logprobs_mode == "processed_logprobs"


def test_an_adapter_gets_a_new_id_at_each_refresh_and_the_old_file_goes(sampler: Any) -> None:
    sample(sampler)
    sample(sampler)
    sampler.refresh()
    sample(sampler)
    requests = [request for _, _, request in sampler._llm.requests]
    assert [request.lora_int_id for request in requests] == [1, 1, 2]
    assert not Path(requests[0].lora_path).exists()
    assert Path(requests[2].lora_path).exists()
    assert sampler._llm.resets == 2


def test_noise_reaches_its_norms_once_and_leaves_again(sampler: Any) -> None:
    sample(sampler)
    assert sampler.channels_changed == 0
    noise = NoiseConfig(sigma_start=0.3, sigma_end=0.2)
    name = "model.layers.1.post_attention_layernorm"
    before = sampler._llm.network.get_submodule(name).weight.clone()
    with perturbed(sampler.policy, noise, seed=1, step=5, total_steps=10):
        sample(sampler)
        under = sampler.channels_changed
        # A second batch of the same rollout: nothing moves, and the receipt stands.
        sample(sampler)
        assert sampler.channels_changed == under > 0
        gain = block_norms(sampler.policy.decoder)[name].gain()
        assert torch.equal(sampler._llm.network.get_submodule(name).weight, gain.bfloat16())
    sample(sampler)
    assert sampler.channels_changed == 0
    assert torch.equal(sampler._llm.network.get_submodule(name).weight, before)


def test_noise_that_bfloat16_swallows_is_an_error(sampler: Any) -> None:
    sample(sampler)
    for norm in block_norms(sampler.policy.decoder).values():
        norm.noise = torch.full_like(norm.weight, 1e-9)
    try:
        with pytest.raises(ValueError, match="no gain of vLLM's differs"):
            sample(sampler)
    finally:
        for norm in block_norms(sampler.policy.decoder).values():
            norm.noise = None


def test_a_completion_that_vllm_gave_up_is_not_taken_for_a_long_one(sampler: Any) -> None:
    sampler._llm.finish_reason = "length"
    assert {item.finish_reason for item in sample(sampler).completions} == {"length"}
    sampler._llm.finish_reason = "abort"
    with pytest.raises(RuntimeError, match="ended a completion of 2 tokens for 'abort'"):
        sample(sampler)


def test_a_temperature_that_vllm_would_raise_is_refused(sampler: Any) -> None:
    with pytest.raises(ValueError, match=r"temperature is 0.005; vLLM samples at 0 or from 0.01"):
        sampler.sample([[1]], SamplingConfig(temperature=0.005), group_size=1, seeds=[3])
    assert sampler._llm.requests == []


def test_an_engine_in_another_process_is_refused(
    vllm: None, make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match=r"MULTIPROCESSING is '1'; .* needs '0'"):
        VllmSampler(make_policy("qwen2", "nvfp4"), "checkpoint", max_positions=64)


def test_a_policy_whose_base_is_trained_is_refused(vllm: None, make_policy: MakePolicy) -> None:
    policy = dataclasses.replace(make_policy("qwen2", "nvfp4"), training="full")
    with pytest.raises(ValueError, match="it serves LoRA and frozen policies only"):
        VllmSampler(policy, "checkpoint", max_positions=64)


def test_a_cache_that_is_not_reset_is_an_error(
    sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler._llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        sample(sampler)
