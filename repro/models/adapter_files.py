"""Adapters in PEFT's format, as stock peft and vLLM read them.

A folder holds `adapter_config.json` and `adapter_model.safetensors`, whose tensors are named
`base_model.model.<module>.lora_A.weight` and `.lora_B.weight`. Norm gains trained along with the
adapter are stored as PEFT stores `modules_to_save`: `base_model.model.<norm>.weight`, and their
leaf names in the config, so that stock peft puts them back too. (The released code loses them: its
saved config has `modules_to_save` reset; docs/paper_and_code.md, row 9.)

Easy mistakes
-------------
* Loading by name with missing keys tolerated leaves B at zero: an adapter that does nothing.
* The scaling is not in the tensors: rank, alpha and the rsLoRA flag are in the config alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from peft import PeftModel
from torch import nn

from repro.models.decoder import BLOCK_NORMS
from repro.models.lora import ADAPTER_NAME, adapter_layers
from repro.models.norms import block_norms
from repro.models.tensor_files import TensorSpec, write_tensors

if TYPE_CHECKING:
    from repro.models.policy import Policy

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."


def adapter_tensors(policy: Policy, *, norms: bool = True) -> dict[str, nn.Parameter]:
    """Return the parameters that an adapter file holds, by PEFT's names.

    Parameters
    ----------
    norms
        Trained norm gains among them, where the policy has such.

    Raises
    ------
    ValueError
        When the policy has no adapter.
    """
    tensors: dict[str, nn.Parameter] = {}
    for name, layer in adapter_layers(policy.model):
        A, B, _ = layer.adapter()
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = A
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = B
    if not tensors:
        raise ValueError(f"training is {policy.training!r}: the policy has no adapter to save")
    if norms and policy.effects["norms_trained"]:
        for name, norm in block_norms(policy.model).items():
            tensors[f"{_PREFIX}{name}.weight"] = norm.weight
    return tensors


def save_adapter(
    policy: Policy, folder: str | Path, *, base: str | None = None, norms: bool = True
) -> Path:
    """Write the policy's adapter, in float32, and return the folder.

    Parameters
    ----------
    folder
        Made when missing; each of its two files is replaced at once.
    base
        Name or path of the base checkpoint, for `base_model_name_or_path`.
    norms
        Write trained norm gains too. A reader that refuses `modules_to_save` must get them in
        another way, or it serves another policy.

    Raises
    ------
    ValueError
        When the policy has no adapter.
    """
    path = Path(folder)
    tensors = adapter_tensors(policy, norms=norms)
    path.mkdir(parents=True, exist_ok=True)
    config = _config_values(policy, norms=norms)
    config |= {"base_model_name_or_path": base, "inference_mode": True}
    specs = {
        name: TensorSpec(dtype=torch.float32, shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    write_tensors(path / TENSORS, specs, lambda name: tensors[name].detach())
    temporary = path / f".{CONFIG}.partial-{os.getpid()}"
    temporary.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, path / CONFIG)
    return path


def _config_values(policy: Policy, *, norms: bool = True) -> dict[str, object]:
    config = cast(PeftModel, policy.model).peft_config[ADAPTER_NAME]
    values = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    if norms and policy.effects["norms_trained"]:
        values["modules_to_save"] = list(BLOCK_NORMS)
    return values
