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
from repro.rl.noise import names_of_draws
from repro.rl.stacked.sampler import SampleRequest, StackSampler
from repro.rl.stacked.stack import Stack, merged_stack
from repro.rollout.sampler import RolloutBatch, Sampler, check_request
from repro.spec.arm import Arm, Exploration, NoiseSharing
from repro.spec.config import SamplingConfig


class TorchSampler:
    """Samples from a policy on the device where it lies.

    Parameters
    ----------
    policy
        Its weights are taken at the first rollout, and again after each `refresh`. Noise on its
        norms is honoured as it stands at each rollout.

    Attributes
    ----------
    end_token_ids
        Tokens that end a completion: the model's and the tokenizer's.
    on_token
        See `StackSampler`.
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
        exploration: Exploration | None = None,
    ) -> RolloutBatch:
        """Sample `group_size` completions of each prompt; see `Sampler.sample`.

        Parameters
        ----------
        exploration
            Draws at another temperature than the policy's, of which the log-probabilities stay.

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
        noise, sharing = _noise_on(self.policy)
        positions = max(map(len, prompts)) + sampling.max_new_tokens
        sampler = StackSampler(self._stack, positions, sharing, watched=True)
        sampler.refresh(noise)
        sampler.on_token = self.on_token
        request = SampleRequest(prompts=prompts, seeds=seeds, exploration=exploration)
        (batch,) = sampler.sample([request], sampling, group_size=group_size)
        assert batch is not None
        return batch


def _noise_on(policy: Policy) -> tuple[Tensor | None, NoiseSharing]:
    """Return the noise on a policy's norms as `Stack.weights` takes it, and who shares it."""
    norms = block_norms(policy.decoder) | {"model.norm": final_norm(policy.decoder)}
    carried = [norm.noise for norm in norms.values() if norm.noise is not None]
    sharing: NoiseSharing = "projection" if any(n.dim() == 2 for n in carried) else "norm"
    if not carried:
        return None, sharing
    vectors = [
        torch.zeros_like(norm.gain()) if norm.noise is None else norm.noise
        for norm in norms.values()
    ]
    counts = [len(names_of_draws(name, sharing)) for name in norms]
    # (H,) or (J, H) -> (J, H) each
    parts = [one.expand(count, -1) for one, count in zip(vectors, counts, strict=True)]
    return torch.cat(parts).unsqueeze(0), sharing  # (1, sum of J, H)


class ExploringSampler:
    """A plain sampler whose rollouts explore: `Sampler` with a run's `Exploration` in it.

    The sampler itself stays as it is, so that whoever evaluates with it does not explore.
    """

    def __init__(self, sampler: TorchSampler, exploration: Exploration) -> None:
        self.sampler, self.exploration = sampler, exploration

    def refresh(self) -> None:
        """See `TorchSampler.refresh`."""
        self.sampler.refresh()

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        group_size: int,
        seeds: Sequence[int],
    ) -> RolloutBatch:
        """Sample as `TorchSampler.sample` does under the exploration."""
        return self.sampler.sample(
            prompts, sampling, group_size=group_size, seeds=seeds, exploration=self.exploration
        )


def sampler_of_rollouts(sampler: Sampler, arm: Arm) -> Sampler:
    """Return the sampler of an arm's rollouts: `sampler`, or one that explores by its means.

    Raises
    ------
    ValueError
        When the arm explores, or has noise that projections do not share, and the sampler draws at
        one temperature and reads one gain per norm.
    """
    if isinstance(sampler, TorchSampler):
        if arm.exploration is None:
            return sampler
        return ExploringSampler(sampler, arm.exploration)
    lacking = []
    if arm.exploration is not None:
        lacking.append(f"explores at {arm.exploration.temperature:g} times the temperature")
    if arm.noise is not None and arm.noise.sharing != "norm":
        lacking.append(f"has noise per {arm.noise.sharing}")
    if lacking:
        raise ValueError(
            f"arm {arm.name} {' and '.join(lacking)}, which {type(sampler).__name__} cannot do; it "
            "needs TorchSampler (a CPU, or float32), or to be trained together with others "
            "(--set together=true)"
        )
    return sampler
