"""vLLM's own engine in the place of this project's, on the same policy and under the same clock.

vLLM loads the policy's random base from a folder, packs it for its own kernels and captures its own
steps at the batches that are timed; the adapter is handed over as in training. `generate` returns
once the host has every token, so device events around it hold the whole rollout. It is asked for
less than this project's engine gives: no log-probabilities, no seeds of rows, logits in its default
dtype. Nothing comes from a prefix cache: there is none. vLLM does not give all of its memory back.

A policy whose adapter was folded in has none to hand over. With `quantization="fp8"` vLLM rounds
the base itself, and activations too; the adapter keeps 16 bits.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from repro.measure.rollout_cells import random_prompts
from repro.models.files.merged_files import write_base
from repro.models.policy import Policy
from repro.rollout.vllm_sampler import VllmSampler
from repro.spec.checks import require
from repro.spec.config import SamplingConfig
from repro.spec.throughput_scale import ThroughputPoint

# Of the device, beside the policy in it: weights, captured steps and the cache of 256 rows.
_MEMORY_SHARE = 0.55


class VllmEngine(VllmSampler):
    """vLLM with a policy's base and adapter, warm at the batches of a point.

    `options` are further ones of `vllm.LLM`. Its `receipt` also says what vLLM chose. `ValueError`
    when what it serves is not the policy.
    """

    def __init__(
        self, policy: Policy, point: ThroughputPoint, batches: Sequence[int], **options: Any
    ) -> None:
        self._rounds = "quantization" in options
        with tempfile.TemporaryDirectory() as name:
            digest = {"checkpoint_sha256": write_base(policy, Path(name))}
            super().__init__(
                replace(policy, folder=Path(name), facts=policy.facts | digest),
                max_positions=point.prompt_tokens + point.new_tokens,
                memory_share=_MEMORY_SHARE,
                max_num_seqs=max(batches),
                compilation_config={"cudagraph_capture_sizes": sorted(batches)},
                hf_overrides={},
                enable_prefix_caching=False,
                **options,
            )
        decoder: Any = policy.decoder
        sampling = SamplingConfig(max_new_tokens=point.new_tokens)
        for batch in sorted(batches):
            prompts = random_prompts(batch, point.prompt_tokens, decoder.config.vocab_size, 0)
            if batch == min(batches):
                super().sample(prompts, sampling, group_size=1, seeds=range(batch))
            self.sample(prompts, sampling)
        graphs = self.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
        self.receipt |= {"graphs": str(graphs), **self.llm.apply_model(_layers)[0]}

    def sample(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, **of_rows: Any
    ) -> Any:
        """Return vLLM's own completions, of `max_new_tokens` tokens each."""
        asked = self._parameters(sampling, [None] * len(prompts), logprobs=None)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(requests, asked, lora_request=self.adapter, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    def _compare(self, *of_rollout: Any) -> Tensor:
        """Require that vLLM serves the policy's base, and its adapter."""
        both, model = super()._compare(*of_rollout), cast(Any, self.policy.model)
        with model.disable_adapter() if self.policy.training == "lora" else nullcontext():
            bare = self._logprobs(*of_rollout)
        nats, without = (float(pair.diff(dim=0).abs().mean()) for pair in (both, bare))
        r = float(torch.corrcoef(both)[0, 1])
        # By rounding it is hundredths, of other weights more than 1. Rounding activations to 8
        # bits, too, moves random weights by tenths: what comes of them still correlates.
        alike = r >= 0.5 if self._rounds else nats <= 0.5
        told = f"vLLM is {nats:.3g} nats from the policy and correlates by {r:.2f}; rounding gives "
        require(alike, f"{told}at most 0.5 nats, rounding to FP8 a correlation of 0.5 or more")
        if self.policy.training == "lora":
            told = f"vLLM is {nats:.3g} nats from the policy, {without:.3g} without the adapter; it"
            require(nats < without, f"{told} must be nearer with it")
        self.receipt |= {"correlation": r, "abs_diff_mean_without_adapter": without}
        return both

    close = VllmSampler.__exit__


def _layers(model: nn.Module) -> dict[str, Any]:
    """Count the layers of vLLM's model by what carries them out, and those with an adapter."""
    kernels, adapted = Counter[str](), 0
    for module in model.modules():
        scheme = getattr(module, "scheme", None)
        carries = (getattr(module, "quant_method", None), scheme, getattr(scheme, "kernel", None))
        names = [type(part).__name__ for part in carries if part is not None]
        backend: Any = getattr(module, "attn_backend", None)
        if backend is not None:
            names.append(backend.get_name())
        kernels[" ".join(names)] += bool(names)
        adapted += any(bool(part.any()) for part in getattr(module, "lora_b_stacked", ()))
    return {"kernels": dict(+kernels), "adapted_layers": adapted}
