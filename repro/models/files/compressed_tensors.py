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
empty, says what is written here or means nothing for the tensors, or the checkpoint is refused with
the field's name. A transform (Hadamard rotations that the model must undo) or a quantised KV cache
changes what the tensors mean while their names stay.

Easy mistakes
-------------
* g points the other way from `QuantizedWeight.global_scale`; it is its `encode_scale`, kept to the
  bit, since 1/g rounded to float32 does not give g back.
* Inference engines take one g for q, k, v and one for gate, up. A file written here has equal
  values there; one that others wrote may not, and is loaded as it is.
* A NaN block scale (bytes 0x7F and 0xFF; of MXFP4, 255) spoils a block and, a few layers on, every
  logit, so it is looked for while file and tensor are still known.

Source: the layout as compressed-tensors 0.20 writes it; docs/background.md, row 18.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from kernels.formats import FORMATS, QuantizedWeight
from repro.models.files.tensor_files import CheckpointError

PACKED, SCALE, GLOBAL_SCALE = "weight_packed", "weight_scale", "weight_global_scale"
# compressed-tensors' release whose layout this module follows; a field of config.json.
LAYOUT_VERSION: Final = "0.20.0"


# compressed-tensors' names of the formats that it holds.
LAYOUTS: Final = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}
# Fields that are read by themselves, mean nothing for the tensors, or show in their names.
_FREE: Final = frozenset(
    ("config_groups", "format", "version", "run_compressed", "dtype", "ignore")
)
_FREE_OF_GROUP: Final = frozenset(("weights", "format", "targets"))
_FREE_OF_WEIGHTS: Final = frozenset(("observer", "observer_kwargs", "zp_dtype", "scale_dtype"))


def quantization_config(weight_format: str) -> dict[str, Any]:
    """Return the `quantization_config` of `config.json` for 4-bit weights, 16-bit activations."""
    layout, spec = LAYOUTS[weight_format], FORMATS[weight_format]
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group" if spec.has_global_scale else "group",
        "group_size": spec.block,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": str(spec.scale_dtype),
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "version": LAYOUT_VERSION,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": layout,
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def stored_format(config: Mapping[str, Any], where: Path) -> str:
    """Return the format of a `quantization_config` that says 4-bit projections and nothing else.

    A `CheckpointError` names the first field that differs, its value, and the one needed.
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
    weight_format = formats.pop()
    ours = quantization_config(weight_format)
    _require_same(config, ours, _FREE, "quantization_config", where)
    return weight_format


def _format_of(group: Any, name: str, config: Mapping[str, Any], where: Path) -> str:
    """Return the format of one group of a `quantization_config`."""
    if not isinstance(group, Mapping):
        raise CheckpointError(f"{where}: config_groups.{name} is {group!r}; needed is an object")
    named = group.get("format") or config.get("format")
    of_layout = {layout: key for key, layout in LAYOUTS.items()}
    if named not in of_layout:
        read = " and ".join(map(repr, of_layout))
        raise CheckpointError(f"{where}: {name}.format is {named!r}; {read} are read here")
    ours = quantization_config(of_layout[named])["config_groups"]["group_0"]
    _require_same(group, ours, _FREE_OF_GROUP, name, where)
    weights = group.get("weights") or {}
    _require_same(weights, ours["weights"], _FREE_OF_WEIGHTS, f"{name}.weights", where)
    return of_layout[named]


def _require_same(
    values: Mapping[str, Any], ours: Mapping[str, Any], free: frozenset[str], name: str, where: Path
) -> None:
    """Raise `CheckpointError` for a field that is not free and differs from ours, if not empty."""
    for field in sorted((values.keys() | ours.keys()) - free):
        if (values.get(field) or None) != (ours.get(field) or None):
            raise CheckpointError(
                f"{where}: {name}.{field} is {values.get(field)!r}; only {ours.get(field)!r} is "
                "read here"
            )


def packed(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of a projection by the ends of their names."""
    tensors = {PACKED: weight.codes, SCALE: weight.block_scales}
    if weight.encode_scale is not None:
        tensors[GLOBAL_SCALE] = weight.encode_scale.reshape(1)
    return tensors


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a `QuantizedWeight`'s tensors, of those that `packed` names."""
    fields = {"codes": tensors[PACKED], "block_scales": tensors[SCALE]}
    if GLOBAL_SCALE in tensors:
        fields["encode_scale"] = tensors[GLOBAL_SCALE].reshape(())
    return fields
