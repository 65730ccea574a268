"""The protocol of samplers, and the values that they return.

A sampler turns P prompts into B = P * G completions, row `p * G + g` being completion g of prompt
p. Each row has its own seed, and its tokens depend only on that seed, its prompt and the policy:
not on the other rows or their order. So arms with the same seeds have common random numbers.

`sampled_logprobs` are those of the *behaviour policy*: the distribution that the token was drawn
from, after temperature and filters. They are the denominator of an importance ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from repro.distributed import Ranks
from repro.models.policy import Policy
from repro.spec.checks import require
from repro.spec.config import SamplingConfig

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled continuation of a prompt, with the end token if it reached one.

    There is a log-probability per token, nats, computed in float32. Under greedy sampling the
    distribution is a single point and each is 0. `finish_reason` is `stop` at an end token,
    `length` at the limit (truncated).
    """

    token_ids: tuple[int, ...]
    sampled_logprobs: tuple[float, ...]
    finish_reason: FinishReason


class Sampler(Protocol):
    """A source of completions from a policy."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        group_size: int,
        seeds: Sequence[int],
    ) -> list[Completion]:
        """Return G = `group_size` completions of each of P prompts of token ids, prompt-major.

        `seeds` are P * G numbers in [0, 2**63), prompt-major.

        Raises `ValueError` for a request that cannot be served (`check_request`);
        `FloatingPointError` where logits that are not finite are seen.
        """
        ...

    def refresh(self) -> None:
        """Read the policy's current weights, after an optimiser step."""
        ...


def check_request(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    group_size: int,
    seeds: Sequence[int],
    max_positions: int,
) -> None:
    """Raise `ValueError`, naming the prompt, where a request cannot be served."""
    decoder: Any = policy.decoder
    vocabulary = decoder.config.vocab_size
    require(bool(prompts), "there are no prompts; sampling needs at least one")
    require(group_size >= 1, f"group_size is {group_size}; it must be 1 or more")
    require(
        len(seeds) == len(prompts) * group_size,
        f"{len(seeds)} seeds for {len(prompts)} prompts in groups of {group_size}; "
        f"{len(prompts) * group_size} are needed",
    )
    for index, prompt in enumerate(prompts):
        require(len(prompt) > 0, f"prompt {index} is empty; it needs at least one token")
        require(
            len(prompt) + sampling.max_new_tokens <= max_positions,
            f"prompt {index} has {len(prompt)} tokens; with {sampling.max_new_tokens} new ones it "
            f"exceeds the policy's {max_positions} positions",
        )
        require(
            min(prompt) >= 0 and max(prompt) < vocabulary,
            f"prompt {index} holds token {min(prompt) if min(prompt) < 0 else max(prompt)}; "
            f"the vocabulary has {vocabulary}",
        )


class SharedSampler:
    """A sampler whose prompts are divided among ranks; each rank returns all completions.

    Exact, since a row's tokens depend on its seed, its prompt and the policy alone.
    """

    def __init__(self, sampler: Sampler, ranks: Ranks) -> None:
        self.sampler, self.ranks = sampler, ranks

    def refresh(self) -> None:
        """See `Sampler.refresh`."""
        self.sampler.refresh()

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        group_size: int,
        **of_rows: Sequence[int],
    ) -> list[Completion]:
        """See `Sampler.sample`; `of_rows` are `seeds`, and what else has a value for each row."""
        own = self.ranks.mine([1] * len(prompts))
        rows = [p * group_size + g for p in own for g in range(group_size)]
        mine: dict[str, Any] = {
            name: [values[row] for row in rows] for name, values in of_rows.items()
        }
        completions: list[Completion] = []
        try:
            if own:
                asked = [prompts[p] for p in own]
                completions = self.sampler.sample(asked, sampling, group_size=group_size, **mine)
        except FloatingPointError as error:
            self.ranks.agree(str(error))  # raises
        self.ranks.agree(None)
        every: dict[int, Completion] = {}
        for part in self.ranks.objects(dict(zip(rows, completions, strict=True))):
            every |= part
        return [every[row] for row in range(len(prompts) * group_size)]


def shared(sampler: Sampler, ranks: Ranks) -> Sampler:
    """Return a sampler whose prompts are divided among ranks, where there are several."""
    return sampler if ranks.world == 1 else SharedSampler(sampler, ranks)
