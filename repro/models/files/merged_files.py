"""A policy written as a plain 16-bit checkpoint folder: adapters merged, codes dequantised.

Or its base alone, in its own format.

    W' = bfloat16(dequantize(W) + scaling * B A)

summed in float32 and rounded once. Every reader of the architecture loads the folder without peft
and without 4-bit kernels, and gets the policy that was trained up to that rounding.

Easy mistakes
-------------
* Merging into the 16-bit weights from which the codes were made: the adapter was trained on the
  codes, and learned to undo part of their error.
* Writing norms with their added noise (AQN): it explores and is no part of the policy. What is
  written is `weight`, never `gain()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.models.checkpoint import write_folder, write_shards
from repro.models.decoder import is_projection
from repro.models.files import stored_layouts
from repro.models.files.tensor_files import write_json
from repro.models.loading import build_on_meta, expected_specs, read_description
from repro.models.lora import base_linear, effective_weight
from repro.models.policy import Policy
from repro.models.quantized_linear import QuantizedLinear
from repro.spec.config import digest_of
from repro.spec.whole_files import appearing


def write_merged(policy: Policy, out_folder: str | Path) -> Path:
    """Write a policy's weights, adapters merged, as a new 16-bit folder; return the folder.

    Parameters
    ----------
    policy
        Loaded by `load_policy`; its config, tokenizer and companions are copied from there.
    out_folder
        Must not exist; it appears when complete.

    Raises
    ------
    ValueError
        When the policy was not loaded from a folder.
    FileExistsError
        When `out_folder` exists.
    """
    out = Path(out_folder)
    if policy.folder is None:
        raise ValueError("the policy was not loaded from a folder; its config is not known")
    with appearing(out) as temporary:
        specs = expected_specs(build_on_meta(read_description(policy.folder).config), None)
        tensors = ((name, merged_tensor(policy, name)) for name in specs)
        made = {
            "algorithm": "merged",
            "format": "bf16",
            "source": str(policy.folder),
            "source_format": policy.weight_format,
            "training": policy.training,
        }
        write_folder(policy.folder, temporary, tensors, None, made)
    return out


@torch.no_grad()
def merged_tensor(policy: Policy, name: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor of the merged checkpoint by its name there."""
    owner, _, leaf = name.rpartition(".")
    module = policy.decoder.get_submodule(owner)
    if is_projection(owner):
        if leaf == "weight":
            return effective_weight(module, dtype)
        module = base_linear(module)
    return module.get_parameter(leaf).detach().to(dtype)


def write_base(policy: Policy, folder: Path) -> str:
    """Write the base of a policy with random weights into an empty folder; return its digest."""
    decoder: Any = policy.decoder
    shards = write_shards(folder, _base_tensors(decoder))
    named = {"architectures": [type(decoder).__name__], "dtype": "bfloat16"}
    config = decoder.config.to_dict() | named
    if policy.weight_format != "bf16":
        config["quantization_config"] = stored_layouts.quantization_config(policy.weight_format)
    write_json(folder / "config.json", config)
    return digest_of(shards)


def _base_tensors(decoder: Any) -> Iterator[tuple[str, Tensor]]:
    for name in expected_specs(build_on_meta(decoder.config), None):
        owner, _, leaf = name.rpartition(".")
        module = decoder.get_submodule(owner)
        held = base_linear(module) if is_projection(owner) else module
        if leaf != "weight" or not isinstance(held, QuantizedLinear):
            yield name, getattr(held, leaf).detach().to(torch.bfloat16)
            continue
        codes = held.codes()
        if codes.global_scale is not None:
            codes = replace(codes, encode_scale=codes.global_scale.reciprocal())
        yield from stored_layouts.packed_tensors(owner, codes).items()
