"""Which pass gives a policy's log-probabilities: packed rows in 16 bits on a GPU, else the layouts.

Both give the same numbers up to rounding (`tests/repro/rl/test_packed.py`). Packed rows waste
nothing on padding and keep of a block what its device has room for; on a CPU the shared-prefix
layout is faster, and what was recorded there was recorded with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from repro.models.policy import Policy
from repro.rl.rows import Rows
from repro.rl.single_run.packed import packed_hidden, packed_logprobs
from repro.rl.single_run.padded import completion_logprobs, padded_hidden


def row_logprobs(
    policy: Policy, rows: Rows, temperature: float, *, kept_blocks: int | None = 0
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies, (B, T) float32, by the pass for the policy's device.

    Parameters
    ----------
    kept_blocks
        Of how many blocks packed rows keep the activations for backward, None being all; the
        layouts keep all.

    Raises
    ------
    ValueError
        When the temperature is not positive, or there are no rows.
    """
    if _packs(policy):
        return packed_logprobs(policy, rows, temperature, kept_blocks=kept_blocks)
    return completion_logprobs(policy, rows, temperature)


def row_hidden(policy: Policy, rows: Rows) -> Tensor:
    """Return the hidden states that predict each counting token, (tokens, H), row by row."""
    return packed_hidden(policy, rows) if _packs(policy) else padded_hidden(policy, rows)


def _packs(policy: Policy) -> bool:
    return policy.device.type == "cuda" and policy.compute_dtype != torch.float32
