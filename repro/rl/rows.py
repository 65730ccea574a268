"""Rows of a rollout as tensors: which prompt, which tokens, which of them count.

The completion mask is made from *lengths*, never from `ids != pad`: where the padding token is the
end token (Qwen among others) that comparison would take the end token's loss away. The end token
counts; nothing may follow it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    group_size: int,
    end_token_ids: Collection[int] = (),
) -> Rows:
    """Build rows from P * group_size completions in prompt-major order.

    Raises
    ------
    ValueError
        When counts do not match, a completion or prompt is empty, a log-probability is missing or
        not finite, or tokens follow an end token.
    """
    if len(completions) != len(prompts) * group_size:
        raise ValueError(
            f"{len(completions)} completions for {len(prompts)} prompts; "
            f"groups of {group_size} need {len(prompts) * group_size}"
        )
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty; it needs at least one token")
    lengths = [_checked_length(row, completion) for row, completion in enumerate(completions)]
    places = torch.arange(max(lengths, default=0))  # (T,)
    mask = places < torch.tensor(lengths, dtype=torch.long).unsqueeze(1)  # (B, T)
    # All rows' tokens, one row after another: so they stand in `mask`, too.
    tokens = torch.tensor([token for c in completions for token in c.token_ids], dtype=torch.long)
    sampled = torch.tensor(
        [value for c in completions for value in c.sampled_logprobs], dtype=torch.float32
    )
    token_ids = torch.zeros(mask.shape, dtype=torch.long).masked_scatter(mask, tokens)
    _require_end_last(token_ids, mask, end_token_ids)
    if not bool(torch.isfinite(sampled).all()):
        raise ValueError("a sampled log-probability is not finite; every sampled token needs one")
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


def _checked_length(row: int, completion: Completion) -> int:
    """Return the completion's length after checking that it is one."""
    length = len(completion.token_ids)
    if length == 0:
        raise ValueError(f"completion {row} is empty; it needs at least one token")
    if len(completion.sampled_logprobs) != length:
        raise ValueError(
            f"completion {row} has {length} tokens and {len(completion.sampled_logprobs)} "
            "log-probabilities; each token needs one"
        )
    return length


def _require_end_last(token_ids: Tensor, mask: Tensor, ends: Collection[int]) -> None:
    """Raise `ValueError` for the first row of (B, T) whose end token is not its last."""
    ending = torch.isin(token_ids, torch.tensor(sorted(ends), dtype=torch.long)) & mask
    early = (ending[:, :-1] & mask[:, 1:]).nonzero()  # rows and columns, in order
    if len(early):
        row, column = early[0].tolist()
        raise ValueError(
            f"completion {row}: {int(mask[row].sum()) - 1 - column} tokens follow end token "
            f"{int(token_ids[row, column])}; a completion stops there"
        )
