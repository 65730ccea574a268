"""Which layout holds a 4-bit format in files: compressed-tensors' or bitsandbytes'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kernels.formats import FORMATS, QuantizedWeight
from repro.models.files import bitsandbytes_files, compressed_tensors
from repro.models.files.tensor_files import CheckpointError, TensorFile, TensorSpec

# The layout's name by format.
LAYOUTS: Final = compressed_tensors.LAYOUTS | bitsandbytes_files.LAYOUTS


def quantization_config(weight_format: str) -> dict[str, Any]:
    """Return the `quantization_config` of `config.json`."""
    if weight_format in bitsandbytes_files.LAYOUTS:
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
    N, K = shape
    spec = FORMATS[weight_format]
    spec.require_whole_blocks(f"{projection}.weight is", N, K)
    empty = partial(torch.empty, device="meta")
    weight = QuantizedWeight(
        format=weight_format,
        codes=empty((N, K // 2), dtype=torch.uint8),
        block_scales=empty((N, K // spec.block), dtype=spec.scale_dtype),
        encode_scale=empty((), dtype=torch.float32) if spec.has_global_scale else None,
    )
    return {
        name: TensorSpec(dtype=tensor.dtype, shape=tuple(tensor.shape))
        for name, tensor in packed_tensors(projection, weight).items()
    }


def packed_tensors(projection: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of a projection by full name, as the file holds them."""
    theirs = weight.format in bitsandbytes_files.LAYOUTS
    packed = bitsandbytes_files.packed if theirs else compressed_tensors.packed
    return {f"{projection}.{leaf}": tensor for leaf, tensor in packed(weight).items()}


def read_packed(
    source: TensorFile, projection: str, shape: tuple[int, int], weight_format: str
) -> QuantizedWeight:
    """Return a projection's codes and scales exactly as the file holds them, on the CPU.

    A `CheckpointError` names a tensor that is missing or does not fit.
    """

    def where(leaf: str) -> str:
        return source.where(f"{projection}.{leaf}")

    specs = packed_specs(projection, shape, weight_format)
    state = f"{projection}.{bitsandbytes_files.STATE}"
    if state in specs:  # others' states are JSON of another length
        specs[state] = replace(specs[state], shape=source.spec(state).shape)
    tensors = {}
    for name, spec in specs.items():
        stored = source.spec(name)
        if stored != spec:
            raise CheckpointError(
                f"{source.where(name)} is {stored.dtype} {stored.shape}; the model needs "
                f"{spec.dtype} {spec.shape}"
            )
        tensors[name.removeprefix(f"{projection}.")] = source.read(name)
    if weight_format in bitsandbytes_files.LAYOUTS:
        scale = bitsandbytes_files.SCALES
        fields = bitsandbytes_files.unpacked(tensors, where, shape)
    else:
        scale, fields = compressed_tensors.SCALE, compressed_tensors.unpacked(tensors)
    try:
        return QuantizedWeight.from_tensors(weight_format, fields, shape)
    except ValueError as error:
        raise CheckpointError(f"{where(scale)}: {error}") from error
