"""The layout that the Hopper kernels read, from the checkpoint's layout and back without loss.

A `PackedWeight` holds packs of 16 rows x 256 columns in 2304 bytes, 2048 of codes in the order of
`mma.sync` fragments and 256 of scales beside them (kernels/cuda/fragments.cuh). N is padded to
16 and K to 256 with zeros.

Codes. Each 32-bit word holds the four pairs of codes of one fragment. For E2M1 the bits are
scattered so that each pair comes out, by a rotation and a mask or by one multiplication, as two
bfloat16 of value v * 2**-126: the sign at bit 15, the three magnitude bits at 8:6. For NF4 the
four bytes stand as they are and index a table.

Scales are kept in one byte so that the kernel needs two operations for a bfloat16 pair:

    NVFP4   E4M3 re-encoded as unsigned E5M3 with bias 10, subnormals made normal; the pair is
            s * 2**118, the product v * s * 2**-8, exact in bfloat16
    MXFP4   the exponent moved so that the largest is 253; the pair is 2**(E - 127)
    NF4     float32, one per row and 64 columns

The rest of the scale is the `gain`, one float32 on the accumulated sum: 2**8 * global scale,
2**(largest exponent - 127), or 1.

Easy to get wrong: a block scale of zero has no E5M3 byte, so such blocks get zero codes, and
their true codes and scale are kept aside (`lost_*`) for the way back; the same for MXFP4
exponents more than 252 below the largest, whose values vanish beside it in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from kernels.formats import E4M3, FLOAT32, FORMATS, NORMAL_FLOAT, QuantizedWeight

PACK_ROWS = 16
PACK_COLUMNS = 256
PACK_BYTES = 2304

# E5M3: an E4M3 exponent of -9 (subnormals made normal) to 8, biased to 1 .. 18.
_E5M3_BIAS = 10
# The largest MXFP4 exponent after moving: products stay at or below 6.
_LARGEST_E8M0 = 253
# Scales of a whole matrix, where a format has one.
_OF_MATRIX = ("encode_scale", "global_scale")
# Row tiles rearranged at once, so that the working copy stays small.
_TILES_AT_ONCE = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWeight:
    """A weight matrix W (N, K) in 4 bits, in the order in which the Hopper kernels read it.

    Attributes
    ----------
    shape
        (N, K) before padding.
    packs : Tensor, (ceil(N / 16), ceil(K / 256), 2304), uint8
    gain : Tensor, (), float32
        Multiplies the accumulated sum.
    extras : dict of Tensor
        What the way back needs and the packs do not hold.
    """

    format: str
    shape: tuple[int, int]
    packs: Tensor
    gain: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.packs.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        tensors = [self.packs, self.gain, *self.extras.values()]
        return sum(tensor.nbytes for tensor in tensors)


@lru_cache(maxsize=8)
def _scatter_tables(device: torch.device) -> Tensor:
    """Return (4, 256) int32: the bits that byte b contributes as pair 0 .. 3 of a word."""
    byte = torch.arange(256)
    low, high = byte & 15, byte >> 4
    half = [((code & 8) << 12) | ((code & 7) << 6) for code in (low, high)]
    pair = half[0] | (half[1] << 16)

    def rotate_left(value: Tensor, by: int) -> Tensor:
        return ((value << by) | (value >> (32 - by))) & 0xFFFFFFFF

    gathered = torch.zeros_like(pair)
    for source, target in ((15, 3), (8, 1), (7, 0), (6, 4)):
        for at in (0, 16):
            gathered |= ((pair >> (source + at)) & 1) << (target + at)
    tables = torch.stack((pair, rotate_left(pair, 3), rotate_left(pair, 6), gathered))  # (4, 256)
    return torch.where(tables >= 1 << 31, tables - (1 << 32), tables).to(torch.int32).to(device)


def _gather_byte(words: Tensor, pair: int) -> Tensor:
    """Take pair 0 .. 3 of int32 words back to a byte of two codes, by the kernel's own steps."""
    value = words.long() & 0xFFFFFFFF
    if pair in (1, 2):
        by = 3 * pair
        value = ((value >> by) | (value << (32 - by))) & 0xFFFFFFFF
    elif pair == 3:
        value = ((value & 0x001B001B) * 0x1084) & 0xFFFFFFFF
    low = ((value >> 12) & 8) | ((value >> 6) & 7)
    high = ((value >> 28) & 8) | ((value >> 22) & 7)
    return (low | (high << 4)).to(torch.uint8)


@lru_cache(maxsize=8)
def nf4_pairs(device: torch.device) -> Tensor:
    """Return (256,) int32: the two NF4 values of a byte as a pair of bfloat16."""
    values = torch.tensor(NORMAL_FLOAT).to(torch.bfloat16).view(torch.int16).long() & 0xFFFF
    byte = torch.arange(256)
    pairs = values[byte & 15] | (values[byte >> 4] << 16)
    return torch.where(pairs >= 1 << 31, pairs - (1 << 32), pairs).to(torch.int32).to(device)


@lru_cache(maxsize=8)
def _entries(device: torch.device) -> Tensor:
    """Return (32,): which lane's (4g + t) codes stand at each place of a chunk."""
    g, t = torch.arange(32) // 4, torch.arange(32) % 4
    place = 4 * g + (t + g // 2) % 4
    return place.argsort().to(device)


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Rearrange a quantised weight for the Hopper kernels; `unpack` undoes it exactly.

    `weight`, (N, K), has any format, on any device, where its packs are then. Raises `ValueError`
    when a block scale is NaN.
    """
    N, K = weight.shape
    tiles, columns = -(-N // PACK_ROWS), -(-K // PACK_COLUMNS)
    codes = weight.codes
    extras: dict[str, Tensor] = {}
    scales, gain, lost = _stored_scales(weight)
    if bool(lost.any()):
        index = lost.view(-1).nonzero().squeeze(1)  # (lost blocks,)
        block_bytes = weight.block // 2
        extras["lost_blocks"] = index
        # (lost blocks, bytes of a block)
        extras["lost_codes"] = codes.view(-1, block_bytes)[index]
        # (lost blocks,)
        extras["lost_scales"] = weight.block_scales.view(torch.uint8).view(-1)[index]
        codes = codes.clone()
        codes.view(-1, block_bytes)[index] = 0  # (lost blocks, bytes of a block)
    extras |= {name: value for name, value in weight.tensors().items() if name in _OF_MATRIX}
    in_bits = FORMATS[weight.format].is_e2m1
    packs = torch.empty(tiles, columns, PACK_BYTES, dtype=torch.uint8, device=codes.device)
    for at in range(0, tiles, _TILES_AT_ONCE):
        rows = slice(at * PACK_ROWS, min(N, (at + _TILES_AT_ONCE) * PACK_ROWS))
        part = packs[at : at + _TILES_AT_ONCE]
        part[:, :, :2048] = _pack_codes(codes[rows], part.shape[0], columns, in_bits)
        part[:, :, 2048:] = _pack_scales(scales[rows], part.shape[0], columns)
    return PackedWeight(format=weight.format, shape=(N, K), packs=packs, gain=gain, extras=extras)


def unpack(packed: PackedWeight) -> QuantizedWeight:
    """Return the weight in the checkpoint's layout, bit for bit as it was before `pack`."""
    N, K = packed.shape
    tiles, columns, _ = packed.packs.shape
    words = packed.packs[:, :, :2048].contiguous().view(torch.int32)
    # (tile, column, chunk, lane, j), from the places of a chunk back to lanes
    words = words.view(tiles, columns, 4, 32, 4)[:, :, :, _entries(words.device).argsort()]
    words = words.view(tiles, columns, 4, 8, 4, 4)  # chunk, g, t, j
    if FORMATS[packed.format].is_e2m1:
        bytes_ = [_gather_byte(words, i) for i in range(4)]
    else:
        bytes_ = [((words >> (8 * i)) & 255).to(torch.uint8) for i in range(4)]
    # (half, tile, column, chunk, g, t, low or high eight, j), then as the matrix has it
    pairs = torch.stack((torch.stack(bytes_[0::2], -2), torch.stack(bytes_[1::2], -2)), 0)
    pairs = pairs.permute(1, 0, 4, 2, 3, 5, 6, 7)  # tile, half, g, column, chunk, t, eight, j
    codes = pairs.reshape(tiles * PACK_ROWS, columns * PACK_COLUMNS // 2)[:N, : K // 2]
    codes = codes.contiguous()  # (N, K / 2)
    scales, extras = _unpack_scales(packed), packed.extras
    if "lost_blocks" in extras:
        # (lost blocks,) scales, and (lost blocks, bytes of a block) codes
        scales.view(-1)[extras["lost_blocks"]] = extras["lost_scales"]
        width = extras["lost_codes"].shape[1]
        codes.view(-1, width)[extras["lost_blocks"]] = extras["lost_codes"]
    block_scales = scales.view(FORMATS[packed.format].scale_dtype)
    of_matrix = {name: value for name, value in extras.items() if name in _OF_MATRIX}
    return QuantizedWeight(
        format=packed.format, codes=codes, block_scales=block_scales, **of_matrix
    )


def _pack_codes(codes: Tensor, tiles: int, columns: int, in_bits: bool) -> Tensor:
    padded = torch.zeros(
        tiles * PACK_ROWS, columns * PACK_COLUMNS // 2, dtype=torch.uint8, device=codes.device
    )
    padded[: codes.shape[0], : codes.shape[1]] = codes
    # (tile, half, g, column, chunk, t, low or high eight of the block, j)
    pairs = padded.view(tiles, 2, 8, columns, 4, 4, 2, 4)
    pairs = pairs.permute(0, 3, 4, 2, 5, 7, 6, 1)  # word (chunk, g, t, j), then eight, half
    # From lanes to places: (tile, column, chunk, place, j, eight, half)
    pairs = pairs.flatten(3, 4)[:, :, :, _entries(codes.device)]
    if not in_bits:
        return pairs.reshape(tiles, columns, 2048)
    tables = _scatter_tables(codes.device)
    words = torch.zeros(pairs.shape[:-2], dtype=torch.int32, device=codes.device)
    for i in range(4):
        words |= tables[i][pairs[..., i // 2, i % 2].int()]
    return words.view(tiles, columns, -1).view(torch.uint8)  # (tiles, columns, 2048)


def _pack_scales(scales: Tensor, tiles: int, columns: int) -> Tensor:
    per_pack = 16 // scales.itemsize  # of a row
    padded = torch.zeros(
        tiles * PACK_ROWS, columns * per_pack, dtype=scales.dtype, device=scales.device
    )
    padded[: scales.shape[0], : scales.shape[1]] = scales
    if scales.dtype == FLOAT32:
        # (tile, column, row, block of 64)
        by_row = padded.view(tiles, PACK_ROWS, columns, 4).permute(0, 2, 1, 3).contiguous()
        return by_row.view(tiles, columns, -1).view(torch.uint8)  # (tiles, columns, 256)
    # tile, half, g, column, chunk, t to tile, column, g, t, chunk, half
    by_lane = padded.view(tiles, 2, 8, columns, 4, 4).permute(0, 3, 2, 5, 4, 1)
    return by_lane.reshape(tiles, columns, 256)


def _stored_scales(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales as packs hold them, the gain, and where a block cannot be expressed.

    The first are a byte per 16 columns or a float32 per 64, the last (N, K / block).
    """
    raw = weight.block_scales
    one = torch.ones((), dtype=torch.float64, device=raw.device)
    if raw.dtype == FLOAT32:
        return raw, one.float(), torch.zeros_like(raw, dtype=torch.bool)
    if raw.dtype == E4M3:
        raw = raw.view(torch.uint8)
        if bool(((raw & 0x7F) == 0x7F).any()) or bool((raw > 0x80).any()):
            raise ValueError(f"{weight.format} block_scales hold NaN or a negative scale")
        assert weight.global_scale is not None
        gain, lost = weight.global_scale.float() * 256.0, (raw & 0x7F) == 0
        stored = _e5m3_of_e4m3(raw)
    else:
        if bool((raw == 255).any()):
            raise ValueError(f"{weight.format} block_scales hold 255, which is NaN")
        largest = raw.max().to(torch.int16)
        moved = raw.to(torch.int16) - largest + _LARGEST_E8M0
        gain, lost = torch.ldexp(one, largest.int() - 127).float(), moved < 1
        stored = moved.clamp(min=1).to(torch.uint8)
    return stored.repeat_interleave(weight.block // 16, dim=1), gain, lost


def _unpack_scales(packed: PackedWeight) -> Tensor:
    """Return block scales, (N, K / block), as float32 or their bytes; lost ones are wrong."""
    (N, K), spec = packed.shape, FORMATS[packed.format]
    tiles, columns, _ = packed.packs.shape
    stored = packed.packs[:, :, 2048:]
    if spec.scale_dtype == FLOAT32:
        absmax = stored.contiguous().view(FLOAT32)  # (tiles, columns, 64)
        # (tile, row, column, block of 64)
        absmax = absmax.view(tiles, columns, PACK_ROWS, 4).permute(0, 2, 1, 3)
        absmax = absmax.reshape(tiles * PACK_ROWS, columns * 4)[:N, : K // 64]
        return absmax.contiguous()  # (N, K / 64)
    stored = stored.reshape(tiles, columns, 8, 4, 4, 2)  # g, t, chunk, half
    # (tile, half, g) are rows, (column, chunk, t) blocks of 16
    stored = stored.permute(0, 5, 2, 1, 4, 3).reshape(tiles * PACK_ROWS, columns * 16)
    stored = stored[:N, : K // 16 : spec.block // 16].contiguous()  # (N, K / block)
    if spec.scale_dtype == E4M3:
        return _e4m3_of_e5m3(stored)
    largest = torch.log2(packed.gain.double()).round().to(torch.int16) + 127
    return (stored.to(torch.int16) - _LARGEST_E8M0 + largest).to(torch.uint8)


def _e5m3_of_e4m3(raw: Tensor) -> Tensor:
    """Re-encode E4M3 bytes; subnormals become normal, zero becomes zero."""
    values = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves, powers = torch.frexp(values)  # the significands in [1/2, 1)
    table = torch.zeros(256, dtype=torch.uint8)
    table[1:127] = ((powers - 1 + _E5M3_BIAS) << 3) | (16 * halves - 8).int()
    return table.to(raw.device)[raw.int()]


def _e4m3_of_e5m3(stored: Tensor) -> Tensor:
    bytes_ = torch.arange(127, dtype=torch.uint8)
    table = torch.zeros(256, dtype=torch.uint8)
    table[_e5m3_of_e4m3(bytes_).int()] = bytes_
    table[0] = 0
    return table.to(stored.device)[stored.int()]
