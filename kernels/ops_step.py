"""Rows of `kernels.ops.OPS` for what the engine calls between the products.

Each reference has its kernel's name and signature (`kernels.reference_step`), and is plain PyTorch
once `overlap`, the last argument, is left out. Caches hold NaN in block 0, which is nobody's: what
is read of it must not matter.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kernels import reference_step
from kernels.op import Arguments, Dense, Op, Shape, normal, triton_row
from kernels.reference_step import Heads, LayerCache, Rotation

_row = partial(triton_row, named=("overlap",))
_BLOCK = 16
_RANK = 32


def _overlap(device: str) -> bool:
    """Tell whether the engine launches with overlap on the device."""
    return device == "cuda" and torch.cuda.get_device_capability()[0] >= 9


def _add_norm_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Arguments:
    M, H = shape
    residual, update = (normal(M, H, dtype=dtype, device=device, seed=s) for s in (seed, seed + 1))
    gain = normal(H, dtype=dtype, device=device, seed=seed + 2)
    noise = normal(H, dtype=torch.float32, device=device, seed=seed + 3) * 0.01
    return residual, update, gain, noise, 1e-6, _overlap(device)


def _cache(
    rows: int, S: int, heads: int, D: int, dtype: torch.dtype, device: str, seed: int
) -> tuple[LayerCache, Tensor]:
    """Return a cache of blocks of 16, and a table, (rows, blocks of S)."""
    per_row = -(-S // _BLOCK)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(rows * per_row, generator=generator).view(rows, per_row) + 1
    shape = (rows * per_row + 1, _BLOCK, heads, D)
    keys = normal(*shape, dtype=dtype, device=device, seed=seed + 1)
    values = normal(*shape, dtype=dtype, device=device, seed=seed + 2)
    keys[0] = values[0] = float("nan")
    return LayerCache(keys=keys, values=values), table.int().to(device)


def _rotation(S: int, D: int, dtype: torch.dtype, device: str) -> Rotation:
    frequencies = 1e6 ** (-torch.arange(0, D, 2) / D)
    angles = torch.arange(S).unsqueeze(1) * frequencies.repeat(2)  # (S, D)
    return Rotation(cos=angles.cos().to(device, dtype), sin=angles.sin().to(device, dtype))


def _attend_inputs(
    head_norms: bool, shape: Shape, dtype: torch.dtype, device: str, seed: int
) -> Arguments:
    """Return rows of almost S tokens, the first full, the last of a few not running."""
    M, S, query, key, D = shape
    cache, table = _cache(M, S, key, D, dtype, device, seed)
    qkv = normal(M, (query + 2 * key) * D, dtype=dtype, device=device, seed=seed + 3)
    generator = torch.Generator().manual_seed(seed + 4)
    missing = torch.randint(1, 16, (M,), generator=generator, dtype=torch.int32)
    missing[0] = 1
    positions = S - missing
    if 1 < M <= 8:
        positions[-1] = -1
    gains = [normal(D, dtype=dtype, device=device, seed=seed + i) for i in (5, 6)]
    q_gain, k_gain = gains if head_norms else (None, None)
    heads = Heads(query=query, scaling=D**-0.5, q_gain=q_gain, k_gain=k_gain, eps=1e-6)
    rotation = _rotation(S, D, dtype, device)
    return qkv, positions.to(device), table, cache, heads, rotation, None, _overlap(device)


def _with_workspace(arguments: Arguments) -> Arguments:
    """Give the kernel the memory that its splits meet in."""
    from kernels.triton.decode_step import StepWorkspace

    qkv, _, _, cache, heads, *_ = arguments
    _, _, keys, D = cache.keys.shape
    workspace = StepWorkspace(len(qkv), heads.query, keys, D, qkv.device)
    return (*arguments[:6], workspace, arguments[7])


def _dense_step(arguments: Arguments) -> Dense:
    """Return torch's attention over keys and values that lie side by side."""
    qkv, _, table, cache, heads, *_ = arguments
    M, D = len(qkv), cache.keys.shape[3]
    q = qkv[:, : heads.query * D].view(M, heads.query, 1, D)
    return _attention, (q, *_side_by_side(cache, table))


def _side_by_side(cache: LayerCache, table: Tensor) -> list[Tensor]:
    """Return keys and values as (rows, heads, positions, D)."""
    # (rows, positions, heads, D) each
    taken = [part[table.long()].flatten(1, 2) for part in (cache.keys, cache.values)]
    return [part.transpose(1, 2).contiguous() for part in taken]


def _attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def _rotary_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Arguments:
    """Return M tokens of one sequence, the last of several not kept."""
    M, query, key, D = shape
    cache, table = _cache(1, M, key, D, dtype, device, seed)
    positions = torch.arange(M, dtype=torch.int32, device=device)
    slots = table[0].long().repeat_interleave(_BLOCK)[:M] * _BLOCK + positions % _BLOCK
    if M > 1:
        slots[-1] = -1
    qkv = normal(M, (query + 2 * key) * D, dtype=dtype, device=device, seed=seed + 3)
    heads = Heads(query=query, scaling=D**-0.5)
    return qkv, positions, slots.int(), cache, heads, _rotation(M, D, dtype, device)


def _prefill_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Arguments:
    """Return sequences of S tokens, all new but the first few of every second one; 3 of padding."""
    rows, S, query, key, D = shape
    cache, table = _cache(rows, S, key, D, dtype, device, seed)
    tiles, first = [], 0
    for row in range(rows):
        for position in range(5 if row % 2 else 0, S, 64):
            count = min(64, S - position)
            tiles.append([row, first, count, position])
            first += count
    tiles += [[-1, first, 3, 0], [-1, 0, 0, 0]]
    q = normal(first + 3, query, D, dtype=dtype, device=device, seed=seed + 3)
    q[first:] = float("nan")  # padding must not matter
    where = torch.tensor(tiles, dtype=torch.int32, device=device)
    return q, cache, table, where, D**-0.5


def _dense_prefill(arguments: Arguments) -> Dense:
    q, cache, table = arguments[:3]
    k, v = _side_by_side(cache, table)
    rows, _, S, D = k.shape
    full = q.new_empty(rows, q.shape[1], S, D).normal_()
    return partial(_attention, is_causal=True), (full, k, v)


def _project_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Arguments:
    M, K, R = shape
    x = normal(M, K, dtype=dtype, device=device, seed=seed)
    return x, normal(R, K, dtype=dtype, device=device, seed=seed + 1), _overlap(device)


def _edges(N: int) -> tuple[int, int]:
    """Return where q and k end in a fused q, k, v of N columns."""
    return N // 32 * 16, N // 64 * 48


def _add_adapter_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Arguments:
    M, N = shape
    y = normal(M, N, dtype=dtype, device=device, seed=seed)
    z = normal(M, 3 * _RANK, dtype=dtype, device=device, seed=seed + 1)
    b = normal(N, _RANK, dtype=dtype, device=device, seed=seed + 2)
    return y, z, b, _edges(N), 0.5, _overlap(device)


def _gate_up_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Arguments:
    M, inner = shape
    return normal(M, 2 * inner, dtype=dtype, device=device, seed=seed), _overlap(device)


def _adapted_swiglu_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Arguments:
    M, inner = shape
    gate_up = normal(M, 2 * inner, dtype=dtype, device=device, seed=seed)
    z = normal(M, 2 * _RANK, dtype=dtype, device=device, seed=seed + 1)
    b = normal(2 * inner, _RANK, dtype=dtype, device=device, seed=seed + 2)
    return gate_up, z, b, 0.5, _overlap(device)


def _choose_inputs(
    greedy: bool, shape: Shape, dtype: torch.dtype, device: str, seed: int
) -> Arguments:
    """Return rows in the middle of a rollout; of six, each ends in another way or does not run.

    Row 0 goes on, 1 is at its limit, 2 is not running, 3 draws an end token, 4 and 5 have logits
    of NaN and of infinity.
    """
    M, V = shape
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * normal(M, V, dtype=torch.float32, device=device, seed=seed + 1)
    counts = torch.randint(0, 4, (M,), generator=generator, dtype=torch.int32)
    limits = torch.full((M,), 8, dtype=torch.int32)
    positions = torch.arange(5, M + 5, dtype=torch.int32)
    ends = torch.full((8,), -1)
    ends[0] = V - 1
    if M >= 6:
        limits[1], positions[2] = counts[1] + 1, -1
        logits[3, V - 1], logits[4, 0], logits[5, V // 2] = 60.0, float("nan"), float("inf")
    rows = {
        "tokens": torch.randint(0, V, (M,), generator=generator),
        "positions": positions,
        "counts": counts,
        "limits": limits,
        "status": torch.zeros(M, dtype=torch.int32),
        "uniforms": torch.rand(M, 8, generator=generator, dtype=torch.float64),
        "out_tokens": torch.zeros(M, 8, dtype=torch.int32),
        "out_logprobs": torch.zeros(M, 8),
        "ends": ends,
        "temperature": torch.tensor(0.7),
    }
    on_device = {name: tensor.to(device) for name, tensor in rows.items()}
    return logits, reference_step.StepRows(**on_device), greedy, _overlap(device)


def _nucleus_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Arguments:
    """Return logits with ties, as those of a bfloat16 product; a row of NaN, one of infinity."""
    logits = _choose_inputs(False, shape, dtype, device, seed)[0].bfloat16().float()
    return logits, torch.tensor(0.7, device=device), 0.8, _overlap(device)


def _attend_op(name: str, head_norms: bool) -> Op:
    return _row(
        reference_step.attend_step,
        "decode_step",
        name=name,
        inputs=partial(_attend_inputs, head_norms),
        shapes=((3, 100, 8, 2, 32), (2, 17, 7, 1, 64), (1, 130, 4, 4, 32)),
        large=(64, 2048, 28, 4, 128),
        nbytes=lambda s: 4 * s[0] * s[1] * s[3] * s[4],
        flops=lambda s: 4 * s[0] * s[1] * s[2] * s[4],
        written=(3,),
        prepare=_with_workspace,
        dense=_dense_step,
    )


def _choose_op(name: str, greedy: bool) -> Op:
    return _row(
        reference_step.choose,
        "decode_choice",
        name=name,
        inputs=partial(_choose_inputs, greedy),
        shapes=((6, 5000), (1, 2048), (7, 97)),
        large=(64, 152064),
        nbytes=lambda s: 4 * s[0] * s[1],
        flops=lambda s: 4 * s[0] * s[1],
        named=("greedy", "overlap"),
        written=(1,),
        bound=1e-5,
        dense=None,
    )


STEP_OPS: tuple[Op, ...] = (
    _row(
        reference_step.add_norm,
        "decode_step",
        inputs=_add_norm_inputs,
        shapes=((1, 64), (7, 100), (3, 896)),
        large=(64, 3584),
        nbytes=lambda s: 8 * s[0] * s[1],
        flops=lambda s: 6 * s[0] * s[1],
    ),
    _attend_op("attend_step", False),
    _attend_op("attend_step_head_norms", True),
    _row(
        reference_step.swiglu,
        "decode_step",
        name="step_swiglu",
        inputs=_gate_up_inputs,
        shapes=((1, 64), (5, 1100)),
        large=(64, 18944),
        nbytes=lambda s: 6 * s[0] * s[1],
        flops=lambda s: 5 * s[0] * s[1],
    ),
    _row(
        reference_step.project,
        "decode_adapter",
        inputs=_project_inputs,
        shapes=((1, 700, 96), (17, 256, 32), (70, 320, 16)),
        large=(64, 3584, 96),
        nbytes=lambda s: 2 * (s[0] * s[1] + s[1] * s[2] + s[0] * s[2]),
        flops=lambda s: 2 * s[0] * s[1] * s[2],
    ),
    _row(
        reference_step.add_adapter,
        "decode_adapter",
        inputs=_add_adapter_inputs,
        shapes=((1, 512), (17, 128), (70, 192)),
        large=(64, 4608),
        nbytes=lambda s: 4 * s[0] * s[1] + 2 * _RANK * (3 * s[0] + s[1]),
        flops=lambda s: 2 * s[0] * s[1] * _RANK,
        written=(0,),
    ),
    _row(
        reference_step.adapted_swiglu,
        "decode_adapter",
        inputs=_adapted_swiglu_inputs,
        shapes=((1, 64), (17, 200), (70, 300)),
        large=(64, 18944),
        nbytes=lambda s: 6 * s[0] * s[1] + 4 * _RANK * (s[0] + s[1]),
        flops=lambda s: 4 * s[0] * s[1] * _RANK,
    ),
    _row(
        reference_step.keep_nucleus,
        "nucleus",
        inputs=_nucleus_inputs,
        shapes=((6, 5000), (1, 2048), (7, 97)),
        large=(64, 152064),
        nbytes=lambda s: 8 * s[0] * s[1],  # what must move; the kernel reads a row 14 times
        flops=lambda s: 8 * 11 * s[0] * s[1],
        written=(0,),
        exact=True,
        dense=None,
    ),
    _choose_op("choose", False),
    _choose_op("choose_greedy", True),
    triton_row(
        reference_step.rotary_write,
        "rotary",
        dense=None,
        inputs=_rotary_inputs,
        shapes=((1, 4, 2, 32), (19, 7, 1, 64)),
        large=(4096, 28, 4, 128),
        nbytes=lambda s: 4 * s[0] * s[3] * (s[1] + 2 * s[2] + 1),
        flops=lambda s: 3 * s[0] * s[3] * (s[1] + s[2]),
        written=(3,),
    ),
    triton_row(
        reference_step.prefill_attention,
        "prefill_attention",
        inputs=_prefill_inputs,
        shapes=((1, 9, 4, 2, 32), (3, 100, 7, 1, 32)),
        large=(4, 2048, 28, 4, 128),
        nbytes=lambda s: 4 * s[0] * s[1] * s[4] * (s[2] + s[3]),
        # Half of the scores: what lies behind a token is not computed.
        flops=lambda s: 2 * s[0] * s[1] * s[1] * s[2] * s[4],
        dense=_dense_prefill,
    ),
)
