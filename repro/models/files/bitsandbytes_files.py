"""The NF4 layout of bitsandbytes, as its files hold it.

A projection `P` of shape (N, K) is four tensors:

========================================  ====================  =================================
tensor                                    dtype, shape          meaning
========================================  ====================  =================================
`P.weight`                                uint8, (N * K/2, 1)   two codes per byte, even element
                                                                *high*, rows one after another
`P.weight.absmax`                         float32, (N * K/64,)  block scales
`P.weight.quant_map`                      float32, (16,)        the values of the codes
`P.weight.quant_state.bitsandbytes__nf4`  uint8, (n,)           JSON: type, block, dtype, shape
========================================  ====================  =================================

Written is this. Read are also the two other things that its files may be:

* codes stored under another dtype (`bnb_4bit_quant_storage`: bfloat16, float16 or float32, so that
  FSDP can shard them with the rest): the same bytes, (N * K/2 / itemsize, 1);
* scales quantised once more (`bnb_4bit_use_double_quant`): `P.weight.absmax` is then uint8, and
  there are `P.weight.nested_absmax`, float32, one per 256 scales, `P.weight.nested_quant_map`,
  float32 (256,), and in the JSON `nested_blocksize`, `nested_dtype` and `nested_offset`.

`config.json` carries a `quantization_config` that transformers reads to build its `Linear4bit`. The
tensors decide how a projection is stored, as they do for transformers.

Easy to get wrong: the even element is in the high half of a byte, in `QuantizedWeight` in the low
half; read the wrong way, weights are plausible and false. Source: the layout as bitsandbytes 0.50
and transformers 5.17 write it. Neither is imported here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kernels.formats import FORMATS, NESTED_BLOCK, QuantizedWeight, dynamic_codebook, swap_nibbles
from repro.models.decoder import projection_names
from repro.models.files.tensor_files import CheckpointError, TensorSpec, WeightSource

NAME: Final = "bitsandbytes-nf4"
METHOD: Final = "bitsandbytes"
CODES, SCALES, VALUES, STATE = (
    "weight",
    "weight.absmax",
    "weight.quant_map",
    "weight.quant_state.bitsandbytes__nf4",
)
NESTED_SCALES, NESTED_VALUES = "weight.nested_absmax", "weight.nested_quant_map"
# Under which codes may be stored; the first is written.
_STORAGE: Final = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
_SETTINGS: Final = {
    "quant_method": METHOD,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_compute_dtype": "bfloat16",
    "llm_int8_skip_modules": ["lm_head"],
}


def quantization_config() -> dict[str, Any]:
    """Return the `quantization_config` of `config.json`."""
    return dict(_SETTINGS)


def stored_format(config: Mapping[str, Any], where: Path, num_layers: int) -> str:
    """Return `nf4` where a `quantization_config` says that the projections are, and no others.

    Raises
    ------
    CheckpointError
        Naming the first field that differs, its value, and the value that is read here.
    """
    for field in ("load_in_4bit", "bnb_4bit_quant_type"):
        if config.get(field) != _SETTINGS[field]:
            raise CheckpointError(
                f"{where}: quantization_config.{field} is {config.get(field)!r}; NF4 read here "
                f"needs {_SETTINGS[field]!r}"
            )
    for pattern in config.get("llm_int8_skip_modules") or ():
        for name in projection_names(num_layers):
            # By part of a name in older transformers, from its start or by its end in newer ones.
            if pattern in name or re.match(pattern, name):
                raise CheckpointError(
                    f"{where}: quantization_config.llm_int8_skip_modules holds {pattern!r}, which "
                    f"leaves {name} in 16 bits; read here are checkpoints with every projection "
                    "in NF4"
                )
    return "nf4"


def packed_specs(projection: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    """Return the tensors of a projection of `shape` (N, K) by full name.

    Raises
    ------
    ValueError
        When K is not a multiple of the block.
    """
    N, K = shape
    block = FORMATS["nf4"].block
    if K % block:
        raise ValueError(f"{projection}.weight has K = {K}; NF4 needs a multiple of {block}")
    return {
        f"{projection}.{CODES}": TensorSpec(dtype=torch.uint8, shape=(N * K // 2, 1)),
        f"{projection}.{SCALES}": TensorSpec(dtype=torch.float32, shape=(N * K // block,)),
        f"{projection}.{VALUES}": TensorSpec(dtype=torch.float32, shape=(16,)),
        f"{projection}.{STATE}": TensorSpec(dtype=torch.uint8, shape=tuple(_state(shape).shape)),
    }


def packed_tensors(projection: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of a projection by full name, as the file holds them.

    Raises
    ------
    ValueError
        When the weight is not NF4 with float32 block scales.
    """
    if weight.format != "nf4" or weight.double_quant:
        what = "double quantised " if weight.double_quant else ""
        raise ValueError(f"{projection} is {what}{weight.format}; needed is plain nf4")
    return {
        f"{projection}.{CODES}": swap_nibbles(weight.codes).reshape(-1, 1),
        f"{projection}.{SCALES}": weight.block_scales.reshape(-1),
        f"{projection}.{VALUES}": _values().to(weight.device),
        f"{projection}.{STATE}": _state(weight.shape).to(weight.device),
    }


def read_packed(source: WeightSource, projection: str, shape: tuple[int, int]) -> QuantizedWeight:
    """Return a projection's codes and scales exactly as the file holds them, on the CPU.

    Raises
    ------
    CheckpointError
        When a tensor is missing, has another dtype or shape, or says other values or another state
        than NF4's; when a scale is not a finite number.
    """
    N, K = shape
    blocks = N * K // FORMATS["nf4"].block
    nested = source.spec(f"{projection}.{SCALES}").dtype == torch.uint8
    _require_values(source, f"{projection}.{VALUES}", _values(), shape)
    state = _read_state(source, f"{projection}.{STATE}", shape, nested)
    scale_dtype = torch.uint8 if nested else torch.float32
    scales = _read(source, f"{projection}.{SCALES}", {scale_dtype: (blocks,)})
    fields = {
        "codes": swap_nibbles(_read_codes(source, f"{projection}.{CODES}", shape)),
        "block_scales": scales.reshape(N, K // FORMATS["nf4"].block),
    }
    if nested:
        codebook = dynamic_codebook(torch.device("cpu"))
        _require_values(source, f"{projection}.{NESTED_VALUES}", codebook, shape)
        second = {torch.float32: (-(-blocks // NESTED_BLOCK),)}
        fields["nested_absmax"] = _read(source, f"{projection}.{NESTED_SCALES}", second)
        fields["nested_offset"] = torch.tensor(state["nested_offset"], dtype=torch.float32)
    try:
        return QuantizedWeight.from_tensors("nf4", fields, shape)
    except ValueError as error:
        raise CheckpointError(f"{source.where(f'{projection}.{SCALES}')}: {error}") from error


def _read(source: WeightSource, name: str, needed: Mapping[torch.dtype, tuple[int, ...]]) -> Tensor:
    """Return a tensor that has one of the dtypes and the shape that goes with it."""
    spec = source.spec(name)
    if needed.get(spec.dtype) != spec.shape:
        known = " or ".join(f"{dtype} {shape}" for dtype, shape in needed.items())
        raise CheckpointError(
            f"{source.where(name)} is {spec.dtype} {spec.shape}; the model needs {known}"
        )
    return source.read(name)


def _read_codes(source: WeightSource, name: str, shape: tuple[int, int]) -> Tensor:
    """Return bitsandbytes' codes, (N, K/2) uint8, whatever dtype their bytes are stored under."""
    N, K = shape
    nbytes = N * K // 2
    needed = {dtype: (nbytes // dtype.itemsize, 1) for dtype in _STORAGE}
    return _read(source, name, needed).contiguous().view(torch.uint8).reshape(N, K // 2)


def _require_values(
    source: WeightSource, name: str, values: Tensor, shape: tuple[int, int]
) -> None:
    """Raise unless a tensor holds exactly these float32 values."""
    if not torch.equal(_read(source, name, {torch.float32: tuple(values.shape)}), values):
        raise CheckpointError(f"{source.where(name)} is not that of an NF4 matrix {shape}")


def _read_state(
    source: WeightSource, name: str, shape: tuple[int, int], nested: bool
) -> dict[str, Any]:
    """Return the file's state of a matrix, checked field by field."""
    needed: dict[str, Any] = {
        "quant_type": ("nf4",),
        "blocksize": (FORMATS["nf4"].block,),
        "dtype": ("bfloat16", "float16", "float32"),
        "shape": (list(shape),),
    }
    if nested:
        needed |= {"nested_blocksize": (NESTED_BLOCK,), "nested_dtype": ("float32",)}
    try:
        state = json.loads(source.read(name).numpy().tobytes())
        said = {field: state[field] for field in needed}
        if nested:
            state["nested_offset"] = float(state["nested_offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{source.where(name)} is not a state of NF4: {error!r}") from error
    for field, value in said.items():
        if value not in needed[field]:
            known = " or ".join(map(str, needed[field]))
            raise CheckpointError(f"{source.where(name)}: {field} is {value}; needed is {known}")
    return dict(state)


def _values() -> Tensor:
    return torch.tensor(FORMATS["nf4"].values, dtype=torch.float32)


def _state(shape: tuple[int, int]) -> Tensor:
    """Return bitsandbytes' state of a matrix, as bytes of JSON, (n,) uint8."""
    said = {
        "quant_type": "nf4",
        "blocksize": FORMATS["nf4"].block,
        "dtype": "bfloat16",
        "shape": list(shape),
    }
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
