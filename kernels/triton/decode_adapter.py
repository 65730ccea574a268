"""A LoRA update in two small launches that overlap the linear layer, in Triton.

    z = x A^T             cut along K into parts, so that enough programs read A at once; the last
                          part to arrive adds them up
    y += scaling * z B^T

`project` is launched before the linear layer and `add_adapter` after it. Under programmatic
dependent launch the linear layer's blocks request their weights while z is still being made, and B
is loaded while the linear layer drains. The engine goes this way where a layer's own launch does
not take the adapter (`kernels.cuda.linear.fuses_adapter`): from 17 rows on. Dense layers make z
within their own product and add it here.

z is rounded to the type of x before it meets B, as the reference does.

Easy to get wrong: the sum over parts is in a fixed order, whichever part comes last, so that the
bits are the same each time; and a tile of y must not straddle two projections, whose z differ.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.decode_step import launch, wait

# Beyond this many rows cuBLAS makes z at once.
FEW_ROWS = 256
# Rows of x a program multiplies at most; rows of A of all projections together, at most.
_TILE_ROWS = 64
_MOST_RANKS = 1024
# The largest rank whose B^T a program holds whole: two tiles of more fit no card of 99 KiB; and the
# rows of B^T that it holds of a larger one.
_WHOLE_RANK = 128
_CHUNK = 64
_COLUMNS = 256
_MAX_PARTS = 40


@triton.jit
def _project_kernel(
    x, a, z, partial, arrived,
    M, K, x_stride, total_rank,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr,
    WIDEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    part = tl.program_id(1)
    r = tl.program_id(0) * 16 + tl.arange(0, 16)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    k = part * STEPS * COLUMNS + tl.arange(0, COLUMNS)
    # Load the first columns of A, (16, COLUMNS): the launch before does not write them.
    weights = tl.load(a + r[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
    wait(OVERLAP)
    acc = tl.zeros((16, ROWS), tl.float32)
    # Multiply: (16, COLUMNS) of A by (COLUMNS, ROWS) of x^T, the next columns of A loading behind.
    for step in tl.static_range(STEPS):
        at = k + step * COLUMNS
        valid = (at[:, None] < K) & (m[None, :] < M)
        tokens = tl.load(x + m[None, :] * x_stride + at[:, None], mask=valid, other=0.0)
        if WIDEN:
            acc += tl.dot(weights.to(tl.float32), tokens.to(tl.float32))
        else:
            acc = tl.dot(weights, tokens, acc)
        if step + 1 < STEPS:
            at += COLUMNS
            weights = tl.load(a + r[:, None] * K + at[None, :], mask=at[None, :] < K, other=0.0)
    # Each part leaves its sums; the last to arrive adds them up, in order, and clears the counter.
    i = tl.arange(0, 16)
    TILE: tl.constexpr = 16 * ROWS
    n = tl.arange(0, ROWS)
    tl.store(partial + (tile * PARTS + part) * TILE + i[:, None] * ROWS + n[None, :], acc)
    tl.debug_barrier()
    before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
    if before == PARTS - 1:
        tl.store(arrived + tile, 0)
        total = tl.zeros((16, ROWS), tl.float32)
        if ROWS == 16:
            # Sixteen at once: one by one, each load would wait for the L2 in turn.
            p = tl.arange(0, 16)
            # (1, 16, ROWS) places in a part; `other` adds the parts' axis in front, summed away
            own = partial + tile * PARTS * TILE + i[None, :, None] * ROWS + n[None, None, :]
            for begin in tl.static_range(0, PARTS, 16):
                other = begin + p[:, None, None]
                here = (other < PARTS) & (m[None, None, :] < M)
                sums = tl.load(own + other * TILE, mask=here, other=0.0, cache_modifier=".cg")
                total += tl.sum(sums, 0)
        else:
            each = partial + tile * PARTS * TILE + i[:, None] * ROWS + n[None, :]
            for other in tl.static_range(PARTS):
                total += tl.load(each + other * TILE, cache_modifier=".cg")
        # Store z^T, (16, ROWS), rounded once.
        target = z + m[None, :] * total_rank + r[:, None]
        tl.store(target, total.to(z.dtype.element_ty), mask=m[None, :] < M)


@lru_cache(maxsize=64)
def _counters(device: int, stream: int) -> Tensor:
    return torch.zeros(counters(_MOST_RANKS), dtype=torch.int32, device=f"cuda:{device}")


def counters(ranks: int) -> int:
    """Return the number of counters that `project` needs for an A with `ranks` rows."""
    return ranks // 16 * triton.cdiv(FEW_ROWS, _TILE_ROWS)


def padded_rank(rank: int) -> int:
    """Return the power of two from 16 on that an adapter's factors are padded to, by zeros."""
    return max(16, triton.next_power_of_2(rank))


def _chunk(rank: int) -> int:
    return rank if rank <= _WHOLE_RANK else _CHUNK


def project(x: Tensor, a: Tensor, *, overlap: bool, arrived: Tensor | None = None) -> Tensor:
    """Return z = x A^T, rounded once.

    Parameters
    ----------
    x : Tensor, (M, K)
        Rows contiguous.
    a : Tensor, (R, K), contiguous, the type of x
        R a multiple of 16.
    arrived : Tensor or None, (at least `counters(R)`,), int32
        Zeros, and zeros again afterwards; not to be shared by launches that may overlap. None takes
        one that all launches on the current stream share.

    Returns
    -------
    Tensor, (M, R), the type of x
    """
    M, K = x.shape
    R = a.shape[0]
    if R % 16 or a.shape[1] != K or not a.is_contiguous():
        raise ValueError(
            f"A has shape {tuple(a.shape)}; it must be (a multiple of 16, {K}), contiguous"
        )
    if M > FEW_ROWS or R > _MOST_RANKS:
        return torch.nn.functional.linear(x, a)
    if arrived is None:
        if x.is_cuda:
            arrived = _counters(x.device.index, torch.cuda.current_stream().cuda_stream)
        else:
            arrived = torch.zeros(counters(R), dtype=torch.int32)
    if len(arrived) < counters(R):
        raise ValueError(f"{len(arrived)} counters; an A of {R} rows needs {counters(R)}")
    slices = triton.cdiv(K, _COLUMNS)
    rows = 16 if M <= 16 else 32 if M <= 32 else _TILE_ROWS
    tiles = triton.cdiv(M, rows)
    # Joining many parts of many rows costs more than reading A with fewer programs.
    steps = triton.cdiv(slices, _MAX_PARTS if rows == 16 else 16)
    parts = triton.cdiv(slices, steps)
    z = torch.empty(M, R, dtype=x.dtype, device=x.device)
    partial = torch.empty(parts * R * rows * tiles, dtype=torch.float32, device=x.device)
    tensors, numbers = (x, a, z, partial, arrived), (M, K, x.stride(0), R)
    constants = (rows, _COLUMNS, steps, parts, x.dtype == torch.float32, overlap)
    _project_kernel[(R // 16, parts, tiles)](
        *tensors, *numbers, *constants, num_warps=4, **launch(overlap)
    )
    return z


@triton.jit
def _add_kernel(
    y, z, b,
    scaling, M, y_stride, end0, end1, z_stride,
    RANK: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, CHUNK)
    start = tl.program_id(0) * COLUMNS
    adapter = (start >= end0).to(tl.int32) + (start >= end1).to(tl.int32)
    # Load B^T, (CHUNK, COLUMNS): the launch before does not write it.
    factors = tl.load(b + n[None, :] * RANK + r[:, None])
    wait(OVERLAP)
    # Multiply z, (ROWS, CHUNK), of the projection whose columns these are.
    at = m[:, None] * z_stride + adapter * RANK + r[None, :]
    own = tl.load(z + at, mask=(m < M)[:, None], other=0.0)
    update = tl.dot(own.to(tl.float32), factors.to(tl.float32)) if WIDEN else tl.dot(own, factors)
    for chunk in tl.static_range(CHUNK, RANK, CHUNK):
        own = tl.load(z + at + chunk, mask=(m < M)[:, None], other=0.0)
        factors = tl.load(b + n[None, :] * RANK + r[:, None] + chunk)
        if WIDEN:
            update += tl.dot(own.to(tl.float32), factors.to(tl.float32))
        else:
            update = tl.dot(own, factors, update)
    # Add to y, (ROWS, COLUMNS), in float32 and round once.
    target = y + m[:, None] * y_stride + n[None, :]
    valid = (m < M)[:, None]
    value = tl.load(target, mask=valid, other=0.0).to(tl.float32) + update * scaling
    tl.store(target, value.to(y.dtype.element_ty), mask=valid)


def add_adapter(
    y: Tensor, z: Tensor, b: Tensor, ends: tuple[int, ...], scaling: float, *, overlap: bool
) -> Tensor:
    """Add scaling * z B^T to y, (M, N), in place, and return y.

    As `kernels.reference_step.add_adapter`. z comes from `project` and may be strided by rows, as
    may y; b is contiguous, and `ends` are at most two. Other shapes raise.
    """
    M, N = y.shape
    total, rank = z.shape[1], b.shape[1]
    if b.shape[0] != N or total != rank * (len(ends) + 1) or rank & (rank - 1) or rank < 16:
        raise ValueError(
            f"B has shape {tuple(b.shape)} and z {tuple(z.shape)}; y {tuple(y.shape)} with "
            f"{len(ends) + 1} projections needs B ({N}, rank) and z ({M}, rank each), "
            "the rank a power of two from 16 on"
        )
    columns = 128
    while any(edge % columns for edge in (*ends, N)):
        columns //= 2
    if columns < 16:
        raise ValueError(f"projections end at {ends} of {N}; multiples of 16 are needed")
    rows = 16 if M <= 64 else 64
    numbers = (scaling, M, y.stride(0), *(*ends, N, N)[:2], z.stride(0))
    constants = (rank, _chunk(rank), rows, columns, y.dtype == torch.float32, overlap)
    _add_kernel[(N // columns, triton.cdiv(M, rows))](
        y, z, b, *numbers, *constants, num_warps=4, **launch(overlap)
    )
    return y


@triton.jit
def _swiglu_kernel(
    gate_up, z, b, y,
    scaling, M, stride, z_stride,
    I: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, CHUNK)
    inside = n < I
    # Load both B^T, (CHUNK, COLUMNS) each: the launch before does not write them.
    gate_b = tl.load(b + n[None, :] * RANK + r[:, None], mask=inside[None, :], other=0.0)
    up_b = tl.load(b + (I + n[None, :]) * RANK + r[:, None], mask=inside[None, :], other=0.0)
    TYPE: tl.constexpr = y.dtype.element_ty
    wait(OVERLAP)
    # Load the base layer's outputs, (ROWS, COLUMNS) each.
    valid = (m < M)[:, None] & inside[None, :]
    source = gate_up + m[:, None] * stride + n[None, :]
    gate = tl.load(source, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(source + I, mask=valid, other=0.0).to(tl.float32)
    # Add the adapters: z, (ROWS, CHUNK) each, times B^T.
    at = m[:, None] * z_stride + r[None, :]
    gate_z = tl.load(z + at, mask=(m < M)[:, None], other=0.0)
    up_z = tl.load(z + at + RANK, mask=(m < M)[:, None], other=0.0)
    if WIDEN:
        gate += tl.dot(gate_z.to(tl.float32), gate_b.to(tl.float32)) * scaling
        up += tl.dot(up_z.to(tl.float32), up_b.to(tl.float32)) * scaling
    else:
        gate += tl.dot(gate_z, gate_b) * scaling
        up += tl.dot(up_z, up_b) * scaling
    for chunk in tl.static_range(CHUNK, RANK, CHUNK):
        places = b + n[None, :] * RANK + r[:, None] + chunk
        gate_b = tl.load(places, mask=inside[None, :], other=0.0)
        up_b = tl.load(places + I * RANK, mask=inside[None, :], other=0.0)
        gate_z = tl.load(z + at + chunk, mask=(m < M)[:, None], other=0.0)
        up_z = tl.load(z + at + RANK + chunk, mask=(m < M)[:, None], other=0.0)
        if WIDEN:
            gate += tl.dot(gate_z.to(tl.float32), gate_b.to(tl.float32)) * scaling
            up += tl.dot(up_z.to(tl.float32), up_b.to(tl.float32)) * scaling
        else:
            gate += tl.dot(gate_z, gate_b) * scaling
            up += tl.dot(up_z, up_b) * scaling
    # Activate and store, rounding where separate launches would.
    gate = gate.to(TYPE).to(tl.float32)
    up = up.to(TYPE).to(tl.float32)
    active = (gate * tl.sigmoid(gate)).to(TYPE).to(tl.float32)
    tl.store(y + m[:, None] * I + n[None, :], (active * up).to(TYPE), mask=valid)


def adapted_swiglu(
    gate_up: Tensor, z: Tensor, b: Tensor, scaling: float, *, overlap: bool
) -> Tensor:
    """Return silu(gate + scaling z1 B1^T) * (up + scaling z2 B2^T), (M, I).

    As `kernels.reference_step.adapted_swiglu`. Rows of `gate_up` and b are contiguous.
    """
    M, I = gate_up.shape[0], gate_up.shape[1] // 2
    rank = b.shape[1]
    if b.shape[0] != 2 * I or z.shape[1] != 2 * rank:
        raise ValueError(
            f"B has shape {tuple(b.shape)} and z {tuple(z.shape)}; gate_up {tuple(gate_up.shape)} "
            f"needs B ({2 * I}, rank) and z ({M}, 2 rank)"
        )
    y = torch.empty(M, I, dtype=gate_up.dtype, device=gate_up.device)
    chunk = _chunk(rank)
    # A rank of several chunks would spill in a wider tile, on cards before Hopper.
    rows, columns = (16, 128) if M <= 64 else (64, 32 if rank > chunk else 64)
    numbers = (scaling, M, gate_up.stride(0), z.stride(0))
    constants = (I, rank, chunk, rows, columns, gate_up.dtype == torch.float32, overlap)
    _swiglu_kernel[(triton.cdiv(I, columns), triton.cdiv(M, rows))](
        gate_up, z, b, y, *numbers, *constants, num_warps=4, **launch(overlap)
    )
    return y
