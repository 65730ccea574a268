"""Pre-train the tiny policy as a run: its checkpoint, what that is worth, and a record.

Beside the run's record stay `policy` (16 bits) and `halfway` (16 bits, after half of the steps).
The policy of the package is such a `policy` folder.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from repro.data.generator import generate_problems
from repro.data.problem import Problem
from repro.data.prompts import template_named
from repro.evaluate.asking import Evaluator, SingleAsker
from repro.evaluate.grades import Answers
from repro.evaluate.questions import questions
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
from repro.spec.config import PretrainScale, RunConfig, SamplingConfig, digest_of
from repro.spec.whole_files import appearing, replace_text

RECIPE = Recipe()
# Limits of prompts and completions are those of the smoke tier.
TEMPLATE, PROMPT_TOKENS, NEW_TOKENS = "tiny", 1280, 64
# Completions per problem at temperature 1.
SAMPLES = 8
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
            shown = accuracies(_evaluator(training, half, pool), asked)
            replace_text(measures, json.dumps(_values(shown) | {"step": until}))
    halfway: dict[str, Any] = json.loads(measures.read_text(encoding="utf-8"))
    return halfway


def _problems(training: Pretraining, count: int) -> list[Problem]:
    """Return problems of the development split, which no corpus has."""
    generator = training.recipe.corpus.generator
    return generate_problems("development", count, seed=training.seed, config=generator)


def _evaluator(training: Pretraining, folder: Path, pool: GraderPool) -> Evaluator:
    policy = load_policy(folder, weight_format="bf16")
    asker = SingleAsker(TorchSampler(policy))
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
    problems = _problems(training, recipe.quality_problems)
    shown = accuracies(evaluator, problems, samples=SAMPLES)
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
        "accuracies": _values(shown),
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
        metrics=shown | _costs(training),
        series={"loss": [*training.stretches]},
        effects=effects,
        inputs={
            "recipe": digest_of(dataclasses.asdict(recipe)),
            "tokenizer": digest_of(training.tokenizer.get_vocab()),
        },
    )


def accuracies(
    evaluator: Evaluator, problems: Sequence[Problem], *, samples: int = 0
) -> dict[str, Estimate]:
    """Return a policy's accuracies: one that is worth training knows more than it shows.

    Greedily (what it shows) and greedily with the working forced (what it knows, the ceiling of
    training). Greedy accuracy rests on one near-tie, whether to work or not, and can move by tens
    of points while no skill changes: `working_rate` is the share of answers that work.

    Parameters
    ----------
    samples
        Completions per problem at temperature 1, of which `working_rate` then is; 0 asks for none.
    """
    prefix = template_named(TEMPLATE).working_prefix or ""
    greedy, forced = _ask(evaluator, problems), _ask(evaluator, problems, opening=prefix)
    shown = {
        "accuracy_greedy": greedy.estimates()["accuracy"],
        "accuracy_forced_working": forced.estimates()["accuracy"],
        "working_rate": greedy.estimates()["working_rate"],
    }
    if samples:
        drawn = _ask(evaluator, problems, samples=samples)
        pass_at = f"pass_at_{samples}"
        shown |= {
            "accuracy_sampled": drawn.estimates()["accuracy"],
            pass_at: drawn.at_k((samples,))[pass_at],
            "working_rate": drawn.estimates()["working_rate"],
        }
    return shown


def _ask(
    evaluator: Evaluator, problems: Sequence[Problem], *, samples: int = 0, opening: str = ""
) -> Answers:
    """Return the answers: one greedy per problem, or `samples` at temperature 1."""
    asked = questions(
        problems,
        TEMPLATE,
        evaluator.tokenizer,
        max_prompt_tokens=PROMPT_TOKENS,
        opening=opening,
    )
    sampling = SamplingConfig(temperature=1.0 if samples else 0.0, max_new_tokens=NEW_TOKENS)
    (answers,) = evaluator.ask(asked, sampling, samples=max(1, samples))
    return cast(Answers, answers)  # the one run is alive


def _values(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: estimate.value for name, estimate in estimates.items()}


def _costs(training: Pretraining) -> dict[str, Estimate]:
    return {
        "train_seconds": Estimate(
            value=training.progress.seconds,
            unit="seconds",
            method="steps with the making of their batches, by the clock",
        ),
        "peak_bytes": Estimate(
            value=float(max(training.progress.peak_bytes, peak_bytes())),
            unit="bytes",
            method="peak of the process during the run",
        ),
    }
