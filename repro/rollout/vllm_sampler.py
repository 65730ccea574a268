"""Rollouts by vLLM, for those who run it: adapter-only synchronisation, noise, log-probabilities.

vLLM keeps a copy of its own of the base weights; what moves between trainer and sampler is the
adapter alone, as tensors, under a new integer id each time (a request names the id it wants, and an
id that was loaded before would be served from vLLM's cache). The prefix cache is reset with each
synchronisation: its keys belong to the adapter before.

Added noise must reach vLLM's own norm modules, whose class is not transformers': they are found by
name, in the worker, and the receipt counts the channels that really changed. The published code
looked for a class that vLLM does not build, touched nothing and said nothing.

Only public interfaces are used (`LLM`, `SamplingParams`, `LoRARequest`, `LLM.apply_model`,
`reset_prefix_cache`), and vLLM is imported inside the class: it is an optional extra, written for
vLLM 0.26 and newer. Not run by this project's tests, which have no vLLM.

Easy to get wrong: sampled log-probabilities before temperature and filters (`logprobs_mode` must
say `processed_logprobs`); per-request seeds forgotten, so that rows depend on the batch; gains that
are bfloat16, which swallow small noise, so the change really made is read back.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.models.adapter_files import save_adapter
from repro.models.norms import block_norms, final_norm
from repro.models.policy import Policy
from repro.rollout.sampler import Completion, FinishReason, RolloutBatch, check_request
from repro.spec.config import SamplingConfig, require


class VllmSampler:
    """Samples from a checkpoint in vLLM with the policy's adapter.

    Parameters
    ----------
    policy
        The trainer's policy, whose adapter and norms are followed.
    checkpoint
        Folder or hub name that vLLM loads the base from: the same weights as the policy's.
    max_positions
        Longest prompt and completion together.
    memory_share
        Of the device, for vLLM.
    max_rank
        Largest LoRA rank.

    Raises
    ------
    ImportError
        When vLLM is not installed.
    """

    def __init__(
        self,
        policy: Policy,
        checkpoint: str | Path,
        *,
        max_positions: int,
        memory_share: float = 0.4,
        max_rank: int = 64,
    ) -> None:
        from vllm import LLM

        self.policy = policy
        self.max_positions = max_positions
        self.version = 0
        self.channels_changed = 0
        self._folder = tempfile.TemporaryDirectory(prefix="qerl-adapter-")
        self._stale = True
        self._llm: Any = LLM(
            model=str(checkpoint),
            dtype="bfloat16",
            max_model_len=max_positions,
            gpu_memory_utilization=memory_share,
            enable_lora=policy.training == "lora",
            max_lora_rank=max_rank,
            max_loras=1,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
        )

    def refresh(self) -> None:
        """Take up the adapter as it is now, at the next rollout."""
        self._stale = True

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        group_size: int,
        seeds: Sequence[int],
    ) -> RolloutBatch:
        """Sample `group_size` completions of each prompt; see `Sampler.sample`."""
        from vllm import SamplingParams

        config: Any = self.policy.decoder
        check_request(
            prompts,
            group_size=group_size,
            seeds=seeds,
            max_new_tokens=sampling.max_new_tokens,
            max_positions=self.max_positions,
            vocab_size=config.config.vocab_size,
        )
        self._synchronise()
        requests = [
            {"prompt_token_ids": list(prompt)} for prompt in prompts for _ in range(group_size)
        ]
        parameters = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                max_tokens=sampling.max_new_tokens,
                logprobs=0,
                seed=seed,
                detokenize=False,
            )
            for seed in seeds
        ]
        outputs = self._llm.generate(
            requests, parameters, lora_request=self._lora_request(), use_tqdm=False
        )
        greedy = sampling.temperature == 0
        return RolloutBatch(
            prompt_ids=[tuple(prompt) for prompt in prompts],
            completions=[_completion(output.outputs[0], greedy) for output in outputs],
            group_size=group_size,
        )

    def _synchronise(self) -> None:
        """Hand over the adapter if it has moved, and the norms' gains with their noise."""
        gains = {
            name: norm.gain().cpu()
            for name, norm in (
                *block_norms(self.policy.decoder).items(),
                ("model.norm", final_norm(self.policy.decoder)),
            )
        }
        path = Path(self._folder.name) / "gains.json"
        torch_free = {name: gain.tolist() for name, gain in gains.items()}
        path.write_text(json.dumps(torch_free), encoding="utf-8")
        changed = self._llm.apply_model(_GainSetter(str(path)))
        self.channels_changed = int(changed[0])
        noisy = any(norm.noise is not None for norm in block_norms(self.policy.decoder).values())
        require(
            not noisy or self.channels_changed > 0,
            "noise is on the policy's norms, and no gain of vLLM's changed",
        )
        if self._stale and self.policy.training == "lora":
            self.version += 1
            folder = Path(self._folder.name) / f"adapter-{self.version}"
            folder.mkdir()
            save_adapter(self.policy, folder)
        if self._stale or self.channels_changed:
            self._llm.reset_prefix_cache()
        self._stale = False

    def _lora_request(self) -> Any:
        if self.policy.training != "lora":
            return None
        from vllm.lora.request import LoRARequest

        folder = Path(self._folder.name) / f"adapter-{self.version}"
        return LoRARequest(f"adapter-{self.version}", self.version, str(folder))

    def close(self) -> None:
        """Remove the adapter's files."""
        self._folder.cleanup()


class _GainSetter:
    """Sets the norms of vLLM's model in its worker; returns how many channels changed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, model: torch.nn.Module) -> int:
        gains = json.loads(Path(self.path).read_text(encoding="utf-8"))
        return set_gains(model, {name: torch.tensor(gain) for name, gain in gains.items()})


def set_gains(model: torch.nn.Module, gains: dict[str, Tensor]) -> int:
    """Copy gains into a model's norms by name, in place; return how many channels changed.

    Raises
    ------
    ValueError
        When a name is not in the model or its shape differs: a silent miss is the published bug.
    """
    parameters = dict(model.named_parameters())
    changed = 0
    for name, gain in gains.items():
        weight = parameters.get(f"{name}.weight")
        if weight is None or weight.shape != gain.shape:
            found = "nothing" if weight is None else f"shape {tuple(weight.shape)}"
            raise ValueError(f"{name}.weight: the sampler's model has {found}; a gain is needed")
        before = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(gain.to(weight.device, weight.dtype))
        changed += int((weight != before).sum())
    return changed


def _completion(output: Any, greedy: bool) -> Completion:
    ids = tuple(output.token_ids)
    drawn = [
        float(position[token].logprob) for position, token in zip(output.logprobs, ids, strict=True)
    ]
    reason: FinishReason = "stop" if output.finish_reason == "stop" else "length"
    return Completion(
        token_ids=ids,
        sampled_logprobs=(0.0,) * len(ids) if greedy else tuple(drawn),
        finish_reason=reason,
    )
