"""Storage of 4-bit weights: NVFP4, MXFP4 and NF4.

A weight matrix W of shape (N, K) is cut into *blocks* of consecutive elements along K. Each
element is a 4-bit *code*; each block has a *block scale*; the value of an element is

    NVFP4   value = E2M1[code] * (block_scale / encode_scale)     block 16, E4M3 block scale
    MXFP4   value = E2M1[code] * 2**(block_scale - 127)           block 32, E8M0 block scale
    NF4     value = NORMAL_FLOAT[code] * block_scale              block 64, float32 block scale

Two codes share a byte, the even element of the pair in the low nibble. (bitsandbytes keeps the
even element in the *high* nibble; `swap_nibbles` converts.) Bit 3 of an E2M1 code is its sign.

Direction of the scales, the easiest thing to get wrong
-------------------------------------------------------
*Decode direction* means: multiply the code by it to get the weight. Block scales and
`global_scale` are decode direction; kernels multiply by them. `encode_scale` is the inverse of
the global scale, g = 448 * 6 / amax(|W|), what the released recipe computes and what
compressed-tensors stores under the name `weight_global_scale`. It is kept beside `global_scale`
because rounding 1/g to float32 cannot be undone (for half of all mantissas two neighbouring g
share one 1/g), and checkpoints and dequantised values must equal compressed-tensors' bit for bit:
they divide by g.

Sources: OCP Microscaling Formats (MX) v1.0, section 5; arXiv 2510.11696 section 2 (NVFP4);
arXiv 2305.14314 (NF4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

# The non-negative E2M1 values, in the order of their codes 0 to 7; codes 8 to 15 negate them.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
_E2M1 = E2M1_MAGNITUDES + tuple(-value for value in E2M1_MAGNITUDES)
E4M3_MAX = 448.0

# The sixteen NF4 values (arXiv 2305.14314, appendix E), as float32.
NORMAL_FLOAT = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

# What holds a block scale; an E8M0 is the biased exponent of a power of two.
E4M3, E8M0, FLOAT32 = torch.float8_e4m3fn, torch.uint8, torch.float32
# The bits of their largest number, as an integer; those of NaN, infinity and negatives are beyond.
_UINT8, _INT32 = torch.uint8, torch.int32
_MOST_BITS = {E4M3: (_UINT8, 0x7E), E8M0: (_UINT8, 0xFE), FLOAT32: (_INT32, 0x7F7FFFFF)}

# Between which bytes the block scales of trained weights lie, about: E4M3 of 64 to 448, with 200
# in the middle.
_TRAINED_SCALES = {E4M3: (0x68, 0x7F), E8M0: (119, 122)}
# Spread of a trained projection's weights; also what transformers initialises with.
TRAINED_SPREAD = 0.02

# The arithmetic of NVFP4's scales, by name; `kernels.reference_quantize` says what each rounds.
RECIPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What distinguishes one 4-bit format from another.

    Attributes
    ----------
    block
        Elements along K that share a block scale.
    scale_dtype
        Of the block scales.
    values
        Of the 16 codes, before scaling.
    number
        By which kernels know it, as `kernels/cuda/fragments.cuh` has it.
    has_global_scale
        Whether the matrix has a scale of its own beside its blocks'.
    """

    name: str
    block: int
    scale_dtype: torch.dtype
    values: tuple[float, ...]
    number: int
    has_global_scale: bool = False

    @property
    def is_e2m1(self) -> bool:
        """Whether codes are E2M1 by their bits; else each is a place in `values`."""
        return self.values == _E2M1

    def require_whole_blocks(self, what: str, N: int, K: int) -> None:
        """Raise `ValueError`, which begins with `what`, unless a matrix (N, K) has whole blocks."""
        if N == 0 or K == 0 or K % self.block:
            raise ValueError(
                f"{what} ({N}, {K}); {self.name} needs N positive and "
                f"K a positive multiple of {self.block}"
            )


FORMATS: dict[str, Format] = {
    "nvfp4": Format(
        name="nvfp4", block=16, scale_dtype=E4M3, values=_E2M1, number=0, has_global_scale=True
    ),
    "mxfp4": Format(name="mxfp4", block=32, scale_dtype=E8M0, values=_E2M1, number=1),
    "nf4": Format(name="nf4", block=64, scale_dtype=FLOAT32, values=NORMAL_FLOAT, number=2),
}


def format_named(name: str) -> Format:
    """Return the format of that name; `ValueError` if there is none."""
    if name not in FORMATS:
        raise ValueError(f"weight format is {name!r}; it must be one of {', '.join(FORMATS)}")
    return FORMATS[name]


def require_options(spec: Format, *, with_global_scale: bool, recipe: str) -> None:
    """Raise `ValueError` for an option of `quantize` that the format does not have."""
    if recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}; it must be one of {', '.join(RECIPES)}")
    if with_global_scale and not spec.has_global_scale:
        raise ValueError(f"global_scale is given; {spec.name} has none, only nvfp4 does")
    if not spec.has_global_scale and recipe != "float32":
        raise ValueError(f"recipe is {recipe!r}; {spec.name} has float32 only, nvfp4 has more")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A weight matrix W (N, K) in 4 bits.

    Raises `ValueError` when a tensor is missing, superfluous, or has a shape, type or device that
    does not fit.

    Attributes
    ----------
    codes : Tensor, (N, K / 2), uint8
        Two codes per byte, the even element in the low nibble.
    block_scales : Tensor, (N, K / block)
        Decode direction. float8_e4m3fn (NVFP4), uint8 biased exponent (MXFP4), float32 (NF4).
    global_scale : Tensor or None, (), float32
        NVFP4 only: decode direction, 1 / encode_scale rounded to float32.
    encode_scale : Tensor or None, (), float32
        NVFP4 only: g = 2688 / amax. Given one of the two, the other follows; `dequantize` divides
        by this one, so give it wherever it is known.
    """

    format: str
    codes: Tensor
    block_scales: Tensor
    global_scale: Tensor | None = None
    encode_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if format_named(self.format).has_global_scale:
            if self.encode_scale is None and self.global_scale is not None:
                object.__setattr__(self, "encode_scale", self.global_scale.reciprocal())
            elif self.global_scale is None and self.encode_scale is not None:
                object.__setattr__(self, "global_scale", self.encode_scale.reciprocal())
        for name, dtype, shape in _expected_layout(self):
            _check_tensor(f"{self.format} {name}", getattr(self, name), dtype, shape, self.device)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the dense matrix."""
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def block(self) -> int:
        """Elements along K that share a block scale."""
        return FORMATS[self.format].block

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that is present, by field name; `from_tensors` takes it back."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    @classmethod
    def from_tensors(
        cls, format: str, tensors: Mapping[str, Tensor], shape: tuple[int, int] | None = None
    ) -> QuantizedWeight:
        """Rebuild a weight from stored tensors, and check their values as well as their layout.

        Raises `ValueError` on a wrong shape, type or device, or a scale that is NaN, infinite or
        negative.

        Parameters
        ----------
        tensors
            As `tensors()` returned them. Of NVFP4's two global scales one is enough.
        shape
            (N, K) that the weight must have; None takes the shape of the codes.
        """
        weight = cls(format=format, **dict(tensors))
        if shape is not None and weight.shape != tuple(shape):
            raise ValueError(
                f"{format} weight: the codes describe a matrix {weight.shape}; "
                f"{tuple(shape)} is needed"
            )
        if weight.device.type != "meta":
            _check_scale_values(weight)
        return weight

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Return the same weight on another device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return QuantizedWeight(format=self.format, **moved)


def _expected_layout(
    weight: QuantizedWeight,
) -> list[tuple[str, torch.dtype | None, tuple[int, ...]]]:
    """List (field, type, shape) that the weight must have; a type of None forbids the field."""
    spec = format_named(weight.format)
    codes = weight.codes
    if codes.dim() != 2:
        raise ValueError(f"{spec.name} codes have shape {tuple(codes.shape)}; (N, K/2) is needed")
    N, K = codes.shape[0], codes.shape[1] * 2
    spec.require_whole_blocks("the codes describe a matrix", N, K)
    of_matrix = torch.float32 if spec.has_global_scale else None
    return [
        ("codes", torch.uint8, (N, K // 2)),
        ("block_scales", spec.scale_dtype, (N, K // spec.block)),
        ("global_scale", of_matrix, ()),
        ("encode_scale", of_matrix, ()),
    ]


def _check_tensor(
    name: str,
    tensor: Tensor | None,
    dtype: torch.dtype | None,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    if dtype is None:
        if tensor is not None:
            raise ValueError(f"{name} is given; this format has none")
        return
    if tensor is None:
        raise ValueError(f"{name} is missing; it must be {dtype} of shape {shape}")
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; "
            f"it must be {dtype} of shape {shape}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; the codes are on {device}")


def _check_scale_values(weight: QuantizedWeight) -> None:
    for name, tensor in weight.tensors().items():
        if name == "codes":
            continue
        integers, most = _MOST_BITS[tensor.dtype]
        low, high = torch.aminmax(tensor.view(integers))
        if int(low) < 0 or int(high) > most:
            raise ValueError(f"{weight.format} {name} holds NaN, infinity or a negative scale")


def random_weight(format: str, N: int, K: int, generator: torch.Generator) -> QuantizedWeight:
    """Return random codes and scales, (N, K), that spread like a trained weight's.

    On the generator's device; `ValueError` unless K is a multiple of the format's block.
    """
    spec, device = format_named(format), generator.device
    spec.require_whole_blocks("a random weight is", N, K)

    def integers(low: int, high: int, columns: int) -> Tensor:
        return torch.randint(
            low, high, (N, columns), generator=generator, dtype=torch.uint8, device=device
        )

    codes = integers(0, 256, K // 2)
    spread = torch.tensor(spec.values).square().mean().sqrt().item()
    if spec.scale_dtype == FLOAT32:
        scales = torch.rand(N, K // spec.block, generator=generator, device=device) + 0.5
        scales *= TRAINED_SPREAD / spread
    else:
        scales = integers(*_TRAINED_SCALES[spec.scale_dtype], K // spec.block)
    scales = scales.view(spec.scale_dtype)
    decode = torch.tensor(TRAINED_SPREAD / (spread * 200.0), device=device)
    whole = decode if spec.has_global_scale else None
    return QuantizedWeight(format=format, codes=codes, block_scales=scales, global_scale=whole)


def pack_codes(codes: Tensor) -> Tensor:
    """Pack codes two per byte, the even element in the low nibble.

    Parameters
    ----------
    codes : Tensor, (..., K), uint8
        Values 0 to 15; K even.

    Returns
    -------
    Tensor, (..., K / 2), uint8
    """
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise ValueError(
            f"codes are {codes.dtype} with last dimension {codes.shape[-1]}; "
            "packing needs uint8 and an even number"
        )
    # As one int16 the pair reads 0x0h0l; folding the high nibble down gives 0x..hl.
    pairs = codes.contiguous().view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def swap_nibbles(packed: Tensor) -> Tensor:
    """Exchange the two codes of every byte: from our order to bitsandbytes' and back."""
    return (packed << 4) | (packed >> 4)


@lru_cache(maxsize=64)
def codebook(format: str, device: torch.device) -> Tensor:
    """Return the values of a format's sixteen codes before scaling, (16,), float32."""
    return torch.tensor(FORMATS[format].values, dtype=torch.float32).to(device)


@lru_cache(maxsize=64)
def byte_table(format: str, device: torch.device) -> Tensor:
    """Return the two values of every possible byte of packed codes, (256, 2) float32."""
    values = codebook(format, torch.device("cpu"))
    byte = torch.arange(256)
    return torch.stack((values[byte & 0xF], values[byte >> 4]), dim=-1).to(device)


@lru_cache(maxsize=16)
def e8m0_table(device: torch.device) -> Tensor:
    """Return the value of every E8M0 exponent, (256,) float32: 2**(e - 127), NaN for 255."""
    # ldexp would flush 2**-127 to zero on the way; it is a float32 subnormal, so write its bits.
    bits = torch.arange(256, dtype=torch.int32) << 23
    bits[0] = 1 << 22
    bits[255] = 0x7FC00000
    return bits.view(torch.float32).to(device)
