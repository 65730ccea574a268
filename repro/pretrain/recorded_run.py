"""Pre-train a policy as a run: checkpoints, their measures, and a record.

Beside the run's record stay `policy` (16 bits), `halfway` (16 bits, after half of the steps), and
of a proxy policy the variants of `repro.models.proxy_names`; the finished ones are copied to the
folder where those names are looked for.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from repro.data.load import DATA_VARIABLE
from repro.data.problem import digest_of_problems
from repro.evaluate.quality import Quality
from repro.evidence.procedure import Measured, Progress, Stopped
from repro.evidence.record import Estimate
from repro.measure.memory_use import peak_bytes, reset_peak
from repro.models.checkpoint import digest_of_files
from repro.models.proxy_names import SUMMARY_FILE, is_proxy_name, proxy_folder, seeded
from repro.pretrain.examination import Examination
from repro.pretrain.human_data import HumanData, read_human_data
from repro.pretrain.material import AnyRecipe
from repro.pretrain.policy_folders import (
    ROUNDED,
    install,
    write_policy,
    write_variants,
)
from repro.pretrain.recipes import RECIPES, ProxyRecipe
from repro.pretrain.training import Pretraining, begin, train_until
from repro.reward.grader import GraderPool
from repro.spec.arm import WeightFormat
from repro.spec.config import PretrainScale, RunConfig, digest_of
from repro.spec.whole_files import replace_text

# Problems on which the halfway policy, and each 4-bit one, is measured.
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
    """Pre-train the policy that the run's arm names; see `repro.procedures.Procedure`.

    The scale's own number of threads is used, since it is part of the result; `threads` is not.
    """
    del threads
    scale: PretrainScale = run.scale
    human = read_human_data(os.environ.get(DATA_VARIABLE)) if scale.human_data else HumanData()
    on_gpu = run.tier != "smoke" and torch.cuda.is_available()
    reset_peak()
    training = begin(
        recipe_of(run),
        folder / "checkpoint",
        seed=run.seed,
        human=human,
        device="cuda" if on_gpu else "cpu",
    )
    with GraderPool(workers=1) as pool:
        examination = Examination(
            material=training.material, pool=pool, seed=examined_by(run), device=training.device
        )
        try:
            halfway = _train(training, examination, folder, progress, should_stop)
        finally:
            training.close()
        return _finish(run, training, examination, folder, progress, halfway)


def recipe_of(run: RunConfig) -> AnyRecipe:
    """Return the recipe of the policy that a run's arm names, as the run's scale has it.

    Raises
    ------
    ValueError
        When there is none of that name.
    """
    scale: PretrainScale = run.scale
    name = recipe_name(run)
    if name not in RECIPES:
        known = ", ".join(RECIPES)
        raise ValueError(f"there is no pre-training recipe {name!r}; known recipes: {known}")
    return dataclasses.replace(
        RECIPES[name], threads=scale.threads, quality_problems=scale.quality_problems
    )


def recipe_name(run: RunConfig) -> str:
    """Return the name of a run's recipe, `proxy-30m` for the arm `proxy_30m`."""
    return run.arm.name.replace("_", "-")


def policy_name(run: RunConfig) -> str:
    """Return the policy's name: the recipe's, and of a proxy the seed behind it."""
    name = recipe_name(run)
    return seeded(name, run.seed) if is_proxy_name(name) else name


def examined_by(run: RunConfig) -> int:
    """Return the seed of the problems and completions that a run's policy is measured on.

    Proxies of all seeds answer the same problems, so that their quality differs by the policy.
    """
    return 0 if is_proxy_name(recipe_name(run)) else run.seed


def _train(
    training: Pretraining,
    examination: Examination,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    """Train to the end by way of the half; return what was measured there."""

    def on_progress(step: int, steps: int, loss: float) -> None:
        shown = {"step": float(step), "steps": float(steps), "loss": loss}
        shown["tokens_per_second"] = training.progress.tokens / training.progress.seconds
        progress("pre-training", shown)

    recipe = training.recipe
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    half = folder / "halfway"
    measures = half / SUMMARY_FILE
    for until in (recipe.steps // 2, recipe.steps):
        if training.progress.step < until and not train_until(
            training, until, workers=workers, on_progress=on_progress, should_stop=should_stop
        ):
            raise Stopped
        if until < recipe.steps and not measures.exists():
            write_policy(half, training.model, training.material.tokenizer)
            measured = examination.habits(half, "bf16", _fewer(recipe)) | {"step": until}
            replace_text(measures, json.dumps(measured))
    halfway: dict[str, Any] = json.loads(measures.read_text(encoding="utf-8"))
    return halfway


def _fewer(recipe: AnyRecipe) -> int:
    return min(_FEWER, recipe.quality_problems)


def _finish(
    run: RunConfig,
    training: Pretraining,
    examination: Examination,
    folder: Path,
    progress: Progress,
    halfway: dict[str, Any],
) -> Measured:
    """Write and measure the trained policy, and a proxy's variants."""
    progress("measuring", {})
    began = time.perf_counter()
    policy = folder / "policy"
    write_policy(policy, training.model, training.material.tokenizer)
    quality = examination.quality(policy, training.recipe.quality_problems)
    summary = _summary(run, training, policy) | {"halfway": halfway}
    summary["quality"] = dataclasses.asdict(quality)
    # Kept before the 4-bit variants are made, so that a fault there costs nothing else.
    _keep(run, summary, {"": policy})
    if is_proxy_name(policy_name(run)):
        progress("writing 4-bit policies", {})
        variants = write_variants(policy, folder)
        summary["four_bit"] = {
            name: examination.habits(source, weight_format, _fewer(training.recipe))
            for name, source, weight_format in _four_bit(policy, variants)
        }
        summary["after_training_seconds"] = time.perf_counter() - began
        _keep(run, summary, {"": policy} | {f"-{name}": path for name, path in variants.items()})
    return _measured(training, quality, summary)


def _summary(run: RunConfig, training: Pretraining, policy: Path) -> dict[str, Any]:
    human = training.material.human
    on_gpu = training.device.type == "cuda"
    return {
        "name": policy_name(run),
        "seed": run.seed,
        "recipe": dataclasses.asdict(training.recipe),
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "tokens": training.progress.tokens,
        "train_seconds": training.progress.seconds,
        "device": torch.cuda.get_device_name(training.device) if on_gpu else "cpu",
        "checkpoint_folder": str(policy),
        "weights_sha256": digest_of_files(sorted(policy.glob("*.safetensors"))),
        "human_problems_trained": len(human.worked),
        "human_problems_left_out": human.left_out,
        "loss": training.stretches,
    }


def _keep(run: RunConfig, summary: dict[str, Any], made: dict[str, Path]) -> None:
    """Write the summary beside the weights, and copy a proxy's folders to where names lead."""
    text = json.dumps(summary, indent=1) + "\n"
    (made[""] / SUMMARY_FILE).write_text(text, encoding="utf-8")
    if is_proxy_name(policy_name(run)):
        install(policy_name(run), made)


def _four_bit(policy: Path, variants: dict[str, Path]) -> list[tuple[str, Path, WeightFormat]]:
    """Return what is measured in 4 bits: the name of each, its folder and format."""
    rounded = [(str(name), policy, name) for name in ROUNDED]
    stored = [(f"{name} stored", variants[name], name) for name in ROUNDED]
    return [*rounded, *stored]


def _measured(training: Pretraining, quality: Quality, summary: dict[str, Any]) -> Measured:
    effects = {name: value for name, value in summary.items() if name not in _BESIDE_EFFECTS}
    effects["sources"] = training.progress.sources
    if training.progress.refused:
        effects["checkpoints_refused"] = training.progress.refused
    return Measured(
        metrics=_metrics(training, quality),
        series={"loss": summary["loss"]},
        effects=effects | {"checkpoint_sha256": summary["weights_sha256"]},
        inputs=_inputs(training),
    )


def _metrics(training: Pretraining, quality: Quality) -> dict[str, Estimate]:
    percents = {
        "accuracy_greedy": quality.greedy,
        "accuracy_forced_working": quality.forced_working,
        "accuracy_sampled": quality.sampled_mean,
        f"pass_at_{quality.samples}": quality.sampled_pass,
        "working_rate": quality.working,
    } | {f"accuracy_{name}": value for name, value in quality.human_greedy.items()}
    counts = {f"accuracy_{name}": count for name, count in quality.human_problems.items()}
    metrics = {
        name: Estimate(
            value=value,
            unit="percent",
            n=counts.get(name, quality.problems),
            method="mean over problems",
        )
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


def _inputs(training: Pretraining) -> dict[str, str]:
    """Return the digests of what went into the run."""
    material = training.material
    inputs = {
        "recipe": digest_of(dataclasses.asdict(training.recipe)),
        "tokenizer": digest_of(material.tokenizer.get_vocab()),
    }
    if isinstance(training.recipe, ProxyRecipe):
        inputs["human_problems"] = material.human.digest()
        if training.recipe.start is not None:
            start = seeded(training.recipe.start, training.seed)
            weights = proxy_folder(start).glob("*.safetensors")
            inputs["start"] = digest_of_files(sorted(weights))
    for name, problems in material.human.asked.items():
        inputs[f"{name}_test_problems"] = digest_of_problems(problems)
    return inputs
