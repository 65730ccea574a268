"""Pre-train the tiny policy as a run: its checkpoint, what that is worth, and a record.

Beside the run's record stay `policy` (16 bits) and `halfway` (16 bits, after half of the steps).
The policy of the package is such a `policy` folder.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from repro.data.generator import generate_problems
from repro.evaluate.asking import Alone, Evaluator
from repro.evaluate.quality import Manner, Quality, measure_habits, measure_quality
from repro.evidence.procedure import Measured, Progress, Stopped
from repro.evidence.record import Estimate
from repro.measure.memory_use import peak_bytes, reset_peak
from repro.models.checkpoint import digest_of_files
from repro.models.loading import SUMMARY_FILE
from repro.models.policy import load_policy
from repro.pretrain.recipes import Recipe
from repro.pretrain.training import Pretraining, begin, train_until
from repro.reward.grader import GraderPool
from repro.rl.single_run.torch_sampler import TorchSampler
from repro.spec.config import PretrainScale, RunConfig, digest_of
from repro.spec.whole_files import appearing, replace_text

RECIPE = Recipe()
# Limits of prompts and completions are those of the smoke tier.
MANNER = Manner(template="tiny", max_prompt_tokens=1280, max_new_tokens=64, samples=8)
# Problems on which the halfway policy is measured, at most.
_FEWER = 500
# Of the summary: what a record has in its series, inputs and environment. Effects of this name
# hold a measuring device's state.
_BESIDE_EFFECTS = ("loss", "recipe", "device")


def pretrain_policy(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Pre-train the policy; see `repro.procedures.Procedure`.

    The scale's own number of threads is used, since it is part of the result; `threads` is not.
    """
    del threads
    scale: PretrainScale = run.scale
    recipe = dataclasses.replace(
        RECIPE, threads=scale.threads, quality_problems=scale.quality_problems
    )
    reset_peak()
    training = begin(recipe, folder / "checkpoint", seed=run.seed)
    with GraderPool(workers=1) as pool:
        halfway = _train(training, pool, folder, progress, should_stop)
        return _finish(training, pool, folder, progress, halfway)


def _train(
    training: Pretraining,
    pool: GraderPool,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    """Train to the end by way of the half; return what was measured there."""

    def on_progress(step: int, steps: int, loss: float) -> None:
        shown = {"step": float(step), "steps": float(steps), "loss": loss}
        shown["tokens_per_second"] = training.progress.tokens / training.progress.seconds
        progress("pre-training", shown)

    recipe, half = training.recipe, folder / "halfway"
    measures = half / SUMMARY_FILE
    for until in (recipe.steps // 2, recipe.steps):
        if training.progress.step < until and not train_until(
            training, until, on_progress=on_progress, should_stop=should_stop
        ):
            raise Stopped
        if until < recipe.steps and not measures.exists():
            write_policy(half, training.model, training.tokenizer)
            asked = _problems(training, min(_FEWER, recipe.quality_problems))
            habits = measure_habits(_evaluator(training, half, pool), MANNER, asked)
            replace_text(measures, json.dumps(habits | {"step": until}))
    halfway: dict[str, Any] = json.loads(measures.read_text(encoding="utf-8"))
    return halfway


def _problems(training: Pretraining, count: int) -> list[Any]:
    """Return problems of the development split, which no corpus has."""
    generator = training.recipe.corpus.generator
    return generate_problems("development", count, seed=training.seed, config=generator)


def _evaluator(training: Pretraining, folder: Path, pool: GraderPool) -> Evaluator:
    policy = load_policy(folder, weight_format="bf16")
    asker = Alone(TorchSampler(policy))
    return Evaluator(asker, training.tokenizer, pool, [training.seed], "quality")


def write_policy(folder: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the model in bfloat16 with its tokenizer, in place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    with appearing(folder) as partial:
        rounded: Any = copy.deepcopy(model).eval()
        nn.Module.to(rounded, torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for path in partial.iterdir():
            path.chmod(0o644)


def _finish(
    training: Pretraining,
    pool: GraderPool,
    folder: Path,
    progress: Progress,
    halfway: dict[str, Any],
) -> Measured:
    """Write and measure the trained policy."""
    progress("measuring", {})
    policy, recipe = folder / "policy", training.recipe
    write_policy(policy, training.model, training.tokenizer)
    evaluator = _evaluator(training, policy, pool)
    quality = measure_quality(evaluator, MANNER, _problems(training, recipe.quality_problems))
    summary = {
        "name": "tiny",
        "seed": training.seed,
        "recipe": dataclasses.asdict(recipe),
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "tokens": training.progress.tokens,
        "train_seconds": training.progress.seconds,
        "device": "cpu",
        "checkpoint_folder": str(policy),
        "weights_sha256": digest_of_files(sorted(policy.glob("*.safetensors"))),
        "loss": training.stretches,
        "halfway": halfway,
        "quality": dataclasses.asdict(quality),
    }
    replace_text(policy / SUMMARY_FILE, json.dumps(summary, indent=1) + "\n")
    effects = {name: value for name, value in summary.items() if name not in _BESIDE_EFFECTS}
    effects |= {
        "sources": training.progress.sources,
        "checkpoint_sha256": summary["weights_sha256"],
    }
    if training.progress.refused:
        effects["checkpoints_refused"] = training.progress.refused
    return Measured(
        metrics=_metrics(training, quality),
        series={"loss": [*training.stretches]},
        effects=effects,
        inputs={
            "recipe": digest_of(dataclasses.asdict(recipe)),
            "tokenizer": digest_of(training.tokenizer.get_vocab()),
        },
    )


def _metrics(training: Pretraining, quality: Quality) -> dict[str, Estimate]:
    percents = {
        "accuracy_greedy": quality.greedy,
        "accuracy_forced_working": quality.forced_working,
        "accuracy_sampled": quality.sampled_mean,
        f"pass_at_{quality.samples}": quality.sampled_pass,
        "working_rate": quality.working,
    }
    metrics = {
        name: Estimate(value=value, unit="percent", n=quality.problems, method="mean over problems")
        for name, value in percents.items()
    }
    metrics["train_seconds"] = Estimate(
        value=training.progress.seconds,
        unit="seconds",
        method="steps with the making of their batches, by the clock",
    )
    metrics["peak_bytes"] = Estimate(
        value=float(max(training.progress.peak_bytes, peak_bytes())),
        unit="bytes",
        method="peak of the process during the run",
    )
    return metrics
