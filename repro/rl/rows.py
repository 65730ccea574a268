r"""Rows of a rollout as tensors: which tokens count, and what is logged of their distributions.

The completion mask is made from *lengths*, never from `ids != pad`: where the padding token is the
end token (Qwen among others) that comparison would take the end token's loss away.

The sampler's log-probabilities and the trainer's are of the same weights but not of the same
arithmetic, and under added noise not of the same weights either. With Delta = log pi_trainer - log
pi_sampler on sampled tokens::

    mean |Delta|, max |Delta|, mean exp|Delta|,    k3 = mean(e^Delta - 1 - Delta)

k3 estimates KL(sampler || trainer), is never negative, and needs no correction, since the tokens
were drawn from the sampler.

Entropy is the mean over counting tokens, in nats, over the whole vocabulary, at the sampling
temperature. A truncated completion is often a loop of near-certain tokens; truncated and finished
ones are kept apart, or a falling truncation rate looks like a change of entropy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from repro.distributed import BatchError

if TYPE_CHECKING:
    from repro.rollout.sampler import Completion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """B completions of P prompts.

    Attributes
    ----------
    prompts
        P sequences of token ids.
    prompt_of_row
        (B,) int64, index into `prompts`.
    token_ids
        (B, T) int64, right-padded with 0.
    mask
        (B, T) bool, True up to and including the end token.
    sampled_logprobs
        (B, T) float32, the behaviour policy's; 0 where the mask is False.
    truncated
        (B,) bool, True where the length limit was hit.
    """

    prompts: tuple[tuple[int, ...], ...]
    prompt_of_row: Tensor
    token_ids: Tensor
    mask: Tensor
    sampled_logprobs: Tensor
    truncated: Tensor

    def __len__(self) -> int:
        """Return B."""
        return self.token_ids.shape[0]

    def lengths(self) -> Tensor:
        """Return (B,) int64, the tokens of each completion."""
        return self.mask.sum(1)

    def packed_tokens(self) -> Tensor:
        """Return (B,) int64, the tokens of each row in a packed pass: prompt and completion.

        A completion's last token predicts nothing and is left out.
        """
        prompts = torch.tensor([len(prompt) for prompt in self.prompts], dtype=torch.long)
        return prompts[self.prompt_of_row] + self.lengths() - 1

    def select(self, index: Tensor) -> Rows:
        """Return the rows at `index`, (b,) int64, with the columns that they need."""
        mask = self.mask[index]
        width = int(mask.sum(1).max()) if len(index) else 0
        return Rows(
            prompts=self.prompts,
            prompt_of_row=self.prompt_of_row[index],
            token_ids=self.token_ids[index, :width],
            mask=mask[:, :width],
            sampled_logprobs=self.sampled_logprobs[index, :width],
            truncated=self.truncated[index],
        )


def make_rows(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], *, group_size: int
) -> Rows:
    """Build rows from P * group_size completions in prompt-major order.

    Raises `ValueError` when counts do not match, a completion or prompt is empty, or a
    log-probability is not finite.
    """
    if len(completions) != len(prompts) * group_size:
        raise ValueError(
            f"{len(completions)} completions for {len(prompts)} prompts; "
            f"groups of {group_size} need {len(prompts) * group_size}"
        )
    lengths = [len(completion.token_ids) for completion in completions]
    if not all((*lengths, *map(len, prompts))):
        raise ValueError("a prompt or a completion is empty; each needs at least one token")
    places = torch.arange(max(lengths, default=0))  # (T,)
    mask = places < torch.tensor(lengths, dtype=torch.long).unsqueeze(1)  # (B, T)
    # All rows' tokens, one row after another: so they stand in `mask`, too.
    tokens = torch.tensor([token for c in completions for token in c.token_ids], dtype=torch.long)
    sampled = torch.tensor(
        [value for c in completions for value in c.sampled_logprobs], dtype=torch.float32
    )
    token_ids = torch.zeros(mask.shape, dtype=torch.long).masked_scatter(mask, tokens)
    if not bool(torch.isfinite(sampled).all()):
        raise BatchError("a sampled log-probability is not finite; every sampled token needs one")
    return Rows(
        prompts=tuple(tuple(prompt) for prompt in prompts),
        prompt_of_row=torch.arange(len(prompts)).repeat_interleave(group_size),
        token_ids=token_ids,
        mask=mask,
        sampled_logprobs=torch.zeros(mask.shape).masked_scatter(mask, sampled),
        truncated=torch.tensor(
            [c.finish_reason == "length" for c in completions], dtype=torch.bool
        ),
    )


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """Return (B, T) with `values`, one per counting token in row-major order, and 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(
        mask, values
    )


def sampler_mismatch(trainer: Tensor, sampled: Tensor, mask: Tensor) -> dict[str, float | None]:
    """Compare log-probabilities of the same tokens; (B, T) each, on the CPU, mask bool.

    By names of series; see the module docstring. None where no row is compared.
    """
    names = ("kl", "abs_diff_mean", "abs_diff_max", "exp_abs_diff_mean")
    named = [f"sampler_trainer_{name}" for name in names]
    if not len(mask):
        return dict.fromkeys(named)
    difference = (trainer.double() - sampled.double())[mask]
    size = difference.abs()
    kl = (torch.expm1(difference) - difference).mean()
    found = (kl, size.mean(), size.max(), size.exp().mean())
    return dict(zip(named, map(float, found), strict=True))


def token_mean(values: Tensor, mask: Tensor) -> float | None:
    """Return the mean over True, or None where there is none."""
    return float(values[mask].double().mean()) if bool(mask.any()) else None


def entropies(entropy: Tensor, mask: Tensor, truncated: Tensor) -> dict[str, float | None]:
    """Return token-mean entropies of all, finished and truncated rows from (B, T) nats."""
    return {
        "entropy": token_mean(entropy, mask),
        "entropy_finished": token_mean(entropy, mask & ~truncated[:, None]),
        "entropy_truncated": token_mean(entropy, mask & truncated[:, None]),
    }


def mean_of(values: list[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None where there is none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
