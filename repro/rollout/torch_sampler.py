"""The sampler on the policy's own tensors, in plain torch: the one for CPUs and small policies.

It reads the policy that is being trained, adapters merged into dense float32 matrices once per step
(`refresh`), so there is no second copy of a checkpoint to fall out of step. Each prompt is run
forward once and its cache copied for the G completions of its group; all rows decode together;
finished rows leave the batch, and the rollout ends with the last one.

Merging is done in float32 and the trainer computes base and adapter apart, so the two differ by
rounding: about 1e-6 in a log-probability at these sizes. Every record measures it.

Easy to get wrong: forgetting `refresh` after an optimiser step (the rollout then lags a step
behind, which no shape check shows), and letting the choice of one row depend on another's, which a
shared generator does as soon as rows finish at different times. Here a row draws from its own seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from repro.models.policy import Policy
from repro.models.policy_weights import policy_weights
from repro.rollout.decode import Cache, LeanDecoder
from repro.rollout.draw import draw, draw_exploring, uniforms
from repro.rollout.sampler import Completion, RolloutBatch, Sampler, check_request
from repro.spec.arm import Arm, Exploration
from repro.spec.config import SamplingConfig

# Finished rows are dropped once they are this share of the batch: dropping copies the cache.
_COMPACT_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Decoded:
    """What a rollout wrote, B rows of at most T tokens, on the device; undefined past a row's end.

    Attributes
    ----------
    tokens, logprobs : Tensor, (B, T), int64 and float32
    lengths, explored, changed : Tensor, (B,), int64
        The last two as of `Completion`.
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    explored: Tensor
    changed: Tensor


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
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.end_token_ids = end_token_ids(policy)
        self._decoder: LeanDecoder | None = None

    def refresh(self) -> None:
        """Take up the policy's weights as they are now, at the next rollout."""
        self._decoder = None

    @torch.no_grad()
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
        width = max(map(len, prompts))
        decoder = self._ready(width + sampling.max_new_tokens)
        # The last token is never fed back, so it needs no column.
        logits, cache = decoder.prefill(prompts, sampling.max_new_tokens - 1)
        if not bool(torch.isfinite(logits).all()):
            row = int((~torch.isfinite(logits)).any(dim=1).nonzero()[0])
            last = torch.tensor([prompt[-1] for prompt in prompts], device=logits.device)
            fault = decoder.name_fault(last, width - 1, cache)
            raise FloatingPointError(
                f"logits after prompt {row} are not finite; the first such output is {fault}'s"
            )
        rows = torch.arange(len(prompts), device=logits.device).repeat_interleave(group_size)
        numbers = uniforms(seeds, sampling.max_new_tokens).to(logits.device)
        decoded = self._decode(
            decoder, logits[rows], cache.select(rows), width, numbers, sampling, exploration
        )
        return RolloutBatch(
            prompt_ids=[tuple(prompt) for prompt in prompts],
            completions=self._completions(decoded),
            group_size=group_size,
        )

    def _ready(self, positions: int) -> LeanDecoder:
        decoder = self._decoder
        if decoder is None or len(decoder.cos) < positions:
            # Rotary tables are grown in powers of two, so that they are not rebuilt each time.
            size = 1 << (positions - 1).bit_length()
            decoder = LeanDecoder(policy_weights(self.policy, torch.float32), size)
            self._decoder = decoder
        decoder.read_gains()
        return decoder

    def _decode(
        self,
        decoder: LeanDecoder,
        logits: Tensor,
        cache: Cache,
        width: int,
        numbers: Tensor,
        sampling: SamplingConfig,
        exploration: Exploration | None,
    ) -> _Decoded:
        """Decode until all rows are done."""
        device = logits.device
        B, T = numbers.shape
        tokens = torch.zeros(B, T, dtype=torch.long, device=device)
        logprobs = torch.zeros(B, T, dtype=torch.float32, device=device)
        lengths = torch.full((B,), T, dtype=torch.long, device=device)
        explored, changed = torch.zeros_like(lengths), torch.zeros_like(lengths)
        opening = 0 if exploration is None else exploration.tokens_of(T)
        ends = torch.tensor(sorted(self.end_token_ids), dtype=torch.long, device=device)
        rows = torch.arange(B, device=device)
        done = torch.zeros(B, dtype=torch.bool, device=device)
        for position in range(T):
            if exploration is not None and position < opening:
                heat = torch.full(rows.shape, exploration.temperature, device=device)
                chosen, logprob, moved = draw_exploring(
                    logits, numbers[rows, position], sampling, heat
                )
                explored[rows] += ~done
                changed[rows] += moved & ~done
            else:
                chosen, logprob = draw(logits, numbers[rows, position], sampling)
            # Rows that have ended but not yet left write past their end, where nobody reads.
            tokens[rows, position] = chosen
            logprobs[rows, position] = logprob
            ending = torch.isin(chosen, ends) & ~done
            lengths[rows[ending]] = position + 1
            done |= ending
            finished = int(done.sum())
            if finished == len(rows) or position + 1 == T:
                break
            if finished >= _COMPACT_SHARE * len(rows):
                unfinished = (~done).nonzero().squeeze(1)
                rows, chosen, cache = rows[unfinished], chosen[unfinished], cache.select(unfinished)
                done = torch.zeros(len(rows), dtype=torch.bool, device=device)
            logits = decoder.step(chosen, width + position, cache)
            if not bool(torch.isfinite(logits).all()):
                fault = decoder.name_fault(chosen, width + position, cache)
                raise FloatingPointError(
                    f"logits after new token {position} are not finite; "
                    f"the first such output is {fault}'s"
                )
        return _Decoded(
            tokens=tokens, logprobs=logprobs, lengths=lengths, explored=explored, changed=changed
        )

    def _completions(self, decoded: _Decoded) -> list[Completion]:
        completions = []
        columns = (
            decoded.tokens, decoded.logprobs, decoded.lengths, decoded.explored, decoded.changed,
        )  # fmt: skip
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for row_tokens, row_logprobs, length, explored, changed in rows:
            stopped = row_tokens[length - 1] in self.end_token_ids
            completions.append(
                Completion(
                    token_ids=tuple(row_tokens[:length]),
                    sampled_logprobs=tuple(row_logprobs[:length]),
                    finish_reason="stop" if stopped else "length",
                    explored=explored,
                    changed=changed,
                )
            )
        return completions


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
            "needs TorchSampler (a CPU, or float32), or to be trained together with others (the "
            "proxy tier)"
        )
    return sampler


def end_token_ids(policy: Policy) -> frozenset[int]:
    """Return the tokens that end a completion: of the config, generation config and tokenizer."""
    decoder: Any = policy.decoder
    end_ids: set[int] = set()
    sources = (
        decoder.config,
        getattr(decoder, "generation_config", None),
        policy.tokenizer,
    )
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            end_ids.update([ids] if isinstance(ids, int) else ids)
    return frozenset(end_ids)
