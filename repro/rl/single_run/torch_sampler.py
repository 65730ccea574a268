"""The sampler on the policy's own tensors, in plain torch: the one for CPUs and small policies.

It is the stacked sampler with a stack of one. It reads the policy that is being trained, adapters
merged into dense float32 matrices once per step (`refresh`), so there is no second copy of a
checkpoint to fall out of step.

Merging is done in float32 and the trainer computes base and adapter apart, so the two differ by
rounding: about 1e-6 in a log-probability at these sizes. Every record measures it.

Easy to get wrong: forgetting `refresh` after an optimiser step (the rollout then lags a step
behind, which no shape check shows), and merging the noise that lies on the norms at that time:
added noise comes and goes between two refreshes, so it is read at each rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from repro.models.norms import block_norms, final_norm
from repro.models.policy import Policy, end_token_ids
from repro.rl.stacked.stack import Stack, merged_stack
from repro.rl.stacked.stacked_sampler import SampleRequest, StackedSampler
from repro.rollout.sampler import RolloutBatch, check_request
from repro.spec.config import SamplingConfig


class TorchSampler:
    """Samples from a policy on the policy's device.

    Parameters
    ----------
    policy
        Its weights are taken at the first rollout, and again after each `refresh`. Noise on its
        norms is honoured as it stands at each rollout.

    Attributes
    ----------
    on_token
        See `StackedSampler`.
    """

    on_token: Callable[[int, int], None] | None = None

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.end_token_ids = end_token_ids(policy)
        self._stack: Stack | None = None

    def refresh(self) -> None:
        """Take up the policy's weights as they are now, at the next rollout."""
        self._stack = None

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        group_size: int,
        seeds: Sequence[int],
    ) -> RolloutBatch:
        """Sample `group_size` completions of each prompt; see `Sampler.sample`.

        Raises
        ------
        ValueError
            When a prompt is empty, too long or holds an unknown token, or counts do not match.
        FloatingPointError
            When logits are not finite, naming the token and the layer.
        """
        config: Any = self.policy.decoder.config
        check_request(
            prompts,
            group_size=group_size,
            seeds=seeds,
            max_new_tokens=sampling.max_new_tokens,
            max_positions=config.max_position_embeddings,
            vocab_size=config.vocab_size,
        )
        if self._stack is None:
            self._stack = merged_stack(self.policy, end_token_ids=self.end_token_ids)
        positions = max(map(len, prompts)) + sampling.max_new_tokens
        sampler = StackedSampler(self._stack, positions, watched=True)
        sampler.refresh(_noise_on(self.policy))
        sampler.on_token = self.on_token
        request = SampleRequest(prompts=prompts, seeds=seeds)
        (batch,) = sampler.sample([request], sampling, group_size=group_size)
        assert batch is not None
        return batch


def _noise_on(policy: Policy) -> Tensor | None:
    """Return the noise on a policy's norms as `Stack.weights` takes it."""
    norms = [*block_norms(policy.decoder).values(), final_norm(policy.decoder)]
    if all(norm.noise is None for norm in norms):
        return None
    vectors = [
        torch.zeros_like(norm.gain()) if norm.noise is None else norm.noise for norm in norms
    ]
    return torch.stack(vectors).unsqueeze(0)  # (1, 2 L + 1, H)
