"""Resumable checkpoints of a training run: tensors as safetensors, the rest as JSON.

A checkpoint `step-00000010/` holds `parameters.safetensors` (what is trained, float32),
`optimizer.safetensors` and `state.json` (step, prompts drawn, series, effects, the run's digest).
No random state is stored because none exists: every random stream is derived by name from the run's
seed and the step, so a resumed run draws what the uninterrupted one would have drawn.

Atomic: everything is written into a folder of another name, flushed to disk, and renamed. A process
killed at any instant leaves the previous checkpoint, or the new one, and perhaps an unfinished
folder that the next save removes.

Easy mistakes: forgetting the optimiser's moments and step counter (training goes on, differently);
keeping the stage of the noise or of the learning rate as state rather than computing it from the
step; resuming a run whose configuration has changed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from repro.rl.optimizer import optimizer_tensors, restore_optimizer

PARAMETERS = "parameters.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
SCHEMA = 1


@dataclass(slots=True, kw_only=True)
class TrainState:
    """What a run knows beside tensors; grows with every step.

    Attributes
    ----------
    digest
        Of the run's configuration.
    step
        Optimiser steps done.
    draws
        Batches of prompts drawn; more than rollouts where dynamic sampling refills.
    series
        `{name: [one value a step]}`.
    effects
        What was really done, JSON values.
    """

    digest: str
    step: int
    draws: int
    series: dict[str, list[float | int | None]]
    effects: dict[str, Any]


def save_checkpoint(
    folder: Path,
    state: TrainState,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> Path:
    """Write the checkpoint of `state.step`, then remove older ones; return its folder."""
    tensors, numbers = optimizer_tensors(optimizer, parameters)
    trained = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
    content = {
        "schema": SCHEMA,
        "digest": state.digest,
        "step": state.step,
        "draws": state.draws,
        "series": state.series,
        "effects": state.effects,
        "optimizer_numbers": numbers,
    }
    return publish(folder, state.step, {PARAMETERS: trained, OPTIMIZER: tensors}, content)


def publish(
    folder: Path,
    step: int,
    tensors: Mapping[str, dict[str, Tensor]],
    content: Mapping[str, Any],
) -> Path:
    """Write one checkpoint, whole or not at all, then remove older ones; return its folder.

    Parameters
    ----------
    folder
        Of the checkpoints.
    step
        Names the checkpoint.
    tensors
        One file of safetensors each, by its name.
    content
        JSON values, kept beside them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:08d}"
    partial = folder / f"unfinished-{step:08d}-{os.getpid()}"
    for left_over in folder.glob("unfinished-*"):
        shutil.rmtree(left_over)
    partial.mkdir()
    for name, held in tensors.items():
        save_file(held, partial / name)
    (partial / STATE).write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    for written in partial.iterdir():
        flush(written)
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    flush(folder)
    for older in complete_checkpoints(folder):
        if older != final:
            shutil.rmtree(older)
    return final


def load_checkpoint(
    folder: Path,
    digest: str,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> TrainState | None:
    """Restore the last checkpoint in place and return its state, or None when there is none.

    Raises
    ------
    ValueError
        When the checkpoint belongs to another configuration, other parameters, or is damaged; the
        message names the folder.
    """
    found = read_newest(folder, (PARAMETERS, OPTIMIZER))
    if found is None:
        return None
    newest, content, (trained, tensors) = found
    if content.get("schema") != SCHEMA or content.get("digest") != digest:
        raise ValueError(
            f"checkpoint {newest} belongs to configuration {content.get('digest')} "
            f"(schema {content.get('schema')}); this run is {digest} (schema {SCHEMA})"
        )
    if trained.keys() != parameters.keys():
        odd = sorted(trained.keys() ^ parameters.keys())[0]
        raise ValueError(f"checkpoint {newest} and the policy train different tensors: {odd}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if trained[name].shape != parameter.shape:
                raise ValueError(
                    f"checkpoint {newest}: {name} has shape {tuple(trained[name].shape)}; the "
                    f"policy needs {tuple(parameter.shape)}"
                )
            parameter.copy_(trained[name])
    restore_optimizer(optimizer, parameters, tensors, content["optimizer_numbers"])
    return TrainState(
        digest=digest,
        step=content["step"],
        draws=content["draws"],
        series=content["series"],
        effects=content["effects"],
    )


def read_newest(
    folder: Path, names: Sequence[str]
) -> tuple[Path, dict[str, Any], list[dict[str, Tensor]]] | None:
    """Return the last checkpoint's folder, its JSON values and its files of tensors, or None.

    Raises
    ------
    ValueError
        When it is damaged; the message names the folder.
    """
    found = complete_checkpoints(folder)
    if not found:
        return None
    newest = found[-1]
    try:
        content = json.loads((newest / STATE).read_text(encoding="utf-8"))
        tensors = [load_file(newest / name) for name in names]
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        raise ValueError(
            f"checkpoint {newest} cannot be read ({error}); remove it to start again"
        ) from error
    return newest, content, tensors


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def flush(path: Path) -> None:
    """Force a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
