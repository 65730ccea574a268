"""One step of generation: attention over a paged key-value cache, and the draw of a token.

Attention. The cache is an array of blocks of `block_size` positions; row b's position t lies in
block `block_table[b, t // block_size]` at offset `t % block_size`. Scores, softmax and the
weighted sum are float32. Query head h reads key head h // (Hq / Hkv).

Sampling. The distribution that a token is drawn from is built in this order (vLLM's):

    1. p = softmax(logits / temperature)
    2. min_p: drop tokens with p < min_p * max(p)
    3. top_k: keep the k most likely (ties with the k-th stay)
    4. top_p: of those, renormalised and sorted by falling p, keep the shortest head whose sum
       reaches top_p; at least one token stays
    5. renormalise

and the token is the first one, in vocabulary order, at which the cumulative sum exceeds the
row's uniform number. So the token is a function of one number and of that row's logits, and does
not depend on the batch. The logprob returned is that of the distribution drawn from, after step
5; policy gradients need it, and it differs from the policy's own logprob whenever steps 2 to 4
drop anything.
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
    scale: float | None = None,
) -> Tensor:
    """Attend from one new position a row to everything cached for that row.

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
        Factor on the scores; None is 1 / sqrt(D).

    Returns
    -------
    Tensor, (B, Hq, D), the type of q

    Raises
    ------
    ValueError
        When the heads do not divide or a length exceeds the block table.
    """
    B, Hq, D = q.shape
    num_blocks, block_size, Hkv, _ = key_cache.shape
    positions = block_table.shape[1] * block_size
    if Hq % Hkv:
        raise ValueError(f"q has {Hq} heads; it must be a multiple of the cache's {Hkv}")
    if B and int(lengths.max()) > positions:
        raise ValueError(f"a length is {int(lengths.max())}; the block table holds {positions}")
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    blocks = block_table.long().clamp(0, num_blocks - 1)
    cached = torch.arange(positions, device=q.device) < lengths.unsqueeze(1)  # (B, S)
    missing = ~cached.view(B, 1, 1, positions)
    # (B, blocks, block_size, Hkv, D) -> (B, S, Hkv, D)
    keys = key_cache[blocks].view(B, positions, Hkv, D).float()
    values = value_cache[blocks].view(B, positions, Hkv, D).float()
    # Memory past a row's end may hold NaN, and NaN times a weight of zero is NaN.
    values = values.masked_fill(~cached.view(B, positions, 1, 1), 0.0)
    heads = q.float().view(B, Hkv, Hq // Hkv, D) * scale  # g: key heads, r: query heads of each
    scores = torch.einsum("bgrd,bsgd->bgrs", heads, keys).masked_fill(missing, -math.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(missing, 0.0)
    return torch.einsum("bgrs,bsgd->bgrd", weights, values).reshape(B, Hq, D).to(q.dtype)


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at a given uniform number.

    Parameters
    ----------
    logits : Tensor, (B, V), floating
        -inf forbids a token.
    uniforms : Tensor, (B,), floating
        In [0, 1).
    temperature
        0 takes the most likely token (the first of equals), with logprob 0.
    top_k, top_p, min_p
        0, 1.0 and 0.0 switch each off.

    Returns
    -------
    ids : Tensor, (B,), int64
    logprobs : Tensor, (B,), float32
        Of the drawn token under the distribution drawn from.

    Raises
    ------
    ValueError
        When a setting is out of its range, the shapes differ, or a row has NaN, +inf or no
        allowed token.
    """
    if logits.dim() != 2 or uniforms.shape != logits.shape[:1]:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, uniforms {tuple(uniforms.shape)}; "
            "they must be (B, V) and (B,)"
        )
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1 or not 0 <= min_p <= 1:
        raise ValueError(
            f"temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p {min_p}; needed are "
            "temperature >= 0, top_k >= 0, 0 < top_p <= 1 and 0 <= min_p <= 1"
        )
    if temperature == 0:
        ids = logits.argmax(dim=-1)
        return ids, torch.zeros(len(ids), dtype=torch.float32, device=logits.device)
    best = logits.amax(dim=-1)
    if not bool(torch.isfinite(best).all()):
        row = int((~torch.isfinite(best)).nonzero()[0])
        raise ValueError(f"logits row {row} has maximum {float(best[row])}; it must be finite")
    z = _filtered(logits.float() / temperature, top_k, top_p, min_p)
    logprobs = torch.log_softmax(z, dim=-1)
    # float64: a float32 running sum over 150 000 tokens is off by more than rare tokens weigh.
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    threshold = uniforms.double().unsqueeze(1) * cumulative[:, -1:]  # (B, 1)
    ids = torch.searchsorted(cumulative, threshold, right=True)
    # Only a uniform of 1 passes the end; it gets the last token that has any probability.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous(), right=False)
    ids = torch.minimum(ids, last)
    return ids.squeeze(1), logprobs.gather(1, ids).squeeze(1)


def _filtered(z: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Set the dropped tokens' scaled logits to -inf."""
    if min_p > 0:
        z = z.masked_fill(z < z.amax(-1, keepdim=True) + math.log(min_p), -math.inf)
    if 0 < top_k < z.shape[-1]:
        kth = z.topk(top_k, dim=-1).values[:, -1:]
        z = z.masked_fill(z < kth, -math.inf)
    if top_p < 1:
        order = z.sort(dim=-1, descending=True, stable=True)
        before = torch.softmax(order.values, dim=-1).double().cumsum(dim=-1)
        before = before.roll(1, dims=-1)
        before[:, 0] = 0.0
        # A token stays while the sum of the more likely ones has not reached top_p.
        dropped = torch.zeros_like(z, dtype=torch.bool).scatter_(1, order.indices, before >= top_p)
        z = z.masked_fill(dropped, -math.inf)
    return z
