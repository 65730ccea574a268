"""Pre-train a proxy policy as a run: checkpoints in every variant, their measures, and a record.

Beside the run's record stay `policy` (16 bits), `halfway` (16 bits, after half of the steps), and
the three variants of `repro.models.proxy_names`; the finished ones are copied to the folder where
those names are looked for.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from repro.data.load import DATA_VARIABLE
from repro.data.problem import digest_of_problems
from repro.data.proxy_problems import generate_leveled_problems
from repro.evidence.record import Estimate
from repro.models.checkpoint import digest_of_files, write_quantized
from repro.models.policy import load_policy
from repro.models.proxy_names import proxy_folder, size_of
from repro.procedures import Measured, Progress, Stopped
from repro.procedures.memory_use import peak_bytes, reset_peak
from repro.procedures.pretrain import SUMMARY_FILE, write_checkpoint
from repro.procedures.pretrain_proxy import (
    Pretraining,
    begin,
    human_digest,
    in_bfloat16,
    train_until,
)
from repro.procedures.proxy_quality import (
    ProxyQuality,
    by_level,
    greedy_and_forced,
    measure_proxy_quality,
    percent,
)
from repro.procedures.proxy_recipe import RECIPES, HumanData, ProxyRecipe, read_human_data
from repro.spec.config import PretrainScale, RunConfig, WeightFormat, digest_of

_WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("nf4", "mxfp4", "nvfp4")
# Problems on which the halfway policy, and each 4-bit one, is measured.
_FEWER = 500


def pretrain_proxy_policy(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Pre-train the size that the run's arm names; see `repro.procedures.Procedure`."""
    del threads
    scale: PretrainScale = run.scale
    recipe = _recipe_of(run)
    human = read_human_data(os.environ.get(DATA_VARIABLE)) if scale.human_data else HumanData()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reset_peak()
    training = begin(
        recipe,
        folder / "checkpoint" / "state.safetensors",
        seed=run.seed,
        human=human,
        device=device,
    )
    try:
        halfway = _train(training, folder, progress, should_stop)
    finally:
        training.close()
    progress("measuring", {})
    policy = folder / "policy"
    # A policy without a record is of a start that ended between the two; it is made again.
    shutil.rmtree(policy, ignore_errors=True)
    began = time.perf_counter()
    write_checkpoint(policy, in_bfloat16(training.model), training.tokenizer, lambda _: None)
    quality = measure_folder(policy, recipe, human, run.seed, device)
    summary = _summary(run, training, policy) | {"halfway": halfway}
    summary["quality"] = dataclasses.asdict(quality)
    # Kept before the 4-bit variants are made, so that a fault there costs nothing else.
    _finish(run, summary, {"": policy})
    progress("writing 4-bit policies", {})
    variants = write_variants(policy, folder)
    summary["four_bit"] = {
        name: _greedy_and_forced(source, weight_format, recipe, run.seed, device)
        for name, source, weight_format in _four_bit(policy, variants)
    }
    summary["after_training_seconds"] = time.perf_counter() - began
    _finish(run, summary, {"": policy} | {f"-{name}": path for name, path in variants.items()})
    return _measured(training, quality, summary)


def _summary(run: RunConfig, training: Pretraining, policy: Path) -> dict[str, Any]:
    human = training.human
    return {
        "name": _name_of(run),
        "seed": run.seed,
        "recipe": dataclasses.asdict(training.recipe),
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "tokens": training.progress.tokens,
        "train_seconds": training.progress.seconds,
        "device": _device_name(training.device),
        "weights_sha256": digest_of_files(sorted(policy.glob("*.safetensors"))),
        "human_problems_trained": len(human.worked),
        "human_problems_left_out": human.left_out,
        "loss": _stretches(training.progress.losses),
    }


def _finish(run: RunConfig, summary: dict[str, Any], made: dict[str, Path]) -> None:
    """Write the summary beside the weights and copy the checkpoints to where their names lead."""
    text = json.dumps(summary, indent=1) + "\n"
    (made[""] / SUMMARY_FILE).write_text(text, encoding="utf-8")
    _install(_name_of(run), made)


def _name_of(run: RunConfig) -> str:
    """Return the policy's name, `proxy-30m` for the arm `proxy_30m`."""
    return run.arm.name.replace("_", "-")


def _recipe_of(run: RunConfig) -> ProxyRecipe:
    scale: PretrainScale = run.scale
    return dataclasses.replace(
        RECIPES[size_of(_name_of(run))],
        threads=scale.threads,
        quality_problems=scale.quality_problems,
    )


def _train(
    training: Pretraining, folder: Path, progress: Progress, should_stop: Callable[[], bool]
) -> dict[str, Any]:
    """Train to the end by way of the half; return what was measured there."""

    def on_progress(step: int, steps: int, loss: float) -> None:
        shown = {"step": float(step), "steps": float(steps), "loss": loss}
        shown["tokens_per_second"] = training.progress.tokens / training.progress.seconds
        progress("pre-training", shown)

    recipe = training.recipe
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    kept = folder / "halfway"
    for until in (recipe.steps // 2, recipe.steps):
        if training.progress.step < until and not train_until(
            training, until, workers=workers, on_progress=on_progress, should_stop=should_stop
        ):
            raise Stopped
        if until < recipe.steps and not kept.exists():
            write_checkpoint(kept, in_bfloat16(training.model), training.tokenizer, lambda _: None)
            device = training.device
            measured = _greedy_and_forced(kept, "bf16", recipe, training.seed, device)
            measured["step"] = until
            (kept / SUMMARY_FILE).write_text(json.dumps(measured), encoding="utf-8")
    found: dict[str, Any] = json.loads((kept / SUMMARY_FILE).read_text(encoding="utf-8"))
    return found


def _loaded(folder: Path, weight_format: WeightFormat, device: torch.device) -> Any:
    return load_policy(
        folder,
        weight_format=weight_format,
        training="none",
        lora_rank=1,
        lora_alpha=1.0,
        compute_dtype="float32" if device.type == "cpu" else "bfloat16",
        seed=0,
        device=device,
    )


def measure_folder(
    folder: Path, recipe: ProxyRecipe, human: HumanData, seed: int, device: torch.device
) -> ProxyQuality:
    """Measure the 16-bit checkpoint in a folder, as it was written."""
    policy = _loaded(folder, "bf16", device)
    return measure_proxy_quality(
        policy.decoder,
        policy.tokenizer,
        seed=seed,
        problems=recipe.quality_problems,
        samples=recipe.quality_samples,
        human=human.asked,
    )


def _greedy_and_forced(
    folder: Path, weight_format: WeightFormat, recipe: ProxyRecipe, seed: int, device: torch.device
) -> dict[str, Any]:
    began = time.perf_counter()
    policy = _loaded(folder, weight_format, device)
    problems = min(_FEWER, recipe.quality_problems)
    asked = generate_leveled_problems("development", problems, seed=seed)
    greedy, forced = greedy_and_forced(policy.decoder, policy.tokenizer, asked)
    found: dict[str, Any] = {"problems": problems}
    for name, answers in (("greedy", greedy), ("forced_working", forced)):
        values = [answer.correct for answer in answers]
        found |= {name: percent(values), f"{name}_by_level": by_level(asked, values)}
    found["working"] = percent(answer.works for answer in greedy)
    found["relative_weight_error_mean"] = policy.effects["relative_weight_error_mean"]
    return found | {"seconds": time.perf_counter() - began}


def write_variants(policy: Path, folder: Path) -> dict[str, Path]:
    """Write the policy rounded to each 4-bit format; return the folders by format."""
    paths: dict[str, Path] = {name: folder / name for name in _WEIGHT_FORMATS}
    for weight_format, path in paths.items():
        shutil.rmtree(path, ignore_errors=True)
        write_quantized(policy, path, weight_format)
    return paths


def _four_bit(policy: Path, variants: dict[str, Path]) -> list[tuple[str, Path, WeightFormat]]:
    rounded = [(name, policy, name) for name in _WEIGHT_FORMATS]
    stored: list[tuple[str, Path, WeightFormat]] = [
        ("nvfp4 stored", variants["nvfp4"], "nvfp4"),
        ("mxfp4 stored", variants["mxfp4"], "mxfp4"),
        ("nf4 stored", variants["nf4"], "nf4"),
    ]
    return cast(list[tuple[str, Path, WeightFormat]], rounded) + stored


def _install(name: str, made: dict[str, Path]) -> None:
    """Copy finished checkpoints to where their names are looked for, each whole or not at all."""
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


def _measured(training: Pretraining, quality: ProxyQuality, summary: dict[str, Any]) -> Measured:
    n = quality.problems
    percents = {
        "accuracy_greedy": quality.greedy,
        "accuracy_forced_working": quality.forced_working,
        "accuracy_sampled": quality.sampled_mean,
        "pass_at_4": quality.sampled_pass,
        "working_rate": quality.working,
    } | {f"accuracy_{name}": value for name, value in quality.human_greedy.items()}
    counts = {f"accuracy_{name}": count for name, count in quality.human_problems.items()}
    metrics = {
        name: Estimate(
            value=value, unit="percent", n=counts.get(name, n), method="mean over problems"
        )
        for name, value in percents.items()
    }
    metrics["train_seconds"] = Estimate(
        value=training.progress.seconds, unit="seconds", method="steps alone, by the clock"
    )
    metrics["peak_bytes"] = Estimate(
        value=float(peak_bytes()), unit="bytes", method="peak of the process during the run"
    )
    inputs = {
        "recipe": digest_of(dataclasses.asdict(training.recipe)),
        "tokenizer": digest_of(training.tokenizer.get_vocab()),
        "human_problems": human_digest(training.human),
    }
    for name, problems in training.human.asked.items():
        inputs[f"{name}_test_problems"] = digest_of_problems(problems)
    effects = {name: value for name, value in summary.items() if name not in ("loss", "recipe")}
    effects["checkpoint_sha256"] = summary["weights_sha256"]
    return Measured(
        metrics=metrics, series={"loss": summary["loss"]}, effects=effects, inputs=inputs
    )


def _stretches(losses: list[float]) -> list[float]:
    """Return the mean of each 50 losses."""
    parts = [losses[at : at + 50] for at in range(0, len(losses), 50)]
    return [sum(part) / len(part) for part in parts]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
