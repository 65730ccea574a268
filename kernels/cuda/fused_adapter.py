"""A LoRA update in the launch of its linear layer, for few rows on Hopper.

    y = x W^T (+ bias) + scaling * (x A^T) B^T        in one launch of `linear_narrow`

The first blocks of the launch make z = x A^T in parts; a warp of every other block multiplies z by
the block's rows of B. z passes through a workspace whose words carry the number of the launch
(`cuda/adapter_fused.cuh`), so nothing has to be cleared and a captured launch can be replayed.

z is summed in float32, scaled, and rounded to bfloat16 before it meets B.

Easy to get wrong: the number lives in device memory and counts the launches of a stream. Launches
that may run at the same time must not share a workspace, which is therefore kept per stream; and a
workspace must not be made under capture, or each replay would set the number back while old words
stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from kernels.cuda import driver, hopper
from kernels.cuda.hopper import Adapter, Choice
from kernels.packing import PackedWeight

Join = Literal["late", "extra", "staged"]

ROWS = 16
FILES = ("fragments.cuh", "tokens.cuh", "adapter_fused.cuh", "linear_narrow.cu")
_JOINS: dict[Join, int] = {"late": 0, "extra": 1, "staged": 2}
_MAX_PARTS = 4
MOST_RANK = 128
# Three projections of the largest rank, in tiles of 16 rows of A.
_MOST_TILES = 3 * MOST_RANK // 16
# What a block may set aside for z; more would cost resident blocks.
_STAGED_BYTES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """How the update comes into the sums of a block.

    Where `join` is "late", the last warp adds it after its columns; where "extra", a warp that does
    nothing else; where "staged", as late, from shared memory, where the block's rows of B and what
    there was of z were put before the columns. `parts` blocks, up to 4, share the columns of 16
    rows of A.
    """

    join: Join = "staged"
    parts: int = 2


@cache
def _workspace(device: int, stream: int) -> tuple[Tensor, Tensor]:
    """Return the words of z and the state, zeros at first."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first call with an adapter on a stream makes its workspace; run one before "
            "capturing on that stream"
        )
    words = _MOST_TILES * _MAX_PARTS * ROWS * 16
    on = f"cuda:{device}"
    return (
        torch.zeros(words, dtype=torch.int64, device=on),
        torch.zeros(4, dtype=torch.int32, device=on),
    )


def macros(
    weight: PackedWeight, choice: Choice, M: int, rank: int, joining: Joining
) -> dict[str, int]:
    """Return the macros of `linear_narrow` with an update of `rank`."""
    tokens = 8 if M <= 8 else 16
    join, parts = joining.join, min(joining.parts, _MAX_PARTS if M <= 8 else 2)
    if join == "staged" and rank * parts * tokens * 8 > _STAGED_BYTES:
        join = "late"
    return hopper.narrow_macros(weight, choice, M) | {
        "LORA": 1,
        "RANK": rank,
        "PARTS": parts,
        "JOIN": _JOINS[join],
    }


def narrow(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    out: Tensor,
    choice: Choice,
    adapter: Adapter,
    joining: Joining,
) -> None:
    """Write y = x W^T (+ bias) + the update for at most 16 rows, on the current stream.

    Arguments as `hopper.narrow`'s.

    Raises `RuntimeError` under capture, when the stream has no workspace yet.
    """
    device = x.device.index
    chosen = macros(weight, choice, x.shape[0], adapter.b.shape[1], joining)
    dynamic = hopper.table_bytes(weight)
    kernel = driver.load(FILES, "linear_narrow", tuple(chosen.items()), device, 3 * dynamic)
    helpers = adapter.a.shape[0] // 16 * chosen["PARTS"]
    end0, end1 = (*adapter.ends, 1 << 30, 1 << 30)[:2]
    words, state = _workspace(device, torch.cuda.current_stream().cuda_stream)
    blocks = -(-weight.packs.shape[0] // choice.row_tiles) + helpers
    threads = 32 * (choice.warps + (chosen["JOIN"] == _JOINS["extra"]))
    added = (adapter.a, adapter.b, words, state, float(adapter.scaling), end0, end1, helpers)
    arguments = [*hopper.narrow_arguments(x, weight, bias, out), *added]
    kernel.launch(blocks, threads, arguments, shared_bytes=dynamic)
