"""One step of generation: attention over a paged key-value cache, and the draw of a token.

Attention. The cache is an array of blocks of `block_size` positions; row b's position t lies in
block `block_table[b, t // block_size]` at offset `t % block_size`. Scores, softmax and the
weighted sum are float32. Query head h reads key head h // (Hq / Hkv).

Sampling. The distribution is p = softmax(logits / temperature), and the token is the first one, in
vocabulary order, at which the cumulative sum exceeds the row's uniform number. So the token is a
function of one number and of that row's logits, and does not depend on the batch. Filters (min_p,
top_k, top_p) come before the inversion and are `repro.rollout.draw`'s.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def decode_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
) -> Tensor:
    """Attend from one new position per row to everything cached for that row.

    Parameters
    ----------
    q : Tensor, (B, Hq, D), floating
    key_cache, value_cache : Tensor, (num_blocks, block_size, Hkv, D)
    block_table : Tensor, (B, max_blocks), integer
        Block numbers of each row; entries past a row's length are never read as data, whatever
        they hold.
    lengths : Tensor, (B,), integer
        Positions cached for each row, the new one included. 0 gives a row of zeros.
    scale
        Factor on the scores.

    Returns
    -------
    Tensor, (B, Hq, D), the type of q
    """
    B, Hq, D = q.shape
    num_blocks, block_size, Hkv, _ = key_cache.shape
    positions = block_table.shape[1] * block_size
    blocks = block_table.long().clamp(0, num_blocks - 1)
    cached = torch.arange(positions, device=q.device) < lengths.unsqueeze(1)  # (B, S)
    missing = ~cached.view(B, 1, 1, positions)  # (B, 1, 1, S)
    # (B, blocks, block_size, Hkv, D) -> (B, S, Hkv, D)
    keys = key_cache[blocks].view(B, positions, Hkv, D).float()
    values = value_cache[blocks].view(B, positions, Hkv, D).float()
    # Memory past a row's end may hold NaN, and NaN times a weight of zero is NaN.
    values = values.masked_fill(~cached.view(B, positions, 1, 1), 0.0)
    # g: key heads, r: query heads of each
    heads = q.float().view(B, Hkv, Hq // Hkv, D) * scale  # (B, Hkv, Hq / Hkv, D)
    scores = torch.einsum("bgrd,bsgd->bgrs", heads, keys).masked_fill(missing, -math.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(missing, 0.0)
    # (B, Hkv, Hq / Hkv, D) -> (B, Hq, D)
    return torch.einsum("bgrs,bsgd->bgrd", weights, values).reshape(B, Hq, D).to(q.dtype)


def sample_tokens(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at a given uniform number.

    Parameters
    ----------
    logits : Tensor, (B, V), floating
        -inf forbids a token; a row's largest is finite.
    uniforms : Tensor, (B,), floating
        In [0, 1).
    temperature
        0 takes the most likely token (the first of equals), with logprob 0.

    Returns
    -------
    ids : Tensor, (B,), int64
    logprobs : Tensor, (B,), float32
        Of the drawn token under the distribution drawn from.
    """
    if temperature == 0:
        ids = logits.argmax(dim=-1)  # (B,)
        return ids, torch.zeros(len(ids), dtype=torch.float32, device=logits.device)
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    ids = invert(logprobs, uniforms)  # (B, 1)
    return ids.squeeze(1), logprobs.gather(1, ids).squeeze(1)  # (B,) each


def invert(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token of each row at which the cumulative probability exceeds its number.

    Neither waits for the device nor branches on values, so it can be captured.

    Parameters
    ----------
    logprobs : Tensor, (B, V), float32
        -inf where a token has no probability.
    uniforms : Tensor, (B,), floating
        In [0, 1).

    Returns
    -------
    Tensor, (B, 1), int64
    """
    # float64: a float32 running sum over 150 000 tokens is off by more than rare tokens weigh.
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    threshold = uniforms.double().unsqueeze(1) * cumulative[:, -1:]  # (B, 1)
    return torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logprobs.shape[-1] - 1)
