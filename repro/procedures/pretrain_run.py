"""Pre-train a policy as a run: progress, stop and resume, a checkpoint folder and a record."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from repro.data.tiny_tokenizer import build_tokenizer
from repro.evidence.record import Estimate
from repro.models.checkpoint import digest_of_files
from repro.procedures import Measured, Progress, Stopped
from repro.procedures.memory_use import peak_bytes, reset_peak
from repro.procedures.pretrain import PretrainConfig, pretrain
from repro.spec.config import PretrainScale, RunConfig, digest_of

_RECIPES = {"tiny": PretrainConfig}


def pretrain_policy(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Pre-train and measure; the checkpoint is left in `<folder>/policy`.

    The scale's own number of threads is used, since it is part of the result; `threads` is not.
    """
    del threads
    scale: PretrainScale = run.scale
    if scale.recipe not in _RECIPES:
        known = ", ".join(_RECIPES)
        raise ValueError(f"there is no pre-training recipe {scale.recipe!r}; there is {known}")
    reset_peak()
    config = dataclasses.replace(
        _RECIPES[scale.recipe](), threads=scale.threads, quality_problems=scale.quality_problems
    )

    def on_progress(step: int, steps: int, loss: float) -> None:
        shown = {"step": float(step), "steps": float(steps), "loss": loss}
        progress("pre-training", shown)

    out = folder / "policy"
    # A policy without a record is of a start that ended between the two; it is made again.
    shutil.rmtree(out, ignore_errors=True)
    result = pretrain(config, out, seed=run.seed, on_progress=on_progress, should_stop=should_stop)
    if not result.finished or result.quality is None:
        raise Stopped
    quality, n = result.quality, scale.quality_problems
    percents = {
        "accuracy_greedy": quality.greedy,
        "accuracy_forced_working": quality.forced_working,
        "accuracy_sampled": quality.sampled_mean,
        "pass_at_8": quality.sampled_pass,
        "working_rate": quality.working,
    }
    metrics = {
        name: Estimate(value=value, unit="percent", n=n, method="mean over problems")
        for name, value in percents.items()
    }
    metrics["train_seconds"] = Estimate(
        value=result.seconds, unit="seconds", method="steps alone, by the clock"
    )
    metrics["peak_bytes"] = Estimate(
        value=float(peak_bytes()), unit="bytes", method="peak of the process during the run"
    )
    return Measured(
        metrics=metrics,
        series={"loss": list(result.loss)},
        effects={
            "tokens": result.tokens,
            "checkpoint_sha256": digest_of_files(sorted(out.glob("*.safetensors"))),
            "checkpoint_folder": str(out),
            "quality": dataclasses.asdict(quality),
        },
        inputs={
            "recipe": digest_of(dataclasses.asdict(config)),
            "tokenizer": digest_of(build_tokenizer(config.corpus.generator).get_vocab()),
        },
    )
