"""Which layout holds a 4-bit format in files: compressed-tensors' or bitsandbytes'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from kernels.formats import QuantizedWeight
from repro.models.files import bitsandbytes_files, compressed_tensors
from repro.models.files.tensor_files import TensorFile, TensorSpec

# The layout's name by format.
LAYOUTS: Final[Mapping[str, str]] = {
    **{name: layout for name, (layout, _) in compressed_tensors.LAYOUTS.items()},
    "nf4": bitsandbytes_files.NAME,
}


def quantization_config(weight_format: str) -> dict[str, Any]:
    """Return the `quantization_config` of `config.json`."""
    if weight_format == "nf4":
        return bitsandbytes_files.quantization_config()
    return compressed_tensors.quantization_config(weight_format)


def stored_format(config: Mapping[str, Any], where: Path) -> str:
    """Return the format that a `quantization_config` says; raise `CheckpointError` for others."""
    if config.get("quant_method") == bitsandbytes_files.METHOD:
        return bitsandbytes_files.stored_format(config, where)
    return compressed_tensors.stored_format(config, where)


def packed_specs(
    projection: str, shape: tuple[int, int], weight_format: str
) -> dict[str, TensorSpec]:
    """Return the tensors of a projection of `shape` (N, K) by full name."""
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
    """Return a projection's codes and scales exactly as the file holds them, on the CPU."""
    if weight_format == "nf4":
        return bitsandbytes_files.read_packed(source, projection, shape)
    return compressed_tensors.read_packed(source, projection, shape, weight_format)
