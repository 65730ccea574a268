"""Which layout holds a 4-bit format in files: compressed-tensors' or bitsandbytes'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from kernels.formats import FORMATS, QuantizedWeight
from repro.models.files import bitsandbytes_files, compressed_tensors
from repro.models.files.tensor_files import CheckpointError, TensorFile, TensorSpec

# The layout's name by format.
LAYOUTS: Final[Mapping[str, str]] = {
    **{name: layout for name, (layout, _) in compressed_tensors.LAYOUTS.items()},
    "nf4": bitsandbytes_files.NAME,
}


def quantization_config(weight_format: str) -> dict[str, Any]:
    """Return the `quantization_config` of `config.json`."""
    if weight_format == "nf4":
        return dict(bitsandbytes_files.SETTINGS)
    return compressed_tensors.quantization_config(weight_format)


def stored_format(config: Mapping[str, Any], where: Path) -> str:
    """Return the format that a `quantization_config` says; raise `CheckpointError` for others."""
    if config.get("quant_method") == bitsandbytes_files.METHOD:
        return bitsandbytes_files.stored_format(config, where)
    return compressed_tensors.stored_format(config, where)


def packed_specs(
    projection: str, shape: tuple[int, int], weight_format: str
) -> dict[str, TensorSpec]:
    """Return the tensors of a projection of `shape` (N, K) by full name, K in whole blocks."""
    block = FORMATS[weight_format].block
    if shape[1] % block:
        raise ValueError(
            f"{projection}.weight has K = {shape[1]}; {weight_format.upper()} needs a multiple of "
            f"{block}"
        )
    if weight_format == "nf4":
        return bitsandbytes_files.packed_specs(projection, shape)
    return compressed_tensors.packed_specs(projection, shape, weight_format)


def packed_tensors(projection: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of a projection by full name, as the file holds them."""
    if weight.format == "nf4":
        return bitsandbytes_files.packed_tensors(projection, weight)
    return compressed_tensors.packed_tensors(projection, weight)


def read_packed(
    source: TensorFile, projection: str, shape: tuple[int, int], weight_format: str
) -> QuantizedWeight:
    """Return a projection's codes and scales exactly as the file holds them, on the CPU.

    A `CheckpointError` names a tensor that is missing or does not fit.
    """
    specs = packed_specs(projection, shape, weight_format)
    if weight_format == "nf4":
        scale = bitsandbytes_files.SCALES
        fields = bitsandbytes_files.read_fields(source, projection, shape, specs)
    else:
        scale = compressed_tensors.SCALE
        fields = compressed_tensors.read_fields(source, projection, specs)
    try:
        return QuantizedWeight.from_tensors(weight_format, fields, shape)
    except ValueError as error:
        raise CheckpointError(f"{source.where(f'{projection}.{scale}')}: {error}") from error
