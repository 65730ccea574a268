"""The NVFP4 and MXFP4 weight-only layouts of the compressed-tensors project, as files hold them.

A projection `P` of a checkpoint in the format `nvfp4-pack-quantized` is three tensors:

==========================  =====================  ==============================================
tensor                      dtype, shape           meaning
==========================  =====================  ==============================================
`P.weight_packed`           uint8, (N, K/2)        two E2M1 codes per byte, even one low, sign
                                                   in bit 3 of the nibble
`P.weight_scale`            float8_e4m3fn,         block scale s, block of 16 along K
                            (N, K/16)
`P.weight_global_scale`     float32, (1,)          g, the *encode* scale: w = code * s / g
==========================  =====================  ==============================================

In the format `mxfp4-pack-quantized` it is two: `P.weight_packed` as above, and `P.weight_scale`,
uint8 (N, K/32), the biased exponent e of a block of 32: w = code * 2^(e - 127). There is no global
scale.

`config.json` carries a `quantization_config` that names the scheme (NVFP4A16, MXFP4A16: no
activation is quantised) and what is left alone (`lm_head`). It is read strictly: every field is
known and harmless, or the checkpoint is refused with the field's name. A transform (Hadamard
rotations that the model must undo), a projection on the ignore list or missing from the targets, a
quantised KV cache change what the tensors mean while their names stay.

Easy mistakes
-------------
* g points the other way from `QuantizedWeight.global_scale`; it is its `encode_scale`, kept to the
  bit, since 1/g rounded to float32 does not give g back.
* Inference engines take one g for q, k, v and one for gate, up. A file written here has equal
  values there; one that others wrote may not, and is loaded as it is.
* A NaN block scale (bytes 0x7F and 0xFF; of MXFP4, 255) spoils a block and, a few layers on, every
  logit, so it is looked for here, where file and tensor are still known.

Source: the layout as compressed-tensors 0.20 writes it; docs/paper_and_code.md, row 18.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from kernels.formats import FORMATS, QuantizedWeight
from repro.models.decoder import projection_names
from repro.models.files.tensor_files import CheckpointError, TensorSpec, WeightSource

PACKED, SCALE, GLOBAL_SCALE = "weight_packed", "weight_scale", "weight_global_scale"
# compressed-tensors' release whose layout this module follows; a field of config.json.
LAYOUT_VERSION: Final = "0.20.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the files of one 4-bit format look.

    Attributes
    ----------
    name
        compressed-tensors' name of it, the `format` of a `quantization_config`.
    strategy
        Its name for how blocks share scales.
    scale_dtype
        Of the block scales; the blocks are those of `kernels.formats`.
    """

    name: str
    strategy: str
    scale_dtype: torch.dtype


LAYOUTS: Final[Mapping[str, Layout]] = MappingProxyType(
    {
        "nvfp4": Layout(
            name="nvfp4-pack-quantized",
            strategy="tensor_group",
            scale_dtype=torch.float8_e4m3fn,
        ),
        "mxfp4": Layout(name="mxfp4-pack-quantized", strategy="group", scale_dtype=torch.uint8),
    }
)


def _weight_arguments(weight_format: str) -> dict[str, Any]:
    return {
        "num_bits": 4,
        "type": "float",
        "strategy": LAYOUTS[weight_format].strategy,
        "group_size": FORMATS[weight_format].block,
        "symmetric": True,
        "dynamic": False,
    }


def quantization_config(weight_format: str) -> dict[str, Any]:
    """Return the `quantization_config` of `config.json` for 4-bit weights, 16-bit activations."""
    layout = LAYOUTS[weight_format]
    scale_dtype = str(layout.scale_dtype)
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout.name,
        "version": LAYOUT_VERSION,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": layout.name,
                "weights": {**_weight_arguments(weight_format), "scale_dtype": scale_dtype},
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


# Fields of a `quantization_config` and what they may be; None stands for absent, null and empty.
_FIELDS: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "quantization_status": ("compressed",),
        "kv_cache_scheme": (None,),
        "sparsity_config": (None, {"format": "dense"}),
        "transform_config": (None,),
        "moe_sparsity_config": (None,),
    }
)
# Read elsewhere, or without a meaning for the tensors.
_FREE_FIELDS: Final = frozenset(
    [
        "quant_method",
        "format",
        "config_groups",
        "ignore",
        "version",
        "global_compression_ratio",
        "run_compressed",
        "dtype",
    ]
)
_GROUP_FIELDS: Final = frozenset(
    ["targets", "weights", "format", "input_activations", "output_activations"]
)
# How scales were found does not show in the layout. The order of columns in which GPTQ works
# ("weight", by its older name "static") does not either; that by "group" permutes them.
_FREE_ARGUMENTS: Final = frozenset(["observer", "observer_kwargs", "zp_dtype"])
_ARGUMENTS: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {"actorder": (None, "weight", "static"), "block_structure": (None,)}
)


def stored_format(config: Mapping[str, Any], where: Path, num_layers: int) -> str:
    """Return the format of a `quantization_config` that says 4-bit projections and nothing else.

    Parameters
    ----------
    num_layers
        Of the decoder, all of whose projections must be quantised.

    Raises
    ------
    CheckpointError
        Naming the first field that differs, its value, and the value that is read here.
    """
    method = config.get("quant_method")
    if method != "compressed-tensors":
        raise CheckpointError(
            f"{where}: quant_method is {method!r}; this project reads 'compressed-tensors' NVFP4 "
            "and MXFP4, 'bitsandbytes' NF4, or unquantised weights, which it quantises itself"
        )
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{where}: quantization_config has no config_groups")
    formats = {_format_of(group, name, config, where) for name, group in groups.items()}
    if len(formats) > 1:
        raise CheckpointError(f"{where}: weights in {' and '.join(sorted(formats))}; one is read")
    if config.get("kv_cache_scheme"):
        raise CheckpointError(
            f"{where}: the KV cache is quantised (kv_cache_scheme), not read here"
        )
    _require_fields(config, _FIELDS, _FREE_FIELDS, "quantization_config", where)
    _require_all_quantised(config, groups, num_layers, where)
    return formats.pop()


def _require_fields(
    values: Mapping[str, Any],
    known: Mapping[str, tuple[Any, ...]],
    free: Iterable[str],
    name: str,
    where: Path,
) -> None:
    """Raise `CheckpointError` for a field that is neither free nor one of its known values."""
    for field in values.keys() - set(free):
        value = values[field] if values[field] not in ({}, [], False) else None
        allowed = known.get(field, (None,))
        if value not in allowed:
            read = " or ".join(map(repr, allowed))
            raise CheckpointError(
                f"{where}: {name}.{field} is {values[field]!r}; only {read} is read here"
            )


def _require_all_quantised(
    config: Mapping[str, Any], groups: Mapping[str, Any], num_layers: int, where: Path
) -> None:
    """Raise unless targets and ignore list leave every projection quantised, and no `lm_head`."""
    targets = [target for group in groups.values() for target in group.get("targets") or ()]
    ignored = config.get("ignore") or []
    for name in (*projection_names(num_layers), "lm_head"):
        quantised = _matches(name, targets) and not _matches(name, ignored)
        if quantised != (name != "lm_head"):
            raise CheckpointError(
                f"{where}: {name} is {'' if quantised else 'not '}quantised, by "
                f"targets {targets} and ignore {ignored}; read here are checkpoints with every "
                "projection in 4 bits and lm_head in 16"
            )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a linear layer's name or class is among compressed-tensors' patterns."""
    return any(
        pattern in (name, "Linear")
        or (pattern.startswith("re:") and re.match(pattern[3:], name) is not None)
        for pattern in patterns
    )


def _format_of(group: Any, name: str, config: Mapping[str, Any], where: Path) -> str:
    """Return the format of one group of a `quantization_config`."""
    if not isinstance(group, Mapping):
        raise CheckpointError(f"{where}: config_groups.{name} is {group!r}; needed is an object")
    named = group.get("format") or config.get("format")
    of_layout = {layout.name: key for key, layout in LAYOUTS.items()}
    if named not in of_layout:
        read = " and ".join(map(repr, of_layout))
        raise CheckpointError(f"{where}: {name}.format is {named!r}; {read} are read here")
    weight_format = of_layout[named]
    if group.get("input_activations") or group.get("output_activations"):
        raise CheckpointError(
            f"{where}: {name} quantises activations too; only weights in 4 bits are read here"
        )
    _require_fields(group, {}, _GROUP_FIELDS, name, where)
    weights = group.get("weights") or {}
    needed = _weight_arguments(weight_format)
    for field, value in needed.items():
        if weights.get(field) != value:
            raise CheckpointError(
                f"{where}: {name}.weights.{field} is {weights.get(field)!r}; "
                f"{weight_format.upper()} weight-only needs {value!r}"
            )
    scale_dtype = {"scale_dtype": (None, str(LAYOUTS[weight_format].scale_dtype))}
    free = {*needed, *_FREE_ARGUMENTS}
    _require_fields(weights, {**_ARGUMENTS, **scale_dtype}, free, f"{name}.weights", where)
    return weight_format


def packed_specs(
    projection: str, shape: tuple[int, int], weight_format: str
) -> dict[str, TensorSpec]:
    """Return the tensors of a projection of `shape` (N, K) by full name.

    Raises
    ------
    ValueError
        When K is not a multiple of the format's block.
    """
    N, K = shape
    block = FORMATS[weight_format].block
    if K % block:
        raise ValueError(
            f"{projection}.weight has K = {K}; {weight_format.upper()} needs a multiple of {block}"
        )
    scale_dtype = LAYOUTS[weight_format].scale_dtype
    specs = {
        f"{projection}.{PACKED}": TensorSpec(dtype=torch.uint8, shape=(N, K // 2)),
        f"{projection}.{SCALE}": TensorSpec(dtype=scale_dtype, shape=(N, K // block)),
    }
    if weight_format == "nvfp4":
        specs[f"{projection}.{GLOBAL_SCALE}"] = TensorSpec(dtype=torch.float32, shape=(1,))
    return specs


def read_packed(
    source: WeightSource, projection: str, shape: tuple[int, int], weight_format: str
) -> QuantizedWeight:
    """Return a projection's codes and scales exactly as the file holds them, on the CPU.

    Raises
    ------
    CheckpointError
        When a tensor is missing, has another dtype or shape, or a scale is not a finite number.
    """
    tensors: dict[str, Tensor] = {}
    for name, spec in packed_specs(projection, shape, weight_format).items():
        stored = source.spec(name)
        if stored.dtype != spec.dtype:
            raise CheckpointError(
                f"{source.where(name)} has dtype {stored.dtype}; needed is {spec.dtype}"
            )
        scalar = name.endswith(GLOBAL_SCALE) and stored.shape == ()
        if stored.shape != spec.shape and not scalar:
            raise CheckpointError(
                f"{source.where(name)} has shape {stored.shape}; the model needs {spec.shape}"
            )
        tensors[name] = source.read(name)
    scale_name = f"{projection}.{SCALE}"
    fields = {"codes": tensors[f"{projection}.{PACKED}"], "block_scales": tensors[scale_name]}
    if weight_format == "nvfp4":
        magnitudes = tensors[scale_name].view(torch.uint8) & 0x7F
        if bool((magnitudes == 0x7F).any()):
            raise CheckpointError(f"{source.where(scale_name)} holds a NaN block scale")
        fields["encode_scale"] = _global_scale(source, f"{projection}.{GLOBAL_SCALE}", tensors)
    try:
        return QuantizedWeight.from_tensors(weight_format, fields, shape)
    except ValueError as error:
        raise CheckpointError(f"{source.where(scale_name)}: {error}") from error


def _global_scale(source: WeightSource, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return NVFP4's encode scale, (), checked."""
    encode = tensors[name].reshape(())
    if not bool(torch.isfinite(encode)) or not bool(encode > 0):
        raise CheckpointError(
            f"{source.where(name)} is {float(encode)}; a global scale is finite and positive"
        )
    return encode


def packed_tensors(projection: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of a projection by full name, as the file holds them.

    Raises
    ------
    ValueError
        When the weight's format has no layout here.
    """
    if weight.format not in LAYOUTS:
        raise ValueError(
            f"{projection} is {weight.format}; there are layouts for {' and '.join(LAYOUTS)} only"
        )
    tensors = {f"{projection}.{PACKED}": weight.codes, f"{projection}.{SCALE}": weight.block_scales}
    if weight.encode_scale is not None:
        tensors[f"{projection}.{GLOBAL_SCALE}"] = weight.encode_scale.reshape(1)
    return tensors
