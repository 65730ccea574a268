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

This is written, and read; scales that are quantised once more (`bnb_4bit_use_double_quant`) and
codes stored under another dtype are refused.

`config.json` carries a `quantization_config` that transformers reads to build its `Linear4bit`.

Easy to get wrong: the even element is in the high half of a byte, in `QuantizedWeight` in the low
half; read the wrong way, weights are plausible and false. Source: the layout as bitsandbytes 0.50
and transformers 5.17 write it. Neither is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kernels.formats import FORMATS, QuantizedWeight, swap_nibbles
from repro.models.files.tensor_files import CheckpointError

# Names of the formats that it holds.
LAYOUTS: Final = {"nf4": "bitsandbytes-nf4"}
METHOD: Final = "bitsandbytes"
CODES, SCALES, VALUES, STATE = (
    "weight",
    "weight.absmax",
    "weight.quant_map",
    "weight.quant_state.bitsandbytes__nf4",
)
# The `quantization_config` of `config.json`.
SETTINGS: Final = {
    "quant_method": METHOD,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_compute_dtype": "bfloat16",
    "llm_int8_skip_modules": ["lm_head"],
}


def stored_format(config: Mapping[str, Any], where: Path) -> str:
    """Return `nf4` if a `quantization_config` says so; `CheckpointError` names what differs."""
    for field in ("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"):
        if config.get(field, False) != SETTINGS[field]:
            raise CheckpointError(
                f"{where}: quantization_config.{field} is {config.get(field)!r}; NF4 read here "
                f"needs {SETTINGS[field]!r}"
            )
    return "nf4"


def packed(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of a projection in NF4 by the ends of their names."""
    state = json.dumps(_described(weight.shape)).encode()
    return {
        CODES: swap_nibbles(weight.codes).reshape(-1, 1),
        SCALES: weight.block_scales.reshape(-1),
        VALUES: _values().to(weight.device),
        STATE: torch.tensor(list(state), dtype=torch.uint8).to(weight.device),
    }


def unpacked(
    tensors: Mapping[str, Tensor], where: Callable[[str], str], shape: tuple[int, int]
) -> dict[str, Tensor]:
    """Return a `QuantizedWeight`'s tensors; raise, at `where`, if they are not an NF4 matrix's."""
    if not torch.equal(tensors[VALUES], _values()):
        raise CheckpointError(f"{where(VALUES)} is not that of an NF4 matrix {shape}")
    needed = _described(shape)
    del needed["dtype"]  # in which others compute
    try:
        state = json.loads(tensors[STATE].numpy().tobytes())
        said = {field: state[field] for field in needed}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where(STATE)} is not a state of NF4: {error!r}") from error
    for field, value in said.items():
        if value != needed[field]:
            raise CheckpointError(f"{where(STATE)}: {field} is {value}; needed is {needed[field]}")
    return {
        "codes": swap_nibbles(tensors[CODES]).reshape(shape[0], -1),
        "block_scales": tensors[SCALES].reshape(shape[0], -1),
    }


def _values() -> Tensor:
    return torch.tensor(FORMATS["nf4"].values, dtype=torch.float32)


def _described(shape: tuple[int, int]) -> dict[str, Any]:
    """Return bitsandbytes' state of a matrix, which its file holds as bytes of JSON."""
    block = FORMATS["nf4"].block
    return {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
