"""Rollouts by vLLM, for those who run it: adapter-only synchronisation, noise, log-probabilities.

vLLM keeps a copy of its own of the base weights; what moves between trainer and sampler is the
adapter alone, under a new integer id each time (a request names the id it wants, and an id that was
loaded before would be served from vLLM's cache). It moves as a safetensors file, because a
`LoRARequest` names a path; the file before it is removed. The prefix cache is reset with each
synchronisation: its keys belong to the adapter before.

Added noise must reach vLLM's own norm modules, whose class is not transformers': they are found by
name, in the worker, and the receipt counts the channels whose gain there is another than without
noise. The published code looked for a class that vLLM does not build, touched nothing and said
nothing.

Only public interfaces are used (`LLM`, `SamplingParams`, `LoRARequest`, `LLM.apply_model`,
`reset_prefix_cache`), and vLLM is imported inside the class: it is an optional extra, written for
vLLM 0.26 and newer. This project's tests have no vLLM: they run against a stand-in with the
signatures that vLLM's published source has.

Easy to get wrong: sampled log-probabilities before temperature and filters (`logprobs_mode` must
say `processed_logprobs`); per-request seeds forgotten, so that rows depend on the batch; gains that
are bfloat16, which swallow small noise, so the change really made is read back; a function handed
to `apply_model`, which an engine in a process of its own takes only as pickled code, so the engine
is kept in this process; end tokens left to the checkpoint's `generation_config.json`, which may
name others than the policy.
"""

from __future__ import annotations

import json
import os
import shutil
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
from repro.rollout.torch_sampler import end_token_ids
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
        # Before the import: vLLM's engine in this process takes a function as it is.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        require(
            policy.training != "full",
            "vLLM's copy of the base is never updated: it serves LoRA and frozen policies only",
        )
        self.policy = policy
        self.max_positions = max_positions
        self.version = 0
        self.channels_changed = 0
        self._gains: dict[str, Tensor] = {}
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
        ends = sorted(end_token_ids(self.policy))
        parameters = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                max_tokens=sampling.max_new_tokens,
                logprobs=0,
                seed=seed,
                stop_token_ids=ends,
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
        moved = self._hand_over_gains()
        norms = block_norms(self.policy.decoder).values()
        noisy = any(norm.noise is not None and bool(norm.noise.any()) for norm in norms)
        require(
            not noisy or self.channels_changed > 0,
            "noise is on the policy's norms, and no gain of vLLM's differs for it",
        )
        if self._stale and self.policy.training == "lora":
            shutil.rmtree(self._adapter_folder, ignore_errors=True)
            self.version += 1
            self._adapter_folder.mkdir()
            save_adapter(self.policy, self._adapter_folder)
        if (self._stale or moved) and self._llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        self._stale = False

    def _hand_over_gains(self) -> bool:
        """Set the norms' gains in vLLM if they have moved; return whether they have."""
        norms = {
            **block_norms(self.policy.decoder),
            "model.norm": final_norm(self.policy.decoder),
        }
        gains = {name: norm.gain().cpu() for name, norm in norms.items()}
        if self._gains.keys() == gains.keys() and all(
            torch.equal(gain, self._gains[name]) for name, gain in gains.items()
        ):
            return False
        path = Path(self._folder.name) / "gains.json"
        plain = {
            name: {"gain": gains[name].tolist(), "bare": norm.weight.detach().float().tolist()}
            for name, norm in norms.items()
        }
        path.write_text(json.dumps(plain), encoding="utf-8")
        self.channels_changed = int(self._llm.apply_model(_GainSetter(str(path)))[0])
        self._gains = gains
        return True

    @property
    def _adapter_folder(self) -> Path:
        return Path(self._folder.name) / f"adapter-{self.version}"

    def _lora_request(self) -> Any:
        if self.policy.training != "lora":
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"adapter-{self.version}", self.version, str(self._adapter_folder))

    def close(self) -> None:
        """Remove the adapter's files."""
        self._folder.cleanup()


class _GainSetter:
    """Sets the norms of vLLM's model; returns how many channels differ from their bare gain."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, model: torch.nn.Module) -> int:
        plain = json.loads(Path(self.path).read_text(encoding="utf-8"))
        return set_gains(
            model,
            {name: torch.tensor(value["gain"]) for name, value in plain.items()},
            {name: torch.tensor(value["bare"]) for name, value in plain.items()},
        )


def set_gains(model: torch.nn.Module, gains: dict[str, Tensor], bare: dict[str, Tensor]) -> int:
    """Copy gains into a model's norms by name, in place.

    Parameters
    ----------
    gains, bare
        (H,) float32 by norm: with added noise, and without.

    Returns
    -------
    int
        Channels whose gain, in the model's own dtype, is another than the bare one.

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
        with torch.no_grad():
            weight.copy_(gain.to(weight.device, weight.dtype))
        changed += int((weight.detach() != bare[name].to(weight.device, weight.dtype)).sum())
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
