"""The sampler on the policy's own tensors, in plain torch: the one for CPUs and small policies.

It reads the policy that is being trained, adapters merged into dense float32 matrices once per step
(`refresh`), so there is no second copy of a checkpoint to fall out of step.

Merging is done in float32 and the trainer computes base and adapter apart, so the two differ by
rounding: about 1e-6 in a log-probability at these sizes. Every record measures it.

Easy to get wrong: forgetting `refresh` after an optimiser step (the rollout then lags a step
behind, which no shape check shows), and merging the noise that lies on the norms at that time:
added noise comes and goes between two refreshes, so it is read at each rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from repro.models.policy import Policy, end_token_ids
from repro.models.policy_weights import PolicyWeights, policy_weights
from repro.rollout.draw import uniforms
from repro.rollout.sampler import Completion, FinishReason, RolloutBatch, check_request
from repro.rollout.torch_decoding import Buffers, Decoder
from repro.spec.config import SamplingConfig

# A rollout goes on with the rows that have not ended when those are so much of all.
_SHARE = 0.75
# cuDNN's attention, which torch would take first, makes a plan of 0.1 s for every new length.
_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Fused attention on a GPU wants rows of masks at multiples of 16 bytes.
_ALIGNED = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Drawn:
    """What all rows have drawn, wherever they stand in the buffers by now; (., N)."""

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor

    def note(self, buffers: Buffers, rows: Tensor) -> None:
        """Copy the results of the rows (N',) int64 that the buffers hold."""
        for name in ("tokens", "logprobs"):
            getattr(self, name).index_copy_(1, rows, getattr(buffers, name))
        self.lengths.index_copy_(0, rows, buffers.lengths)


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
        Called with the tokens drawn so far and the rows that still go on.
    """

    on_token: Callable[[int, int], None] | None = None

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.end_token_ids = end_token_ids(policy)
        self._weights: PolicyWeights | None = None

    def refresh(self) -> None:
        """Take up the policy's weights as they are now, at the next rollout."""
        self._weights = None

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
        if self._weights is None:
            self._weights = policy_weights(self.policy)
        positions = max(map(len, prompts)) + sampling.max_new_tokens
        decoder = Decoder(self._weights, positions, self.end_token_ids)
        with torch.inference_mode(), sdpa_kernel(_WITHOUT_PLANS):
            drawn, steps = self._decode(decoder, prompts, seeds, sampling, group_size)
        return RolloutBatch(
            prompt_ids=[tuple(prompt) for prompt in prompts],
            completions=self._completions(drawn, steps),
            group_size=group_size,
        )

    def _decode(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: SamplingConfig,
        group_size: int,
    ) -> tuple[_Drawn, int]:
        """Draw until every row has ended, in steps of the rows that have not; return the steps."""
        device = self.policy.device
        prompt_ids, padding = _padded(prompts, _ALIGNED if device.type == "cuda" else 1)
        width = prompt_ids.shape[1]
        numbers = uniforms(seeds, sampling.max_new_tokens).t()  # (T, N)
        buffers = decoder.begin(
            prompt_ids.to(device), padding.to(device), numbers.to(device), group_size
        )
        _require_finite(decoder, buffers, prompt_ids[:, -1].to(device), 0, width - 1)
        rows = torch.arange(len(seeds), device=device)  # (N,)
        drawn = _Drawn(
            tokens=torch.empty_like(buffers.tokens),
            logprobs=torch.empty_like(buffers.logprobs),
            lengths=torch.empty_like(buffers.lengths),
        )
        number = 0
        while number < sampling.max_new_tokens:
            going = (~buffers.done).nonzero().squeeze(1)  # (N',)
            if not len(going):
                break
            if len(going) <= _SHARE * len(rows):
                drawn.note(buffers, rows)
                buffers, rows = buffers.take(going), rows[going]
            # The last tokens are run forward now, when rows that ended with them have gone.
            if number:
                last, column = buffers.tokens[number - 1], width + number - 1
                decoder.forward(buffers, last, column)
                _require_finite(decoder, buffers, last, number, column)
                if self.on_token is not None:
                    self.on_token(number, len(going))
            decoder.draw(buffers, number, sampling)
            number += 1
        drawn.note(buffers, rows)
        return drawn, number

    def _completions(self, drawn: _Drawn, steps: int) -> list[Completion]:
        """Return the rows' draws of so many steps."""
        columns = torch.arange(steps, device=drawn.lengths.device)  # (steps,)
        counting = columns < drawn.lengths.unsqueeze(1)  # (N, steps)
        # Counting tokens alone, all rows' one after another, and where each row's end
        tokens = drawn.tokens[:steps].t()[counting].tolist()
        logprobs = drawn.logprobs[:steps].t()[counting].tolist()
        completions, begin = [], 0
        for end in drawn.lengths.cumsum(0).tolist():
            own = tuple(tokens[begin:end])
            reason: FinishReason = "stop" if own[-1] in self.end_token_ids else "length"
            completions.append(
                Completion(
                    token_ids=own,
                    sampled_logprobs=tuple(logprobs[begin:end]),
                    finish_reason=reason,
                )
            )
            begin = end
        return completions


def _require_finite(
    decoder: Decoder, buffers: Buffers, tokens: Tensor, number: int, column: int
) -> None:
    """Raise `FloatingPointError` unless logits after the last tokens, (P,) or (N,), are finite.

    (P,) are the prompts'; `number` tokens were drawn, and the last stand in `column`.
    """
    # NaN goes through the maximum, and is not below infinity.
    if bool(buffers.logits.abs().amax() < torch.inf):
        return
    group = len(buffers.done) // len(tokens)
    row = int((~torch.isfinite(buffers.logits)).any(dim=1).nonzero()[0])
    place = f"new token {number - 1}" if number else f"prompt {row // group}"
    fault = decoder.fault(buffers, tokens.repeat_interleave(group), column)
    raise FloatingPointError(
        f"logits after {place} are not finite; the first such output is {fault}'s"
    )


def _padded(prompts: Sequence[Sequence[int]], multiple: int) -> tuple[Tensor, Tensor]:
    """Return prompts (P, width) padded on the left to a multiple, and the padding (P,), int64."""
    width = -(-max(map(len, prompts)) // multiple) * multiple
    prompt_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    for place, prompt in enumerate(prompts):
        prompt_ids[place, width - len(prompt) :] = torch.tensor(prompt)
    return prompt_ids, torch.tensor([width - len(prompt) for prompt in prompts])
