r"""Rewards to advantages: group-relative baselines, overlong shaping, dynamic sampling.

For the completions i of one prompt (a group), with rewards r_i::

    A_i = (r_i - mean(r)) / (std(r) + epsilon)      scale_by_std (GRPO, DAPO)
    A_i =  r_i - mean(r)                            otherwise (Dr. GRPO)

`std` has ddof = 1, as in the released code (torch's default). Easy mistakes:

* Dividing by the standard deviation re-weights prompts by difficulty. Under a 0/1 reward with solve
  rate p the implied weight is sqrt((G-1)/G) * E[sqrt(k/G (1-k/G))] / (p (1-p)), k ~ Bin(G, p):
  1.74 at p = .5 and 2.41 at p = .02 for G = 8. Without it the weight is (G-1)/G everywhere.
* A group of equal rewards must give *exactly* zero. The mean of eight 0.2's is not 0.2 in floating
  point, and dividing 1e-17 by 1e-17 + epsilon is a gradient made of rounding.
* `reshape(-1, G)` pairs the wrong completions once anything has been filtered. Groups are named.
* A reward that could not be computed is not a zero: such a completion leaves its group's statistics
  and takes no part in the loss.

Sources: arXiv 2510.11696 Eq. 3; DAPO (arXiv 2503.14476) for shaping and dynamic sampling; Dr. GRPO
(arXiv 2503.20783) for the re-weighting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.distributed import BatchError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """Advantages of B rows and what is worth logging about their groups.

    Attributes
    ----------
    values
        (B,) float64; exactly 0 for rows without a reward and for groups of equal rewards.
    scored
        (B,) bool; False where the reward could not be computed.
    groups, zero_variance_groups
        Number of groups, and of those whose scored rewards are all equal (or fewer than two).
    """

    values: Tensor
    scored: Tensor
    groups: int
    zero_variance_groups: int


def group_advantages(
    rewards: Sequence[float | None],
    group_ids: Sequence[int] | Tensor,
    *,
    scale_by_std: bool,
    epsilon: float,
) -> Advantages:
    """Subtract the group's mean from rewards and optionally divide by its standard deviation.

    Raises `ValueError` when a reward is not finite.

    Of B rewards those that could not be computed are None. Rows of equal id, `group_ids` (B,) int,
    form a group, in any order.
    """
    ids = torch.as_tensor(group_ids, dtype=torch.long)
    scored = torch.tensor([reward is not None for reward in rewards], dtype=torch.bool)
    values = torch.tensor([0.0 if r is None else r for r in rewards], dtype=torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise BatchError("a reward is not finite; mark what could not be computed with None")
    _, group = torch.unique(ids, return_inverse=True)
    groups = int(group.max()) + 1 if len(rewards) else 0

    count = torch.bincount(group[scored], minlength=groups).to(torch.float64)
    total = torch.zeros(groups, dtype=torch.float64).index_add_(0, group[scored], values[scored])
    mean = total / count.clamp(min=1)
    centred = torch.where(scored, values - mean[group], 0.0)
    if scale_by_std:
        squares = torch.zeros(groups, dtype=torch.float64).index_add_(0, group, centred**2)
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (std[group] + epsilon)

    constant = _constant_groups(values[scored], group[scored], groups)
    return Advantages(
        values=torch.where(constant[group], 0.0, centred),
        scored=scored,
        groups=groups,
        zero_variance_groups=int(constant.sum()),
    )


def _constant_groups(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return (groups,) bool: True where the group's values are all equal, or absent."""
    low = torch.full((groups,), torch.inf, dtype=torch.float64)
    high = torch.full((groups,), -torch.inf, dtype=torch.float64)
    low.scatter_reduce_(0, group, values, "amin")
    high.scatter_reduce_(0, group, values, "amax")
    return low >= high


def overlong_penalty(length: int, *, max_new_tokens: int, buffer: float) -> float:
    """Return DAPO's soft length penalty, in [-1, 0], to add to a completion's reward.

    The length is in tokens, the end token included. Over the fraction `buffer` of the limit the
    penalty grows from 0 to -1; 0 switches it off.
    """
    if buffer == 0:
        return 0.0
    span = buffer * max_new_tokens
    return -min(max((length - (max_new_tokens - span)) / span, 0.0), 1.0)
