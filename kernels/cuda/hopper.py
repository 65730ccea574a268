"""Launch the Hopper kernels on packed weights: which one, in which shape, with which workspace.

Three ways to y = x W^T, by M (the rows of x):

    narrow    mma.sync, weights streamed once at the memory's speed         few rows
    wide      wgmma, x in a shared-memory ring, work dealt by packs         more
    dense     the layer dequantised into a scratch and torch's own matmul   where that wins

Which shape of which kernel serves (N, K, M) is a `Choice`, found by `kernels.tuning`.

Easy to get wrong: the wide kernel's blocks wait for one another, so a launch must never have more
blocks than fit on the device at once; its counters must be zero before a launch and are zero
again after it; and two launches that may run at the same time (two streams) must not share a
workspace, which is therefore kept per stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from kernels.cuda import driver
from kernels.formats import FORMATS, codebook
from kernels.packing import PACK_BYTES, PACK_COLUMNS, PACK_ROWS, PackedWeight, nf4_pairs

Path = Literal["narrow", "wide", "dense"]

# Shared memory a block may have on Hopper, less what the static arrays take.
_SHARED_LIMIT = 227 * 1024 - 2048
_NF4_TABLE = 32768
# Tiles that blocks can share; two counters each.
_COUNTERS = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to run the linear: a kernel and its shape.

    Attributes
    ----------
    path
        "narrow", "wide" or "dense".
    warps
        Narrow: warps per block; they split K.
    row_tiles
        Narrow: tiles of 16 rows per block. Wide: tiles of 64 rows per consumer warpgroup.
    consumers
        Wide: consumer warpgroups per block, 2 or 3.
    tokens
        Wide: rows of x per tile, 32, 64, 128 or 256.
    whole
        Wide: deal all whole waves of tiles first, and only the rest in ranges of packs.
    cluster
        Wide: blocks that share a tile through their shared memory, up to 8; `whole` then says
        nothing.
    ahead
        Narrow: chunks of 64 columns of x requested at once, 1, 2 or 4; 0 leaves it to the
        compiler.
    prefetch
        Narrow: request the next pack before the present one is used.
    resident
        Narrow: blocks that must fit a multiprocessor, which bounds their registers; 0 leaves
        that to the compiler.
    """

    path: Path
    warps: int = 8
    row_tiles: int = 1
    consumers: int = 2
    tokens: int = 64
    whole: bool = True
    cluster: int = 1
    ahead: int = 4
    prefetch: bool = False
    resident: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """LoRA factors of the projections that share a packed weight, in bfloat16.

    Attributes
    ----------
    a : Tensor, (adapters * rank, K), bfloat16
    b : Tensor, (N, rank), bfloat16
        Row n belongs to the projection that row n of the weight belongs to.
    ends : tuple of int
        First row after each projection but the last; at most two.
    scaling
        alpha / rank.
    """

    a: Tensor
    b: Tensor
    ends: tuple[int, ...] = ()
    scaling: float = 1.0

    def __post_init__(self) -> None:
        rank = self.b.shape[1]
        if rank % 16 or not 16 <= rank <= 128:
            raise ValueError(f"adapter rank is {rank}; the kernels need a multiple of 16 up to 128")
        if len(self.ends) > 2:
            raise ValueError(f"{len(self.ends) + 1} projections share an adapter; at most 3 can")
        if self.a.shape[0] != rank * (len(self.ends) + 1):
            raise ValueError(
                f"adapter A has {self.a.shape[0]} rows; {len(self.ends) + 1} projections of rank "
                f"{rank} need {rank * (len(self.ends) + 1)}"
            )
        if any(end % 16 for end in self.ends):
            raise ValueError(f"projections end at rows {self.ends}; multiples of 16 are needed")


# Sources of the two kernels, in the order in which they are joined.
NARROW_FILES = ("fragments.cuh", "tokens.cuh", "linear_narrow.cu")
WIDE_FILES = ("fragments.cuh", "wgmma.cuh", "linear_wide.cu")


@lru_cache(maxsize=64)
def _workspace(device: int, stream: int, floats: int) -> Tensor:
    return torch.empty(floats, dtype=torch.float32, device=f"cuda:{device}")


@lru_cache(maxsize=64)
def _counters(device: int, stream: int) -> Tensor:
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=f"cuda:{device}")


@lru_cache(maxsize=8)
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def table(weight: PackedWeight) -> Tensor | None:
    """Return NF4's pairs of values per byte, None for the other formats."""
    return nf4_pairs(weight.device) if weight.format == "nf4" else None


def narrow_macros(weight: PackedWeight, choice: Choice, M: int) -> dict[str, int]:
    """Return the macros of `linear_narrow` for a layer without an adapter."""
    return {
        "FORMAT": FORMATS[weight.format].number,
        "WARPS": choice.warps,
        "ROW_TILES": choice.row_tiles,
        "TOKEN_TILES": 1 if M <= 8 else 2 if M <= 16 else 4,
        "TAIL": int(weight.shape[1] % PACK_COLUMNS != 0),
        "AHEAD": choice.ahead,
        "PREFETCH": int(choice.prefetch),
        "RESIDENT": choice.resident,
        "LORA": 0,
    }


def wide_macros(weight: PackedWeight, choice: Choice) -> dict[str, int]:
    """Return the macros of `linear_wide`."""
    stages, pack_stages = _stages(choice, table_bytes(weight))
    return {
        "FORMAT": FORMATS[weight.format].number,
        "CONSUMERS": choice.consumers,
        "ROW_TILES": choice.row_tiles,
        "TOKENS": choice.tokens,
        "STAGES": stages,
        "PACKS": pack_stages,
        "CLUSTER": min(choice.cluster, weight.packs.shape[1]),
    }


def narrow_arguments(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor
) -> list[driver.Argument]:
    """Return the arguments of `linear_narrow` for a layer without an adapter."""
    tensors = (weight.packs, x, bias, weight.gain, out, table(weight))
    return [*tensors, len(x), *weight.shape, x.stride(0), weight.packs.shape[1]]


def table_bytes(weight: PackedWeight) -> int:
    """Return the bytes of dynamic shared memory that a format's table takes in either kernel."""
    return _NF4_TABLE if weight.format == "nf4" else 0


def narrow(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, choice: Choice
) -> None:
    """Write y = x W^T (+ bias) for at most 32 rows, on the current stream.

    Parameters
    ----------
    x : Tensor, (M, K), bfloat16
        Rows contiguous and 16-byte aligned; the row stride a multiple of 8.
    out : Tensor, (M, N), bfloat16
    """
    macros = tuple(narrow_macros(weight, choice, x.shape[0]).items())
    dynamic = table_bytes(weight)
    # The static arrays count towards the limit too, so ask for all that is possible.
    kernel = driver.load(NARROW_FILES, "linear_narrow", macros, x.device.index, 3 * dynamic)
    blocks = -(-weight.packs.shape[0] // choice.row_tiles)
    arguments = narrow_arguments(x, weight, bias, out)
    kernel.launch(blocks, choice.warps * 32, arguments, shared_bytes=dynamic)


def wide(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, choice: Choice) -> None:
    """Write y = x W^T (+ bias) with warpgroup products; arguments as `narrow`'s."""
    M, (N, K) = x.shape[0], weight.shape
    device = x.device.index
    macros = wide_macros(weight, choice)
    row_tiles16, packs, _ = weight.packs.shape
    cluster = macros["CLUSTER"]
    block_rows = choice.consumers * choice.row_tiles * 64
    packs_bytes = macros["PACKS"] * (block_rows // PACK_ROWS) * PACK_BYTES
    stages_bytes = macros["STAGES"] * choice.tokens * 128
    shared_bytes = 1024 + stages_bytes + packs_bytes + table_bytes(weight)
    kernel = driver.load(WIDE_FILES, "linear_wide", tuple(macros.items()), device, shared_bytes)
    token_tiles = -(-M // choice.tokens)
    tiles = token_tiles * -(-row_tiles16 * PACK_ROWS // block_rows)
    # Blocks that share a tile wait for one another: never more than the device holds at once.
    blocks = min(_processors(device), tiles * packs)
    whole = tiles // blocks if choice.whole else 0
    if cluster > 1:
        blocks, whole = tiles * cluster, 0
    stream = torch.cuda.current_stream().cuda_stream
    floats = 2 * blocks * block_rows * choice.tokens if cluster == 1 else 0
    x_map = driver.tensor_map(x.data_ptr(), M, K, x.stride(0), choice.tokens)
    tensors = (x_map, weight.packs, bias, weight.gain, out, table(weight))
    shared = (_workspace(device, stream, _rounded(floats)), _counters(device, stream))
    sizes = (M, N, packs, row_tiles16, token_tiles, tiles, whole)
    kernel.launch(
        blocks,
        (choice.consumers + 1) * 128,
        [*tensors, *shared, *sizes],
        shared_bytes=shared_bytes,
        cluster=cluster,
    )


def _stages(choice: Choice, table_bytes: int) -> tuple[int, int]:
    """Return the stages of x and of W that fit: W first, as device memory is further away."""
    stage_bytes = choice.tokens * 128
    packs_bytes = choice.consumers * choice.row_tiles * 4 * PACK_BYTES
    room = _SHARED_LIMIT - 1024 - table_bytes
    for packs in (4, 3, 2):
        stages = (room - packs * packs_bytes) // stage_bytes
        if stages >= 4:
            break
    return max(1, min(8, stages)), packs


def _rounded(floats: int) -> int:
    """Round a workspace up to a power of two, so that a few sizes serve all shapes."""
    return 1 << max(22, (floats - 1).bit_length())


def dequantize_packs(
    weight: PackedWeight, out: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return the dense matrix (N, K), equal to the reference's.

    Equal in value: a zero of a block whose scale is zero may lose its sign. It is written to `out`,
    (N, K), where one is given; `dtype` is bfloat16 or float16.
    """
    N, K = weight.shape
    device = weight.device.index
    spec = FORMATS[weight.format]
    macros = (("FORMAT", spec.number), ("HALF", int(dtype == torch.float16)))
    files = ("fragments.cuh", "dequantize_packs.cu")
    kernel = driver.load(files, "dequantize_packs", macros, device)
    if out is None:
        out = torch.empty(N, K, dtype=dtype, device=weight.device)
    tiles, packs, _ = weight.packs.shape
    scale = weight.extras["encode_scale"] if spec.has_global_scale else weight.gain
    kernel.launch(
        -(-tiles * packs // 8),
        256,
        [weight.packs, scale, codebook("nf4", weight.device), out, N, K, packs, tiles],
    )
    return out
