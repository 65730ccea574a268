"""Rollouts by vLLM (`--set sampler=vllm`): its own copy of the base, the adapter handed over.

vLLM loads the base once, from a folder of the policy's own weights; what moves at each step is the
adapter alone, under a new integer id each time (a request names the id it wants, and an id that was
loaded before would be served from vLLM's cache). It moves as a safetensors file, because a
`LoRARequest` names a path; the file before it is removed. The prefix cache is reset with each
synchronisation: its keys belong to the adapter and the gains before.

Added noise must reach vLLM's own norm modules, whose class is not transformers': they are found by
name, in the engine, and the receipt counts the channels whose gain there differs from the one
without noise. Trained gains go the same way: vLLM refuses an adapter that brings any.

Only public interfaces are used (`LLM`, `SamplingParams`, `LoRARequest`, `LLM.apply_model`,
`reset_prefix_cache`), and vLLM is imported inside the class: it is an optional extra, 0.26 or
newer. Its CPU build 0.32.0 refuses 4-bit weights. On a GPU of compute capability 10.0, vLLM may
serve an MXFP4 folder with activations in 4 bits too, by its own words; the trainer's are 16-bit.

Easy mistakes
-------------
* Sampled log-probabilities from before temperature and filters: `logprobs_mode` must say
  `processed_logprobs`.
* Log-probabilities of logits rounded to bfloat16, as vLLM's are unless `head_dtype` is float32.
* Seeds of requests forgotten, so that a row depends on what stands beside it.
* Gains in bfloat16, which swallow small noise: the change really made is read back.
* A function handed to `apply_model`, which an engine in a process of its own takes only as pickled
  code: the engine is kept in this process.
* End tokens, to which vLLM adds those of the checkpoint's tokenizer and `generation_config.json`
  unless a request says `ignore_eos`.
* Sleep mode, after which NVFP4 with an adapter answers as without it: the engine is never put to
  sleep.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from kernels import dispatch
from repro.models.checkpoint import verify, weights_digest, write_quantized
from repro.models.files.adapter_files import save_adapter
from repro.models.loading import default_recipe, read_description
from repro.models.lora import adapter_layers
from repro.models.memory_plan import MOST_SLOTS
from repro.models.norms import block_norms, final_norm
from repro.models.policy import Policy, end_token_ids
from repro.rollout.sampler import Completion, FinishReason, check_request
from repro.spec.checks import require
from repro.spec.config import SamplingConfig
from repro.spec.hub import user_cache

# vLLM takes positive temperatures below for this one.
_LEAST_TEMPERATURE = 0.01
# Ranks that vLLM makes room for.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Prompts of a rollout on whose first completions vLLM is compared with the policy as it stands.
_COMPARED = 4


class VllmSampler:
    """Samples in vLLM with a policy's adapter and gains; a context manager, which ends the engine.

    vLLM computes in the policy's dtype, in at most `memory_share` (0 to 1) of the device's memory;
    `options` are further ones of `vllm.LLM`, before those chosen here.
    Raises `ValueError` when the environment puts its engine into a process of its own.

    Attributes
    ----------
    llm, adapter
        vLLM's own engine, and the `LoRARequest` of the adapter that it has, None before the first.
    version : int
        Id of the adapter that vLLM has, 0 before the first; each one handed over gets the next.
    channels_changed : int
        Channels of vLLM's norms whose gain differs from the one without noise.
    receipt : dict
        For the record: vLLM's version, the digest of the weights that it loaded, most channels
        changed, and by whether noise was on the largest of rollouts' mean |log pi_policy - log
        pi_vLLM|, noise included; from the clean trainer it is the series `sampler_trainer_*`.
    """

    def __init__(
        self, policy: Policy, *, max_positions: int, memory_share: float = 0.1, **options: Any
    ) -> None:
        # vLLM's engine in this process takes a function as it is, and leaves its threads alone.
        where = os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        import vllm

        require(
            where == "0",
            f"VLLM_ENABLE_V1_MULTIPROCESSING is {where!r}; norms are set in an engine in this "
            "process, which needs '0'",
        )
        decoder: Any = policy.decoder
        self.policy = policy
        self.max_positions = min(max_positions, decoder.config.max_position_embeddings)
        self.version = 0
        self.channels_changed = 0
        self._gains: dict[str, Tensor] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="qerl-adapter-")
        self.adapter: Any = None
        self._stale = True
        served, digest = served_folder(policy)
        self.receipt: dict[str, Any] = {"version": vllm.__version__, "weights_sha256": digest}
        rank = max(
            (layer.adapter()[0].shape[0] for _, layer in adapter_layers(policy.model)), default=1
        )
        chosen: dict[str, Any] = {
            "model": str(served),
            "skip_tokenizer_init": True,
            "dtype": str(policy.compute_dtype).removeprefix("torch."),
            "max_model_len": self.max_positions,
            "max_num_seqs": MOST_SLOTS,
            "gpu_memory_utilization": memory_share,
            "hf_overrides": {"head_dtype": "float32"},
            # Compiled code and captured graphs are for devices.
            "enforce_eager": policy.device.type == "cpu",
            "enable_lora": policy.training == "lora",
            "max_lora_rank": min((size for size in _RANKS if size >= rank), default=rank),
            "max_loras": 1,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
        }
        # The engine, in this process, seeds torch's global generator.
        with torch.random.fork_rng(devices=[]):
            self.llm: Any = vllm.LLM(**(chosen | options))

    def __enter__(self) -> VllmSampler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.llm = None
        self._folder.cleanup()

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
    ) -> list[Completion]:
        """See `Sampler.sample`.

        Raises `ValueError` also for noise that does not reach vLLM's norms; `RuntimeError` when
        vLLM keeps its prefix cache, or gives a completion up.
        """
        require(
            sampling.temperature == 0 or sampling.temperature >= _LEAST_TEMPERATURE,
            f"temperature is {sampling.temperature}; vLLM samples at 0 or from "
            f"{_LEAST_TEMPERATURE} on, and takes what is between for {_LEAST_TEMPERATURE}",
        )
        check_request(self.policy, prompts, sampling, group_size, seeds, self.max_positions)
        self._synchronise()
        requests = [
            {"prompt_token_ids": list(prompt)} for prompt in prompts for _ in range(group_size)
        ]
        asked = self._parameters(sampling, seeds)
        outputs = self.llm.generate(requests, asked, lora_request=self.adapter, use_tqdm=False)
        greedy = sampling.temperature == 0
        completions = [_completion(output.outputs[0], greedy) for output in outputs]
        if not greedy and not sampling.filtered:
            self._compare(prompts, completions[::group_size], sampling)
        return completions

    def _compare(self, *of_rollout: Any) -> Tensor:
        """Note how far vLLM is from the policy as it stands; return `_logprobs`."""
        both = self._logprobs(*of_rollout)
        nats = float(both.diff(dim=0).abs().mean())
        require(math.isfinite(nats), f"vLLM is {nats} nats from the policy; a number is needed")
        self._note("abs_diff_mean_noisy" if self.channels_changed else "abs_diff_mean_clean", nats)
        self._note("channels_changed", self.channels_changed)
        return both

    @torch.no_grad()
    def _logprobs(
        self,
        prompts: Sequence[Sequence[int]],
        firsts: Sequence[Completion],
        sampling: SamplingConfig,
    ) -> Tensor:
        """Return log-probabilities by the policy and by vLLM, (2, T), of some prompts' tokens.

        `firsts` are the first completion of each prompt.
        """
        both: list[Tensor] = []
        decoder: Any = self.policy.decoder
        for prompt, completion in zip(prompts[:_COMPARED], firsts, strict=False):
            tokens = torch.tensor([*prompt, *completion.token_ids], device=self.policy.device)
            hidden = decoder.model(input_ids=tokens[None, :-1], use_cache=False)[0][0]
            end = hidden[len(prompt) - 1 :], decoder.lm_head.weight, tokens[len(prompt) :]
            own, _ = dispatch.token_logprobs(*end, sampling.temperature)
            both.append(torch.stack([own.cpu(), torch.tensor(completion.sampled_logprobs)]))
        return torch.cat(both, dim=1)

    def _note(self, name: str, value: float) -> None:
        self.receipt[name] = max(self.receipt.get(name, 0), value)

    def _parameters(
        self, sampling: SamplingConfig, seeds: Sequence[int | None], logprobs: int | None = 0
    ) -> list[Any]:
        from vllm import SamplingParams

        ends = sorted(end_token_ids(self.policy))
        return [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_new_tokens,
                logprobs=logprobs,
                seed=seed,
                stop_token_ids=ends,
                ignore_eos=True,
                detokenize=False,
            )
            for seed in seeds
        ]

    def _synchronise(self) -> None:
        """Hand over the adapter if a refresh was asked for, and the norms' gains if they moved."""
        moved = self._hand_over_gains()
        norms = block_norms(self.policy.decoder).values()
        noisy = any(norm.noise is not None and bool(norm.noise.any()) for norm in norms)
        require(
            not noisy or self.channels_changed > 0,
            "noise is on the policy's norms, and no gain of vLLM's differs for it",
        )
        if self._stale and self.policy.training == "lora":
            from vllm.lora.request import LoRARequest

            if self.adapter is not None:
                shutil.rmtree(self.adapter.lora_path)
            self.version += 1
            name = f"adapter-{self.version}"
            folder = save_adapter(self.policy, Path(self._folder.name) / name, norms=False)
            self.adapter = LoRARequest(name, self.version, str(folder))
        if (self._stale or moved) and self.llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        self._stale = False

    def _hand_over_gains(self) -> bool:
        """Set the norms' gains in vLLM if they have moved; return whether they have."""
        norms = {**block_norms(self.policy.decoder), "model.norm": final_norm(self.policy.decoder)}
        # Copies: a gain without noise may be the trained tensor itself, which moves.
        gains = {name: norm.gain().to("cpu", copy=True) for name, norm in norms.items()}
        if self._gains.keys() == gains.keys() and all(
            torch.equal(gain, self._gains[name]) for name, gain in gains.items()
        ):
            return False
        bare = {name: norm.weight.detach().float().cpu() for name, norm in norms.items()}
        setter = partial(set_gains, gains=gains, bare=bare)
        self.channels_changed = int(self.llm.apply_model(setter)[0])
        self._gains = gains
        return True


def served_folder(policy: Policy) -> tuple[Path, str]:
    """Return the folder that vLLM loads a policy's base from, and the digest of its weights.

    It is the policy's own where loading rounds nothing; else one quantised from it as the policy
    was, once, into the user's cache. `CheckpointError` when its files are not what was written.
    """
    source, digest, kind = policy.folder, weights_digest(policy.facts), policy.weight_format
    assert source is not None
    if kind in ("bf16", read_description(source).stored_format):
        return source, digest
    name = f"{digest[:16]}-{kind}-{default_recipe(source, kind)}"
    target = user_cache() / "vllm" / name
    try:
        if not target.is_dir():
            write_quantized(source, target, kind, device=policy.device)
    except OSError:
        if not target.is_dir():  # written by another process meanwhile, of the same weights
            raise
    return target, str(verify(target))


def set_gains(model: torch.nn.Module, gains: dict[str, Tensor], bare: dict[str, Tensor]) -> int:
    """Copy gains, (H,) float32 by norm, into a model's norms by transformers' names, in place.

    Returns how many channels then differ, in the model's own dtype, from the `bare` gains. Raises
    `ValueError` when a name is not in the model or its shape differs: the published bug is silent.
    """
    parameters = dict(model.named_parameters())
    changed = 0
    for name, gain in gains.items():
        weight = parameters.get(f"{name}.weight")
        if weight is None or weight.shape != gain.shape:
            present = "nothing" if weight is None else f"shape {tuple(weight.shape)}"
            raise ValueError(f"{name}.weight: the sampler's model has {present}; a gain is needed")
        with torch.no_grad():
            weight.copy_(gain.to(weight.device, weight.dtype))
        changed += int((weight.detach() != bare[name].to(weight.device, weight.dtype)).sum())
    return changed


def _completion(output: Any, greedy: bool) -> Completion:
    ids = tuple(output.token_ids)
    drawn = [
        float(position[token].logprob) for position, token in zip(output.logprobs, ids, strict=True)
    ]
    if output.finish_reason not in get_args(FinishReason):
        raise RuntimeError(
            f"vLLM ended a completion of {len(ids)} tokens for {output.finish_reason!r}; a rollout "
            f"needs one of {get_args(FinishReason)}"
        )
    return Completion(
        token_ids=ids,
        sampled_logprobs=(0.0,) * len(ids) if greedy else tuple(drawn),
        finish_reason=output.finish_reason,
    )
