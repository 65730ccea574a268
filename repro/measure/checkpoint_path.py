"""The way of real weights at full size: a checkpoint written, quantised, loaded and stepped.

A checkpoint of a real shape with random weights is written to disk by transformers, quantised in a
stream, loaded, and one RL step is made on it. Time and bytes of each stage:

    build_seconds, source_bytes                         written by transformers
    quantise_seconds, quantised_bytes
    quantise_host_bytes, quantise_device_bytes          peaks of the quantising process
    load_seconds                                        to the first sampled token, second start
    first_load_seconds                                  the same when kernels are compiled, too
    load_host_bytes, load_device_bytes
    training_step_seconds                               a whole step on the loaded policy

Every stage runs in a process of its own (`repro.measure.checkpoint_stage`). The driver counts
the memory of all processes together: what was in use before a stage began is taken off its peak.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from repro.evidence.procedure import Measured, Progress, Stopped
from repro.evidence.record import Estimate
from repro.measure.device_state import release
from repro.measure.memory_use import driver_bytes
from repro.models.shapes import shape_config
from repro.spec.checkpoint_path import CheckpointScale
from repro.spec.config import RunConfig

RunStage = Callable[[str, dict[str, Any]], dict[str, Any]]
_METHOD = "one run of the stage in a process of its own, by the clock"


def measure_checkpoint(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Carry a checkpoint of the scale's shape through every stage.

    Raises
    ------
    RuntimeError
        Without a CUDA device, or when a stage fails, with its last words.
    Stopped
        When asked to stop between two stages; nothing is kept.
    """
    del threads
    if not torch.cuda.is_available():
        raise RuntimeError("checkpoint_path measures a GPU; this process has no CUDA device")
    scale: CheckpointScale = run.scale
    shape = shape_config(f"qwen2.5-{scale.model}")
    if scale.layers:
        shape["num_hidden_layers"] = scale.layers
    place = folder / "checkpoint"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)

    def stage(name: str, settings: dict[str, Any]) -> dict[str, Any]:
        if should_stop():
            raise Stopped
        progress(name, {})
        return run_stage(name, settings)

    try:
        return carry_through(stage, place, shape, scale, run.seed, "cuda")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def carry_through(
    stage: RunStage,
    place: Path,
    shape: dict[str, Any],
    scale: CheckpointScale,
    seed: int,
    device: str,
) -> Measured:
    """Run the stages in their order and return what they measured."""
    source, quantised = str(place / "source"), str(place / "quantised")
    built = stage("build", {"source": source, "shape": shape, "seed": seed, "device": device})
    made = stage("quantise", {"source": source, "quantised": quantised, "device": device})
    shutil.rmtree(source)
    settings = {
        "quantised": quantised,
        "seed": seed,
        "device": device,
        "group": scale.group,
        "prompt_tokens": scale.prompt_tokens,
        "completion_tokens": scale.completion_tokens,
    }
    first = stage("load", settings | {"step": False})
    loaded = stage("load", settings | {"step": True})
    values = {
        "build_seconds": built["seconds"],
        "source_bytes": built["bytes"],
        "quantise_seconds": made["seconds"],
        "quantised_bytes": made["bytes"],
        "quantise_host_bytes": made["host_bytes"],
        "quantise_device_bytes": made["device_bytes"],
        "first_load_seconds": first["seconds"],
        "load_seconds": loaded["seconds"],
        "load_host_bytes": loaded["host_bytes"],
        "load_device_bytes": loaded["device_bytes"],
        "training_step_seconds": loaded["step"]["total"],
    }
    if not loaded["step"]["moved"] > 0:
        raise RuntimeError("the step moved no trained tensor")
    metrics = {
        name: Estimate(
            value=float(value),
            unit="seconds" if name.endswith("seconds") else "bytes",
            method=_METHOD,
        )
        for name, value in values.items()
    }
    effects = {
        "linears": loaded["linears"],
        "linears_quantised": made["linears"],
        "source_shards": built["shards"],
        "parameters_trainable": loaded["parameters_trainable"],
        "trained_change_l2": loaded["step"]["moved"],
        "stages": {"build": built, "quantise": made, "first_load": first, "load": loaded},
    }
    return Measured(metrics=metrics, effects=effects)


def run_stage(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run a stage in a fresh process; return what it found.

    Raises
    ------
    RuntimeError
        When it fails, with the end of what it said.
    """
    driver_before = 0
    if torch.cuda.is_available():
        release()
        driver_before = driver_bytes()
    command = [sys.executable, "-m", "repro.measure.checkpoint_stage", name]
    done = subprocess.run(
        [*command, json.dumps(settings), str(driver_before)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"stage {name} failed ({done.returncode}): {done.stderr[-1500:]}")
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report
