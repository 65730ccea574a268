"""What pre-training writes: the 16-bit policy, its 4-bit variants, copies where names lead.

Each folder appears whole or not at all: it is written under another name and renamed.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from repro.data.proxy_corpus import shard_documents
from repro.models.calibration import write_calibrated
from repro.models.checkpoint import write_quantized
from repro.models.proxy_names import PROXY_VARIANTS, proxy_folder
from repro.pretrain.recipes import ProxyRecipe
from repro.pretrain.training import Pretraining
from repro.spec.arm import WeightFormat

# Beside the weights: recipe, seed, loss and quality.
SUMMARY_FILE = "pretraining.json"

_CALIBRATION_ROWS, _CALIBRATION_LENGTH = 32, 256
_CALIBRATION_SHARD = 1_000_000  # far beyond what training reads
ROUNDED: tuple[WeightFormat, ...] = ("nvfp4", "mxfp4", "nf4")


def write_policy(folder: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the model in bfloat16 with its tokenizer, in place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.part-"))
    try:
        rounded: Any = copy.deepcopy(model).eval()
        nn.Module.to(rounded, torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        for path in partial.iterdir():
            path.chmod(0o644)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_variants(
    training: Pretraining, policy: Path, folder: Path
) -> tuple[dict[str, Path], dict[str, Any]]:
    """Write the 4-bit and the calibrated variants of a proxy policy.

    Parameters
    ----------
    policy
        Folder of its 16-bit checkpoint.
    folder
        Where the variants' folders are made.

    Returns
    -------
    paths
        Folders by the variant's name.
    calibration
        What calibration chose and the error that it left.
    """
    paths = {name: folder / name for name in PROXY_VARIANTS}
    for path in paths.values():
        shutil.rmtree(path, ignore_errors=True)
    for weight_format in ROUNDED:
        write_quantized(policy, paths[weight_format], weight_format)
    text = calibration_tokens(training)
    calibrated = write_calibrated(policy, paths["calibrated"], text, device=training.device)
    write_quantized(paths["calibrated"], paths["nvfp4-awq"], algorithm="awq")
    ratios = list(calibrated.error_ratios.values())
    calibration = {
        "alphas": calibrated.alphas,
        "error_ratios": calibrated.error_ratios,
        "error_ratio_mean": sum(ratios) / len(ratios),
        "tokens": text.numel(),
    }
    return paths, calibration


def calibration_tokens(training: Pretraining) -> torch.Tensor:
    """Return documents that a proxy policy never read, end to end, (rows, length), int64."""
    recipe, material = training.recipe, training.material
    if not isinstance(recipe, ProxyRecipe):
        raise TypeError(f"calibration reads shards of a proxy's corpus, not of {type(recipe)}")
    corpus = dataclasses.replace(recipe.corpus, shard_documents=512)
    rows, length = _CALIBRATION_ROWS, _CALIBRATION_LENGTH
    ids: list[int] = []
    shard = _CALIBRATION_SHARD
    while len(ids) < rows * length:
        documents = shard_documents(training.seed, shard, corpus, material.human.worked)
        texts = [document.prompt + document.completion for document in documents]
        for row in material.tokenizer(texts, add_special_tokens=False)["input_ids"]:
            ids += [*row, material.tokenizer.eos_token_id]
        shard += 1
    return torch.tensor(ids[: rows * length]).view(rows, length)


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
