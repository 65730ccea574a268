"""The steps of generation in plain PyTorch: everything of a decode step and a prefill but products.

The specification of `kernels.triton.decode_step`, `decode_adapter`, `decode_choice`, `rotary` and
`prefill_attention`: the same names and signatures, on any device and in any floating type. The
engine without kernels (`repro.rollout.backend`) computes with these very functions.

The cache is an array of blocks of `block_size` positions; row b's position t lies in block
`table[b, t // block_size]` at offset `t % block_size`. Scores, softmax and the weighted sum
are float32. Query head h reads key head h // (Hq / Hkv).

A draw's distribution is p = softmax(logits / temperature), and the token is the first one, in
vocabulary order, at which the cumulative sum exceeds the row's uniform number. So the token is a
function of one number and of that row's logits, and does not depend on the batch. A filter (top_p)
comes before the inversion: `keep_nucleus`.

A position of -1 marks a row that does not run, a slot of -1 a token that is not kept: neither
changes anything. `overlap`, `workspace`, `arrived` and `tile` concern how kernels are launched and
mean nothing here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels import reference

# What the status of a row becomes: at an end token, at its limit, at logits that are not finite.
RUNNING, STOPPED, FULL, FAULTY = 0, 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heads:
    """The attention's shape; `scaling` is the factor on the scores.

    `q_gain` and `k_gain`, (head_dim,), are of Qwen3's head norms, before the rotation; else None.
    """

    query: int
    scaling: float
    q_gain: Tensor | None = None
    k_gain: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rotation:
    """cos and sin of every position, (S, head_dim), both halves filled, in the compute dtype."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCache:
    """One layer's keys and values, (blocks, block_size, key_heads, head_dim)."""

    keys: Tensor
    values: Tensor


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


def norm_heads(qkv: Tensor, heads: Heads) -> Tensor:
    """Return `qkv`, (M, (Hq + 2 Hkv) D), with query and key heads normed where they have gains."""
    if heads.q_gain is None or heads.k_gain is None:
        return qkv
    split = qkv.unflatten(1, (-1, len(heads.q_gain)))  # (M, Hq + 2 Hkv, D)
    keys = (split.shape[1] - heads.query) // 2
    q, k, v = split.split([heads.query, keys, keys], dim=1)
    q = reference.rms_norm(q, heads.q_gain, heads.eps).to(qkv.dtype)
    k = reference.rms_norm(k, heads.k_gain, heads.eps).to(qkv.dtype)
    return torch.cat((q, k, v), dim=1).flatten(1)  # (M, (Hq + 2 Hkv) D)


def rotary_write(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: LayerCache,
    heads: Heads,
    rotation: Rotation,
) -> Tensor:
    """Rotate queries and keys and write keys and values into the cache, in place.

    Parameters
    ----------
    qkv : Tensor, (M, (Hq + 2 Hkv) D)
        Head norms applied.
    positions : Tensor, (M,), integer
    slots : Tensor, (M,), integer
        Where in the cache each token goes, counted in positions; -1 keeps nothing.

    Returns
    -------
    Tensor, (M, Hq, D), the type of `qkv`
        Rotated queries.
    """
    keys, D = cache.keys.shape[2:]
    split = qkv.unflatten(1, (-1, D))  # (M, Hq + 2 Hkv, D)
    q, k, v = split.split([heads.query, keys, keys], dim=1)
    at = positions.long()
    q, k = reference.rotary(q, k, rotation.cos[at], rotation.sin[at])
    written = slots >= 0
    where = slots[written].long()
    # By slot: (blocks * block_size, Hkv, D)
    cache.keys.view(-1, keys, D)[where] = k[written].to(cache.keys.dtype)
    cache.values.view(-1, keys, D)[where] = v[written].to(cache.values.dtype)
    return q


def attend_step(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    cache: LayerCache,
    heads: Heads,
    rotation: Rotation,
    workspace: object = None,
    *,
    overlap: bool = False,
) -> Tensor:
    """Write one new token per row into the cache and attend from it to all of its row.

    Parameters
    ----------
    qkv : Tensor, (M, (Hq + 2 Hkv) D)
    positions : Tensor, (M,), int32
        -1 where no row runs.
    table : Tensor, (M, max_blocks), integer

    Returns
    -------
    Tensor, (M, Hq * D), the type of `qkv`
        Zeros where no row runs.
    """
    block_size = cache.keys.shape[1]
    at = positions.clamp(min=0).long()
    blocks = table.gather(1, (at // block_size).unsqueeze(1)).squeeze(1).long()  # (M,)
    slots = torch.where(positions >= 0, blocks * block_size + at % block_size, -1)
    queries = rotary_write(norm_heads(qkv, heads), at, slots, cache, heads, rotation)
    tiles = [(row, row, 1, p) for row, p in enumerate(positions.tolist()) if p >= 0]
    attended = prefill_attention(
        queries.float(), cache, table, torch.tensor(tiles).view(-1, 4), heads.scaling
    )
    return attended.to(qkv.dtype)


def prefill_attention(
    q: Tensor, cache: LayerCache, table: Tensor, tiles: Tensor, scale: float, *, tile: int = 64
) -> Tensor:
    """Attend from new tokens, each to its own sequence up to itself.

    Parameters
    ----------
    q : Tensor, (M, Hq, D)
        Rotated queries.
    cache
        The new tokens' own keys and values included.
    table : Tensor, (rows, max_blocks), integer
    tiles : Tensor, (tiles, 4), integer
        Row of `table`, first token, tokens, and the first one's position. A row of -1 is padding.

    Returns
    -------
    Tensor, (M, Hq * D), the type of q
        Zeros for padding.
    """
    _, block_size, keys, D = cache.keys.shape
    out = torch.zeros_like(q)
    repeats = q.shape[1] // keys
    for row, first, count, position in tiles.tolist():
        if row < 0:
            continue
        end = position + count
        blocks = table[row, : -(-end // block_size)].long()
        # (blocks, block_size, Hkv, D) -> (positions, Hkv, D) -> (end, Hq, D)
        k, v = (
            part[blocks].view(-1, keys, D)[:end].to(q.dtype).repeat_interleave(repeats, dim=1)
            for part in (cache.keys, cache.values)
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
    for i, (start, end) in enumerate(itertools.pairwise((0, *ends, y.shape[1]))):
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


@dataclass(kw_only=True, eq=False)
class StepRows:
    """What a decode step knows of R rows and moves on, in place.

    Attributes
    ----------
    tokens : Tensor, (R,), int64
        The token that the next step feeds.
    positions : Tensor, (R,), int32
        Its position; -1 where no row runs.
    counts, limits : Tensor, (R,), int32
        Tokens generated, and the number at which the row is FULL.
    status : Tensor, (R,), int32
    uniforms : Tensor, (R, T), float64
        The numbers of a row's draws.
    out_tokens, out_logprobs : Tensor, (R, T), int32 and float32
    ends : Tensor, (E,), int64
        Tokens at which a row is STOPPED.
    temperature : Tensor, (), float32
    """

    tokens: Tensor
    positions: Tensor
    counts: Tensor
    limits: Tensor
    status: Tensor
    uniforms: Tensor
    out_tokens: Tensor
    out_logprobs: Tensor
    ends: Tensor
    temperature: Tensor


def choose(logits: Tensor, rows: StepRows, *, greedy: bool, overlap: bool = False) -> None:
    """Draw for the first rows, as many as `logits` has, and move their state on, in place.

    A row whose largest logit is not finite draws nothing and is FAULTY. The uniform number belongs
    to the row's count. `greedy` takes the first of the most likely tokens, with logprob 0. In
    `logits`, (M, V), float32, -inf forbids a token.
    """
    M = len(logits)
    faulty = ~torch.isfinite(logits.amax(dim=-1))  # (M,)
    sound = logits.masked_fill(faulty.unsqueeze(1), 0.0)
    if greedy:
        advance(sound.argmax(dim=-1), torch.zeros_like(sound[:, 0]), faulty, rows)
        return
    logprobs = torch.log_softmax(sound / rows.temperature, dim=-1)
    # A row that has used all its numbers gets its last one; it draws no more.
    column = rows.counts[:M].clamp(max=rows.uniforms.shape[1] - 1).long().unsqueeze(1)  # (M, 1)
    ids = invert(logprobs, rows.uniforms[:M].gather(1, column).squeeze(1))  # (M, 1)
    advance(ids.squeeze(1), logprobs.gather(1, ids).squeeze(1), faulty, rows)  # (M,) each


def keep_nucleus(
    logits: Tensor, temperature: Tensor | float, share: float, *, overlap: bool = False
) -> None:
    """Forbid all tokens of a row but the smallest set that holds a share of its mass, in place.

    The set is taken from the most likely token on, equal ones in vocabulary order, and the token
    that crosses the share belongs to it. A row whose largest logit is not finite stays as it is.

    Parameters
    ----------
    logits : Tensor, (M, V), float32
        Becomes -inf outside of the set.
    temperature
        The mass is that of softmax(logits / temperature).
    share
        In (0, 1).
    """
    sound = torch.isfinite(logits.amax(dim=-1, keepdim=True))  # (M, 1)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    mass = torch.softmax(ordered.double() / temperature, dim=-1)
    outside = (mass.cumsum(dim=-1) - mass >= share) & sound
    # The first token stays whatever the share is: nothing comes before it.
    outside[..., 0] = False
    removed = torch.zeros_like(outside).scatter_(-1, order, outside)
    logits.masked_fill_(removed, -torch.inf)


def advance(ids: Tensor, logprobs: Tensor, faulty: Tensor, rows: StepRows) -> None:
    """Take one token per row for the first M of R rows, in place; the plain form of a step's end.

    Neither waits for the device nor branches on values, so it can be captured.

    Parameters
    ----------
    ids : Tensor, (M,), int64
    logprobs : Tensor, (M,), float32
    faulty : Tensor, (M,), bool
        Rows that stop as they are, with no token taken.
    """
    M = len(ids)
    tokens, positions, counts = rows.tokens[:M], rows.positions[:M], rows.counts[:M]
    live = positions >= 0
    taken = live & ~faulty
    column = counts.clamp(max=rows.out_tokens.shape[1] - 1).long().unsqueeze(1)  # (M, 1)
    for out, value in ((rows.out_tokens[:M], ids), (rows.out_logprobs[:M], logprobs)):
        old = out.gather(1, column).squeeze(1)  # (M,)
        out.scatter_(1, column, torch.where(taken, value.to(out.dtype), old).unsqueeze(1))
    counts += taken.int()
    stopped = taken & torch.isin(ids, rows.ends)
    full = taken & ~stopped & (counts >= rows.limits[:M])
    status = rows.status[:M]
    ended = torch.where(full, FULL, torch.where(live & faulty, FAULTY, status))
    status.copy_(torch.where(stopped, STOPPED, ended))
    going = taken & ~stopped & ~full
    positions.copy_(torch.where(going, positions + 1, -1))
    tokens.copy_(torch.where(going, ids, tokens))


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
