"""What pre-training writes: the 16-bit policy, its 4-bit variants, copies where names lead.

Each folder appears whole or not at all: it is written under another name and renamed.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from repro.models.checkpoint import write_quantized
from repro.models.proxy_names import proxy_folder
from repro.spec.arm import WeightFormat
from repro.spec.whole_files import appearing

ROUNDED: tuple[WeightFormat, ...] = ("nvfp4", "mxfp4", "nf4")


def write_policy(folder: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the model in bfloat16 with its tokenizer, in place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    with appearing(folder) as partial:
        rounded: Any = copy.deepcopy(model).eval()
        nn.Module.to(rounded, torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for path in partial.iterdir():
            path.chmod(0o644)


def write_variants(policy: Path, folder: Path) -> dict[str, Path]:
    """Write a proxy policy rounded to each 4-bit format; return the folders by format.

    Parameters
    ----------
    policy
        Folder of its 16-bit checkpoint.
    folder
        Where the variants' folders are made.
    """
    paths: dict[str, Path] = {name: folder / name for name in ROUNDED}
    for weight_format, path in paths.items():
        shutil.rmtree(path, ignore_errors=True)
        write_quantized(policy, path, weight_format, recipe="float32")
    return paths


def install(name: str, made: Mapping[str, Path]) -> None:
    """Copy finished checkpoints, by suffix, to where a proxy policy's names are looked for."""
    for suffix, path in made.items():
        target = proxy_folder(f"{name}{suffix}")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
        old = target.with_name(f".{target.name}.old-{os.getpid()}")
        shutil.copytree(path, partial)
        if target.exists():
            os.replace(target, old)
        os.replace(partial, target)
        shutil.rmtree(old, ignore_errors=True)
