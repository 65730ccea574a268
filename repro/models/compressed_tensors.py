"""The NVFP4 weight-only layout of the compressed-tensors project, as files hold it.

A projection `P` of a checkpoint in the format `nvfp4-pack-quantized` is three tensors:

==========================  =====================  ==============================================
tensor                      dtype, shape           meaning
==========================  =====================  ==============================================
`P.weight_packed`           uint8, (N, K/2)        two E2M1 codes a byte, even element low, sign
                                                   in bit 3 of the nibble
`P.weight_scale`            float8_e4m3fn,         block scale s, block of 16 along K
                            (N, K/16)
`P.weight_global_scale`     float32, (1,)          g, the *encode* scale: w = code * s / g
==========================  =====================  ==============================================

and `config.json` carries a `quantization_config` that names the scheme (NVFP4A16: no activation
is quantised) and what is left alone (`lm_head`).

Easy mistakes
-------------
* g points the other way from `QuantizedWeight.global_scale`; it is its `encode_scale`, kept to the
  bit, since 1/g rounded to float32 does not give g back.
* Inference engines take one g for q, k, v and one for gate, up. A file written here has equal
  values there; one that others wrote may not, and is loaded as it is.
* A NaN block scale (bytes 0x7F and 0xFF) spoils 16 weights and, a few layers on, every logit, so
  it is looked for here, where file and tensor are still known.

Source: the layout as compressed-tensors 0.20 writes it; docs/paper_and_code.md, row 18.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from kernels.formats import QuantizedWeight
from repro.models.tensor_files import CheckpointError, TensorSpec, WeightSource

FORMAT: Final = "nvfp4-pack-quantized"
BLOCK: Final = 16
PACKED, SCALE, GLOBAL_SCALE = "weight_packed", "weight_scale", "weight_global_scale"
# compressed-tensors' release whose layout this module follows; a field of config.json.
LAYOUT_VERSION: Final = "0.20.0"

_WEIGHT_ARGUMENTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "symmetric": True,
        "dynamic": False,
    }
)


def quantization_config() -> dict[str, Any]:
    """Return the `quantization_config` of `config.json` for NVFP4 weights, 16-bit activations."""
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": FORMAT,
        "version": LAYOUT_VERSION,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": FORMAT,
                "weights": {**_WEIGHT_ARGUMENTS, "scale_dtype": "torch.float8_e4m3fn"},
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def require_nvfp4_weights(config: Mapping[str, Any], where: Path) -> None:
    """Raise unless a `quantization_config` says NVFP4 weights and nothing else.

    Raises
    ------
    CheckpointError
        Naming the first field that differs, its value, and the value that is read here.
    """
    method = config.get("quant_method")
    if method != "compressed-tensors":
        raise CheckpointError(
            f"{where}: quant_method is {method!r}; this project reads 'compressed-tensors' NVFP4, "
            "or unquantised weights, which it quantises itself"
        )
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{where}: quantization_config has no config_groups")
    for name, group in groups.items():
        layout = group.get("format") or config.get("format")
        if layout != FORMAT:
            raise CheckpointError(f"{where}: {name}.format is {layout!r}; {FORMAT!r} is read here")
        weights = group.get("weights") or {}
        for field, needed in _WEIGHT_ARGUMENTS.items():
            if weights.get(field) != needed:
                raise CheckpointError(
                    f"{where}: {name}.weights.{field} is {weights.get(field)!r}; NVFP4 weight-only "
                    f"needs {needed!r}"
                )
        if group.get("input_activations") or group.get("output_activations"):
            raise CheckpointError(
                f"{where}: {name} quantises activations too; only weights in 4 bits are read here"
            )
    if config.get("kv_cache_scheme"):
        raise CheckpointError(f"{where}: the KV cache is quantised, which is not supported")


def packed_specs(projection: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    """Return the three tensors of a projection of `shape` (N, K) by full name.

    Raises
    ------
    ValueError
        When K is not a multiple of 16.
    """
    N, K = shape
    if K % BLOCK:
        raise ValueError(f"{projection}.weight has K = {K}; NVFP4 needs a multiple of {BLOCK}")
    return {
        f"{projection}.{PACKED}": TensorSpec(dtype=torch.uint8, shape=(N, K // 2)),
        f"{projection}.{SCALE}": TensorSpec(dtype=torch.float8_e4m3fn, shape=(N, K // BLOCK)),
        f"{projection}.{GLOBAL_SCALE}": TensorSpec(dtype=torch.float32, shape=(1,)),
    }


def read_packed(source: WeightSource, projection: str, shape: tuple[int, int]) -> QuantizedWeight:
    """Return a projection's codes and scales exactly as the file holds them, on the CPU.

    Raises
    ------
    CheckpointError
        When a tensor is missing, has another dtype or shape, or a scale is not a finite number.
    """
    tensors: dict[str, Tensor] = {}
    for name, spec in packed_specs(projection, shape).items():
        found = source.spec(name)
        if found.dtype != spec.dtype:
            raise CheckpointError(
                f"{source.where(name)} has dtype {found.dtype}; needed is {spec.dtype}"
            )
        scalar = name.endswith(GLOBAL_SCALE) and found.shape == ()
        if found.shape != spec.shape and not scalar:
            raise CheckpointError(
                f"{source.where(name)} has shape {found.shape}; the model needs {spec.shape}"
            )
        tensors[name] = source.read(name)
    scale_name, global_name = f"{projection}.{SCALE}", f"{projection}.{GLOBAL_SCALE}"
    magnitudes = tensors[scale_name].view(torch.uint8) & 0x7F
    if bool((magnitudes == 0x7F).any()):
        raise CheckpointError(f"{source.where(scale_name)} holds a NaN block scale")
    encode = tensors[global_name].reshape(())
    if not bool(torch.isfinite(encode)) or not bool(encode > 0):
        raise CheckpointError(
            f"{source.where(global_name)} is {float(encode)}; a global scale is finite and positive"
        )
    fields = {
        "codes": tensors[f"{projection}.{PACKED}"],
        "block_scales": tensors[scale_name],
        "encode_scale": encode,
    }
    try:
        return QuantizedWeight.from_tensors("nvfp4", fields, shape)
    except ValueError as error:
        raise CheckpointError(f"{source.where(scale_name)}: {error}") from error


def packed_tensors(projection: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the three tensors of a projection by full name, as the file holds them.

    Raises
    ------
    ValueError
        When the weight is not NVFP4: the layout holds nothing else.
    """
    if weight.encode_scale is None:
        raise ValueError(f"{projection} is {weight.format}; the layout {FORMAT} holds nvfp4 only")
    return {
        f"{projection}.{PACKED}": weight.codes,
        f"{projection}.{SCALE}": weight.block_scales,
        f"{projection}.{GLOBAL_SCALE}": weight.encode_scale.reshape(1),
    }
