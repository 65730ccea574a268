"""Made-up records of training runs, sound in themselves: what honest runs would leave."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

from repro.evidence.record import SEAL, Estimate, Measured, Record, record_of
from repro.run.analysis_plan import plan_inputs
from repro.spec.config import RunConfig, TrainScale, derive_seed, digest_of
from repro.spec.schedule import learning_rate_of_run, sigma_of_stage, stage_of_step
from repro.spec.shapes import shape_by_name

ENDS = {
    "bf16": 45.0,
    "nf4": 45.2,
    "mxfp4": 44.8,
    "nvfp4": 43.4,
    "bf16_full": 87.0,
    "bf16_lora": 91.0,
    "nf4_lora": 91.3,
    "mxfp4_lora": 89.2,
    "nvfp4_lora": 91.1,
    "nvfp4_lora_aqn": 91.5,
    "bf16_lora_random_reward": 46.0,
    "bf16_lora_format_reward": 8.0,
}
COMMIT = "0" * 40
# Of sets whose size the scale leaves open.
PROBLEMS = 300
TOKENS = 20
_PARTS = ("right_lenient", "format", "working", "truncated")


def source_of(commit: str) -> str:
    """Return the digest of the sources of a commit that was made up."""
    return digest_of(["the sources of", commit])


def at_commit(record: Record, commit: str = COMMIT, *, dirty: bool | None = False) -> Record:
    """Return a record as it would be of a commit that was made up."""
    state = {"commit": commit, "dirty": dirty, "sha256": source_of(commit)}
    environment = record.environment | {"source_sha256": state["sha256"]}
    return dataclasses.replace(
        record, commit=commit, dirty=dirty, sources=[state], environment=environment
    )


def on_device(record: Record, name: str) -> Record:
    """Return a record as it would be of a device."""
    return dataclasses.replace(record, environment=record.environment | {"gpu": [{"name": name}]})


def honest_record(run: RunConfig) -> Record:
    """Return the record that an honest run of this configuration might leave."""
    draw = random.Random(derive_seed(run.seed, run.arm.name, "made up"))
    end = min(99.0, ENDS.get(run.arm.name, 90.0) + draw.gauss(0, 1.0))
    start = 45.0 if run.arm.weight_format != "nvfp4" else 43.3
    percents = {"accuracy": end - 1.5, "accuracy_greedy": end, "accuracy_forced_working": 91.5}
    percents |= {f"accuracy_{item.name}": end / 2 for item in run.scale.test_sets}
    if run.procedure != "evaluate":
        percents["accuracy_greedy_start"] = start
        del percents["accuracy_forced_working"]
    # `at_commit` says what ran; asking the disk for each record would be most of a test's time.
    with mock.patch("repro.evidence.record.source_states", list):
        record = _unmeasured(run, start, end, draw)
    return at_commit(with_accuracy(record, **percents))


def _unmeasured(run: RunConfig, start: float, end: float, draw: random.Random) -> Record:
    return record_of(
        run,
        Measured(series=_series(run, start, end, draw), facts=_facts(run), inputs=_inputs(run)),
        environment={
            "python": "3.11",
            "platform": "made up",
            "packages": {},
            "torch": {"loaded": True},
            "cpu": {"cores": 2},
            "gpu": [],
        },
        started=datetime.now(UTC),
    )


def planned_record(run: RunConfig) -> Record:
    """Return the record that an honest run under a plan might leave."""
    record = honest_record(run)
    draw = random.Random(derive_seed(run.seed, run.arm.name, "made up too"))
    end = (record.value("accuracy") or 0.0) / 2 + draw.gauss(0, 0.5)
    curve = record.series.get("evaluation_accuracy", [])
    record = dataclasses.replace(
        record,
        series=record.series | ({"evaluation_accuracy": [end] * len(curve)} if curve else {}),
        inputs=record.inputs | plan_inputs(run),
    )
    names = ("accuracy", *(f"accuracy_{item.name}" for item in run.scale.test_sets))
    return on_device(with_accuracy(record, **dict.fromkeys(names, end)), "NVIDIA H200")


def with_accuracy(record: Record, **percents: float) -> Record:
    """Return a record with other accuracies, their answers, and what follows from all of them."""
    for name, percent in percents.items():
        record = _answered(record, name, percent)
    record = dataclasses.replace(record, facts=record.facts | {"grades": {"ok": 10**7}})
    return dataclasses.replace(record, metrics=record.metrics | record.derived())


def resealed(path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Edit a record's file and seal it anew, as another hand could; return its path."""
    values = json.loads(path.read_text())
    edit(values)
    values[SEAL] = digest_of({name: value for name, value in values.items() if name != SEAL})
    path.write_text(json.dumps(values))
    return path


def _answered(record: Record, name: str, percent: float) -> Record:
    sizes = {
        f"accuracy_{s['name']}": s["data"] for s in record.config["scale"].get("test_sets", ())
    }
    scale: Mapping[str, Any] = record.config["scale"]
    problems = sizes.get(name, scale["data"])["test_problems"] or PROBLEMS
    # The nearest that the answers to so many problems can give, of several samples each.
    samples = scale["evaluation"]["samples"] if name == "accuracy" or name in sizes else 1
    hits = round(problems * samples * percent / 100)
    right = [0] * (samples + 1)
    for one in range(problems):
        right[min(samples, max(0, hits - one * samples))] += 1
    every, none = [0] * samples + [problems], [problems] + [0] * samples
    tally = {"right": right} | dict.fromkeys(_PARTS, right) | {"format": every, "truncated": none}
    tally |= {"dropped": 0, "tokens": TOKENS * problems * samples}
    metrics = dict(record.metrics)
    if name == "accuracy":
        metrics["completion_tokens_mean"] = Estimate(value=float(TOKENS), unit="tokens")
    answers = record.facts.get("answers", {}) | {name: tally}
    return dataclasses.replace(record, metrics=metrics, facts=record.facts | {"answers": answers})


def _inputs(run: RunConfig) -> dict[str, str]:
    inputs = {"checkpoint": "c" * 64, "test_problems": "d" * 64, "prompt_template": "e" * 64}
    inputs |= {f"test_problems_{item.name}": "a" * 64 for item in run.scale.test_sets}
    if run.procedure != "evaluate":
        inputs["train_problems"] = "f" * 64
        inputs["order_of_problems"] = digest_of(["the order of seed", run.seed])
    return inputs


def _facts(run: RunConfig) -> dict[str, Any]:
    shape = shape_by_name(run.scale.checkpoint)
    arm, linears = run.arm, 7 * shape.layers
    facts: dict[str, Any] = {
        "linears": {arm.weight_format: linears},
        "relative_weight_error_mean": 0.0 if arm.weight_format == "bf16" else 0.095,
        "norms_wrapped": 2 * shape.layers + 1,
        "norms_trained": 2 * shape.layers if arm.norms_trained else 0,
        "adapter_modules": linears if arm.training == "lora" else 0,
        "parameters_trainable": 0,
        "compute": run.scale.compute_dtype,
    }
    if run.procedure == "evaluate":
        return facts
    facts["parameters_trainable"] = shape.parameters()
    if arm.training == "lora":
        norms = 2 * shape.layers * shape.hidden if arm.norms_trained else 0
        facts["parameters_trainable"] = shape.adapter_parameters(arm.lora_rank) + norms
    return facts | _training_facts(run, 2 * shape.layers, shape.hidden)


def _training_facts(run: RunConfig, norms: int, channels: int) -> dict[str, Any]:
    scale: TrainScale = run.scale
    sigmas = _sigmas(run)
    starts = range(0, scale.steps, scale.updates_per_rollout)
    asked = sum(1 for step in starts if sigmas[step] > 0)
    form = "none" if run.arm.noise is None else run.arm.noise.form
    touched = norms + (form == "as_released") if _is_noisy(run) and asked else 0
    rows = len(starts) * scale.prompts_per_rollout * scale.group_size
    return {
        "trained_change_l2": 3.2,
        "optimizer_steps": scale.steps,
        "advantage_group_mean_max": 2e-7,
        "seconds": {"rollout_seconds": 0.25, "update_seconds": 0.5},
        "rows": {"trained_on": rows, "without_reward": 0},
        "noise": {
            "form": form,
            "modules": touched,
            "channels_changed": asked * touched * channels,
            "rollouts_asked": asked,
            "rollouts_perturbed": asked if touched else 0,
        },
    }


def _is_noisy(run: RunConfig) -> bool:
    return run.arm.noise is not None and run.arm.noise.form != "as_published"


def _sigmas(run: RunConfig) -> list[float]:
    scale, noise = run.scale, run.arm.noise
    if noise is None:
        return [0.0] * scale.steps
    firsts = [step - step % scale.updates_per_rollout for step in range(scale.steps)]
    return [sigma_of_stage(noise, stage_of_step(noise, step, scale.steps)) for step in firsts]


def _series(run: RunConfig, start: float, end: float, draw: random.Random) -> dict[str, Any]:
    if run.procedure == "evaluate":
        return {}
    steps, sigma = run.scale.steps, _sigmas(run)
    rise = [start + (end - start) * min(1.0, 1.4 * step / steps) for step in range(steps)]
    accuracy = [min(1.0, max(0.0, 0.005 * value + draw.gauss(0, 0.04))) for value in rise]
    return (
        _rewards(run, accuracy)
        | _evaluations(run, end)
        | {
            "entropy": [0.32 - 0.16 * step / steps + draw.gauss(0, 0.01) for step in range(steps)],
            "grad_norm": [0.05 + 0.01 * draw.random() for _ in range(steps)],
            "learning_rate": [learning_rate_of_run(run, step) for step in range(steps)],
            "sigma": sigma,
            "sigma_realised": [1.02 * value if _is_noisy(run) else 0.0 for value in sigma],
        }
    )


def _rewards(run: RunConfig, accuracy: list[float]) -> dict[str, list[float]]:
    """Return the series of answers, and the reward that the arm pays for them."""
    scale: TrainScale = run.scale
    steps, form = scale.steps, 0.6
    kind = run.arm.reward
    bonus = {"task": scale.format_reward, "answer": 0.0, "format": 1.0, "random": 0.0}[kind]
    right = 0.0 if kind == "format" else 1.0
    constant = {
        "format": form,
        "completion_tokens": float(TOKENS),
        "truncation_rate": 0.0,
        "zero_variance_groups": 0.4,
    }
    return {name: [value] * steps for name, value in constant.items()} | {
        "accuracy": accuracy,
        "reward": [right * value + bonus * form for value in accuracy],
    }


def _evaluations(run: RunConfig, accuracy: float) -> dict[str, list[float]]:
    evaluation = run.scale.evaluation
    if not evaluation.every:
        return {}
    first = 0 if evaluation.token_budget else evaluation.every
    at = [float(step) for step in range(first, run.scale.steps + 1, evaluation.every)]
    return {
        "evaluation_step": at,
        "evaluation_tokens": [1000.0 * step for step in at],
        "evaluation_accuracy": [accuracy] * len(at),
    }
