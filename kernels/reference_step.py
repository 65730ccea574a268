"""The steps of generation in plain PyTorch: everything of a decode step and a prefill but products.

The specification of `kernels.triton.decode_step`, `decode_adapter`, `decode_choice`, `rotary` and
`prefill_attention`: the same names and signatures, on any device and in any floating type. The
engine without kernels (`repro.rollout.engine_ops.PLAIN`) computes with these very functions.

    add_norm           r <- r + update;   n = (gain + noise) * r / rms(r)
    attend_step        head norms, rotation, the write into the cache, attention from one new token
    rotary_write       rotation of many new tokens and the write into the cache
    prefill_attention  attention of many new tokens, each to all up to itself
    project            z = x A^T
    add_adapter        y <- y + scaling * z B^T, each projection by its own columns of z
    adapted_swiglu     silu(gate + scaling z1 B1^T) * (up + scaling z2 B2^T)
    choose             a token from each row's logits, and the row's state moved on
    decode_attention   attention of one new token per row to all that is cached for the row
    sample_tokens      a token per row, from its logits and one uniform number

The cache is an array of blocks of `block_size` positions; row b's position t lies in block
`block_table[b, t // block_size]` at offset `t % block_size`. Scores, softmax and the weighted sum
are float32. Query head h reads key head h // (Hq / Hkv).

A draw's distribution is p = softmax(logits / temperature), and the token is the first one, in
vocabulary order, at which the cumulative sum exceeds the row's uniform number. So the token is a
function of one number and of that row's logits, and does not depend on the batch. Filters (min_p,
top_k, top_p) come before the inversion and are `repro.rollout.draw`'s.

A position of -1 marks a row that does not run, a slot of -1 a token that is not kept: neither
changes anything. `overlap`, `workspace`, `arrived` and `tile` concern how kernels are launched and
mean nothing here.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional

from kernels import reference

# What the status of a row becomes: at an end token, at its limit, at logits that are not finite.
RUNNING, STOPPED, FULL, FAULTY = 0, 1, 2, 3


def add_norm(
    residual: Tensor,
    update: Tensor | None,
    gain: Tensor,
    noise: Tensor | None,
    eps: float,
    *,
    overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the residual stream with `update` added, and its norm, (M, H) both.

    Parameters
    ----------
    residual : Tensor, (M, H)
    update : Tensor or None, (M, H)
    gain : Tensor, (H,)
    noise : Tensor or None, (H,), float32
        Added to the gain.
    eps
        Added to the mean square.
    """
    stream = residual if update is None else residual + update
    return stream, reference.rms_norm(stream, gain, eps, noise).to(residual.dtype)


def swiglu(gate_up: Tensor, *, overlap: bool = False) -> Tensor:
    """Return silu(gate) * up, (M, I), of (M, 2 I)."""
    return reference.swiglu(gate_up)


def norm_heads(
    qkv: Tensor, query_heads: int, q_gain: Tensor | None, k_gain: Tensor | None, eps: float
) -> Tensor:
    """Return `qkv` with query and key heads normalised (Qwen3), or as it is where there is no gain.

    Parameters
    ----------
    qkv : Tensor, (M, (Hq + 2 Hkv) D)
    q_gain, k_gain : Tensor or None, (D,)
    """
    if q_gain is None or k_gain is None:
        return qkv
    heads = qkv.unflatten(1, (-1, len(q_gain)))  # (M, Hq + 2 Hkv, D)
    keys = (heads.shape[1] - query_heads) // 2
    q, k, v = heads.split([query_heads, keys, keys], dim=1)
    q = reference.rms_norm(q, q_gain, eps).to(qkv.dtype)
    k = reference.rms_norm(k, k_gain, eps).to(qkv.dtype)
    return torch.cat((q, k, v), dim=1).flatten(1)  # (M, (Hq + 2 Hkv) D)


def rotary_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    query_heads: int,
) -> Tensor:
    """Rotate queries and keys and write keys and values into the cache, in place.

    Parameters
    ----------
    qkv : Tensor, (M, (Hq + 2 Hkv) D)
    cos, sin : Tensor, (P, D)
        Tables by position, both halves filled.
    positions : Tensor, (M,), integer
    slots : Tensor, (M,), integer
        Where in the cache each token goes, counted in positions; -1 keeps nothing.
    key_cache, value_cache : Tensor, (blocks, block_size, Hkv, D)

    Returns
    -------
    Tensor, (M, Hq, D), the type of `qkv`
        Rotated queries.
    """
    keys, D = key_cache.shape[2:]
    heads = qkv.unflatten(1, (-1, D))  # (M, Hq + 2 Hkv, D)
    q, k, v = heads.split([query_heads, keys, keys], dim=1)
    at = positions.long()
    q, k = reference.rotary(q, k, cos[at], sin[at])
    written = slots >= 0
    where = slots[written].long()
    # By slot: (blocks * block_size, Hkv, D)
    key_cache.view(-1, keys, D)[where] = k[written].to(key_cache.dtype)
    value_cache.view(-1, keys, D)[where] = v[written].to(value_cache.dtype)
    return q


def attend_step(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    workspace: object = None,
    *,
    query_heads: int,
    scale: float,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 0.0,
    overlap: bool = False,
) -> Tensor:
    """Write one new token per row into the cache and attend from it to all of its row.

    Parameters
    ----------
    qkv : Tensor, (M, (Hq + 2 Hkv) D)
    cos, sin : Tensor, (P, D)
    positions : Tensor, (M,), int32
        -1 where no row runs.
    table : Tensor, (M, max_blocks), integer
    key_cache, value_cache : Tensor, (blocks, block_size, Hkv, D)
    scale
        Factor on the scores.
    q_gain, k_gain : Tensor or None, (D,)
        Head norms before the rotation.

    Returns
    -------
    Tensor, (M, Hq * D), the type of `qkv`
        Zeros where no row runs.
    """
    block_size = key_cache.shape[1]
    at = positions.clamp(min=0).long()
    blocks = table.gather(1, (at // block_size).unsqueeze(1)).squeeze(1).long()  # (M,)
    slots = torch.where(positions >= 0, blocks * block_size + at % block_size, -1)
    qkv = norm_heads(qkv, query_heads, q_gain, k_gain, eps)
    queries = rotary_write(
        qkv, cos, sin, at, slots, key_cache, value_cache, query_heads=query_heads
    )
    lengths = positions + 1
    # (M, Hq, D) -> (M, Hq D)
    return decode_attention(queries, key_cache, value_cache, table, lengths, scale).flatten(1)


def prefill_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,
    tiles: Tensor,
    scale: float,
    *,
    tile: int = 64,
) -> Tensor:
    """Attend from new tokens, each to its own sequence up to itself.

    Parameters
    ----------
    q : Tensor, (M, Hq, D)
        Rotated queries.
    key_cache, value_cache : Tensor, (blocks, block_size, Hkv, D)
        The new tokens' own included.
    table : Tensor, (rows, max_blocks), integer
    tiles : Tensor, (tiles, 4), integer
        Row of `table`, first token, tokens, and the first one's position. A row of -1 is padding.

    Returns
    -------
    Tensor, (M, Hq * D), the type of q
        Zeros for padding.
    """
    _, block_size, keys, D = key_cache.shape
    out = torch.zeros_like(q)
    repeats = q.shape[1] // keys
    for row, first, count, position in tiles.tolist():
        if row < 0:
            continue
        end = position + count
        blocks = table[row, : -(-end // block_size)].long()
        # (blocks, block_size, Hkv, D) -> (positions, Hkv, D) -> (end, Hq, D)
        k, v = (
            cache[blocks].view(-1, keys, D)[:end].to(q.dtype).repeat_interleave(repeats, dim=1)
            for cache in (key_cache, value_cache)
        )
        mask = torch.arange(end) <= torch.arange(position, end).unsqueeze(1)  # (count, end)
        attended = functional.scaled_dot_product_attention(
            q[first : first + count].transpose(0, 1),  # (Hq, count, D)
            k.transpose(0, 1),
            v.transpose(0, 1),
            attn_mask=mask.to(q.device),
            scale=scale,
        )
        out[first : first + count] = attended.transpose(0, 1)
    return out.flatten(1)  # (M, Hq D)


def project(
    x: Tensor, a: Tensor, *, overlap: bool = False, arrived: Tensor | None = None
) -> Tensor:
    """Return z = x A^T, (M, R), of x (M, K) and A (R, K)."""
    return functional.linear(x, a)


def add_adapter(
    y: Tensor, z: Tensor, b: Tensor, ends: tuple[int, ...], scaling: float, *, overlap: bool = False
) -> Tensor:
    """Add scaling * z B^T to y, in place, and return y.

    Parameters
    ----------
    y : Tensor, (M, N)
    z : Tensor, (M, projections * rank)
    b : Tensor, (N, rank)
    ends
        First column after each projection but the last.
    """
    rank = b.shape[1]
    edges = (0, *ends, y.shape[1])
    for i, (start, end) in enumerate(itertools.pairwise(edges)):
        y[:, start:end] += scaling * functional.linear(
            z[:, i * rank : (i + 1) * rank], b[start:end]
        )
    return y


def adapted_swiglu(
    gate_up: Tensor, z: Tensor, b: Tensor, scaling: float, *, overlap: bool = False
) -> Tensor:
    """Return silu(gate + scaling z1 B1^T) * (up + scaling z2 B2^T), (M, I).

    Parameters
    ----------
    gate_up : Tensor, (M, 2 I)
    z : Tensor, (M, 2 rank)
    b : Tensor, (2 I, rank)
    """
    half = gate_up.shape[1] // 2
    return reference.swiglu(add_adapter(gate_up.clone(), z, b, (half,), scaling))


def choose(
    logits: Tensor,
    *,
    temperature: Tensor,
    greedy: bool,
    tokens: Tensor,
    positions: Tensor,
    counts: Tensor,
    limits: Tensor,
    status: Tensor,
    uniforms: Tensor,
    out_tokens: Tensor,
    out_logprobs: Tensor,
    ends: Tensor,
    overlap: bool = False,
) -> None:
    """Draw for the rows of `logits` and move their state on, in place.

    A row whose largest logit is not finite draws nothing and is FAULTY. The uniform number belongs
    to the row's count.

    Parameters
    ----------
    logits : Tensor, (M, V), float32
    temperature : Tensor, (), float32
    uniforms : Tensor, (R, T), float64
    tokens, positions, counts, limits, status, out_tokens, out_logprobs, ends
        See `advance`.
    """
    M = len(logits)
    faulty = ~torch.isfinite(logits.amax(dim=-1))  # (M,)
    sound = logits.masked_fill(faulty.unsqueeze(1), 0.0)
    numbers = uniforms_at(uniforms[:M], counts[:M])
    if not greedy:
        sound = sound / temperature
    ids, logprobs = sample_tokens(sound, numbers, 0.0 if greedy else 1.0)
    advance(
        ids, logprobs, faulty, tokens=tokens, positions=positions, counts=counts, limits=limits,
        status=status, out_tokens=out_tokens, out_logprobs=out_logprobs, ends=ends,
    )  # fmt: skip


def uniforms_at(uniforms: Tensor, counts: Tensor) -> Tensor:
    """Return the uniform number that belongs to each row's count, (M,), of (M, T).

    A row that has used all its numbers gets its last one; it draws no more.
    """
    column = counts.clamp(max=uniforms.shape[1] - 1).long().unsqueeze(1)  # (M, 1)
    return uniforms.gather(1, column).squeeze(1)  # (M,)


def advance(
    ids: Tensor,
    logprobs: Tensor,
    faulty: Tensor,
    *,
    tokens: Tensor,
    positions: Tensor,
    counts: Tensor,
    limits: Tensor,
    status: Tensor,
    out_tokens: Tensor,
    out_logprobs: Tensor,
    ends: Tensor,
) -> None:
    """Take one token per row for the first M of R rows, in place; the plain form of a step's end.

    Neither waits for the device nor branches on values, so it can be captured.

    Parameters
    ----------
    ids : Tensor, (M,), int64
    logprobs : Tensor, (M,), float32
    faulty : Tensor, (M,), bool
        Rows that stop as they are, with no token taken.
    tokens : Tensor, (R,), int64
        The token that the next step feeds.
    positions, counts, limits, status : Tensor, (R,), int32
        Position of that token (-1 where no row runs), tokens generated, and the number at which
        the row is FULL.
    out_tokens, out_logprobs : Tensor, (R, T), int32 and float32
    ends : Tensor, (E,), int64
        Tokens at which a row is STOPPED.
    """
    M = len(ids)
    tokens, positions, counts, status = tokens[:M], positions[:M], counts[:M], status[:M]
    live = positions >= 0
    taken = live & ~faulty
    column = counts.clamp(max=out_tokens.shape[1] - 1).long().unsqueeze(1)  # (M, 1)
    for out, value in ((out_tokens[:M], ids), (out_logprobs[:M], logprobs)):
        old = out.gather(1, column).squeeze(1)  # (M,)
        out.scatter_(1, column, torch.where(taken, value.to(out.dtype), old).unsqueeze(1))
    counts += taken.int()
    stopped = taken & torch.isin(ids, ends)
    full = taken & ~stopped & (counts >= limits[:M])
    ended = torch.where(full, FULL, torch.where(live & faulty, FAULTY, status))
    status.copy_(torch.where(stopped, STOPPED, ended))
    going = taken & ~stopped & ~full
    positions.copy_(torch.where(going, positions + 1, -1))
    tokens.copy_(torch.where(going, ids, tokens))


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
