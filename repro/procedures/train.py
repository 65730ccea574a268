"""Train an arm and evaluate it, or evaluate an untrained one: the rows of an accuracy table.

Both ask the same questions with the same evaluator (`repro.evaluate.board`). A trained arm is asked
greedily before training too, with its own quantised weights, so that its gain is its own.

A run can be stopped between rollouts; it leaves a checkpoint and the next start goes on from it,
to the same numbers.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor

from repro.data.load import is_available, load_problems
from repro.data.problem import Problem, digest_of_problems
from repro.data.prompts import template_named
from repro.evaluate.asking import Alone
from repro.evaluate.board import Board, final_metrics
from repro.evaluate.grades import Answers
from repro.evaluate.questions import OPENING_TOKENS
from repro.evidence.procedure import Measured, Progress, Stopped
from repro.evidence.record import Estimate
from repro.measure.memory_use import peak_bytes, reset_peak
from repro.models.adapter_files import save_adapter
from repro.models.checkpoint import digest_of_files, resolve
from repro.models.policy import Policy, load_policy, trainable_parameters
from repro.procedures.matched_noise import plant_matched_noise
from repro.reward.grader import GraderPool
from repro.reward.score import Rewards
from repro.rl.loop import TrainResult
from repro.rl.trainer import train
from repro.rollout.for_policy import sampler_for
from repro.rollout.sampler import Sampler
from repro.spec.config import RunConfig, TrainScale

EDGE_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bench:
    """A loaded policy with all that asking it needs; `board` has this one run."""

    run: RunConfig
    policy: Policy
    sampler: Sampler
    board: Board
    pool: GraderPool
    test: list[Problem]
    further: dict[str, list[Problem]]
    development: list[Problem]

    def greedy(self, problems: Sequence[Problem]) -> Answers:
        """Ask once each, greedily."""
        (answers,) = self.board.greedy(problems)
        return cast(Answers, answers)  # the one run is alive


def train_and_evaluate(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Train `run`'s arm and measure it; see `repro.procedures.Procedure`."""
    with loaded(run, progress, threads) as bench:
        problems = load_problems(run.scale.data, "train")
        start = measure_start(bench, progress)
        result = _train(bench, problems, folder / "checkpoint", progress, should_stop)
        if not result.finished:
            raise Stopped
        found = measure_end(bench, start, result, problems, folder, progress)
        return dataclasses.replace(found, metrics=found.metrics | training_metrics(result))


def evaluate_untrained(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Measure an untrained arm; see `repro.procedures.Procedure`."""
    del folder
    with loaded(run, progress, threads) as bench:
        if should_stop():
            raise Stopped
        progress("evaluating", {})
        return Measured(
            metrics=metrics_at_end(bench), effects=_effects(bench), inputs=_inputs(bench)
        )


def load_arm(run: RunConfig, device: str) -> Policy:
    """Return the policy of a run's arm as it starts, weight noise planted where the arm has any."""
    scale: TrainScale = run.scale
    arm = run.arm
    policy = load_policy(
        scale.checkpoint,
        weight_format=arm.weight_format,
        training=arm.training,
        lora_rank=arm.lora_rank,
        lora_alpha=arm.lora_alpha,
        norms_trained=arm.norms_trained,
        compute_dtype=scale.compute_dtype,
        seed=run.seed,
        device=device,
    )
    if arm.weight_noise is not None:
        plant_matched_noise(policy, run, load_problems(scale.data, "train"))
    return policy


def further_sets(scale: TrainScale) -> dict[str, list[Problem]]:
    """Return the scale's further test sets by name, those that can be read here."""
    return {
        item.name: load_problems(item.data, "test")
        for item in scale.test_sets
        if is_available(item.data.source)
    }


@contextmanager
def loaded(run: RunConfig, progress: Progress, threads: int) -> Iterator[Bench]:
    """Load a run's policy and all that asking it needs; the graders end with the context."""
    torch.set_num_threads(threads)
    reset_peak()
    with GraderPool(workers=1) as pool:
        progress("loading", {})
        yield _bench(run, pool)


def _bench(run: RunConfig, pool: GraderPool) -> Bench:
    scale: TrainScale = run.scale
    policy = load_arm(run, "cpu" if run.tier == "smoke" else "cuda")
    sampler = _sampler(policy, scale)
    wants_development = scale.evaluation.every > 0
    return Bench(
        run=run,
        policy=policy,
        sampler=sampler,
        board=Board([run], Alone(sampler), policy.tokenizer, pool),
        pool=pool,
        test=load_problems(scale.data, "test"),
        further=further_sets(scale),
        development=load_problems(scale.data, "development") if wants_development else [],
    )


def _sampler(policy: Policy, scale: TrainScale) -> Sampler:
    """Return the sampler of rollouts and questions alike."""
    longest = max(scale.rollout.max_new_tokens, scale.evaluation.sampling.max_new_tokens)
    rows = scale.prompts_per_rollout * scale.group_size
    return sampler_for(
        policy,
        rows=rows,
        max_new_tokens=longest,
        max_positions=scale.max_prompt_tokens + OPENING_TOKENS + longest,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """What an arm is before training: its greedy accuracy, and what will be trained, by name."""

    accuracy: Estimate
    parameters: dict[str, Tensor]


def measure_start(bench: Bench, progress: Progress) -> Start:
    """Ask an arm greedily before training, and keep a copy of what will be trained."""
    parameters = trainable_parameters(bench.policy)
    copies = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    progress("evaluating the start", {})
    return Start(accuracy=bench.greedy(bench.test).estimates()["accuracy"], parameters=copies)


def measure_end(
    bench: Bench,
    start: Start,
    result: TrainResult,
    problems: Sequence[Problem],
    folder: Path,
    progress: Progress,
) -> Measured:
    """Measure an arm trained on `problems`, however it was; keep its adapter in `folder`."""
    progress("evaluating", {})
    metrics = metrics_at_end(bench)
    metrics |= gain(start.accuracy, metrics["accuracy_greedy"])
    effects = _effects(bench) | result.effects
    effects["trained_change_l2"] = _distance(bench.policy, start.parameters)
    effects["optimizer_steps"] = result.step
    if bench.run.arm.training == "lora":
        _keep_adapter(bench.policy, folder / "adapter")
    return Measured(
        metrics=metrics,
        series={name: list(values) for name, values in result.series.items()},
        effects=effects,
        inputs=_inputs(bench) | {"train_problems": digest_of_problems(problems)},
    )


def _train(
    bench: Bench,
    problems: Sequence[Problem],
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> TrainResult:
    run = bench.run

    def rewards(texts: Sequence[str], golds: Sequence[str], seeds: Sequence[int]) -> Rewards:
        (scored,) = bench.board.score([(texts, golds, seeds)])
        return cast(Rewards, scored)  # the one run asked

    def on_step(step: int, values: dict[str, Any]) -> None:
        shown = {"step": float(step), "steps": float(run.scale.steps)}
        shown |= {name: values[name] for name in ("reward", "entropy") if values.get(name)}
        progress("training", shown)

    def on_development(step: int) -> float:
        return fmean(bench.greedy(bench.development).accuracy)

    return train(
        run,
        bench.policy,
        bench.sampler,
        problems,
        rewards,
        folder=folder,
        on_step=on_step,
        should_stop=should_stop,
        evaluate=on_development if bench.development else None,
    )


def metrics_at_end(bench: Bench) -> dict[str, Estimate]:
    """Ask the policy as it is at the end of a run; return its metrics, and the peak memory."""
    metrics = final_metrics(bench.board.final(bench.test, bench.further))
    metrics["peak_bytes"] = Estimate(
        value=float(peak_bytes()), unit="bytes", method="peak of the process during the run"
    )
    return metrics


def gain(start: Estimate, end: Estimate) -> dict[str, Estimate]:
    """Return the greedy accuracy before training and the gain over it."""
    if start.value is None or end.value is None:
        raise ValueError("no test problem could be graded; the gain has no value")
    difference = Estimate(
        value=end.value - start.value,
        unit="points",
        n=end.n,
        method="greedy accuracy after training minus before, same problems and weights",
    )
    return {"accuracy_greedy_start": start, "gain_greedy": difference}


def training_metrics(result: TrainResult) -> dict[str, Estimate]:
    """Return what a training run's series and receipts say in one number each."""
    series = result.series

    def over(name: str, part: slice, unit: str, where: str) -> Estimate:
        values = [value for value in series.get(name, [])[part] if value is not None]
        return Estimate(
            value=fmean(values) if values else None,
            unit=unit,
            n=len(values),
            method=f"mean over {where}",
        )

    seconds = result.effects["seconds"]
    first, last = slice(0, EDGE_STEPS), slice(-EDGE_STEPS, None)
    return {
        "train_reward_mean": over("reward", slice(None), "reward", "all steps"),
        "entropy_first": over("entropy", first, "nats", f"the first {EDGE_STEPS} steps"),
        "entropy_last": over("entropy", last, "nats", f"the last {EDGE_STEPS} steps"),
        "train_seconds": Estimate(
            value=seconds["rollout_seconds"] + seconds["update_seconds"],
            unit="seconds",
            method="rollouts and updates, by the clock",
        ),
    }


def _effects(bench: Bench) -> dict[str, Any]:
    """Return the receipts of the policy, its sampler and the graders."""
    found = dict(bench.policy.effects)
    if bench.policy.device.type != "cpu":
        found["sampler"] = type(bench.sampler).__name__
    return found | {
        "test_sets_left_out": left_out(bench.run, bench.further),
        "grades": bench.board.grades(),
        "grader_workers_killed": bench.pool.workers_killed,
    }


def left_out(run: RunConfig, further: Mapping[str, Sequence[Problem]]) -> list[str]:
    """Return the names of the scale's further test sets that could not be read here."""
    return [item.name for item in run.scale.test_sets if item.name not in further]


def inputs_of(
    run: RunConfig,
    effects: Mapping[str, Any],
    test: Sequence[Problem],
    further: Mapping[str, Sequence[Problem]],
) -> dict[str, str]:
    """Return the digests of what went into a run: checkpoint, problems, prompt template."""
    folder = resolve(run.scale.checkpoint)
    weights = sorted(folder.glob("*.safetensors"))
    template = template_named(run.scale.prompt_template)
    return {
        "checkpoint": effects.get("checkpoint_sha256") or digest_of_files(weights),
        "test_problems": digest_of_problems(test),
        **{
            f"test_problems_{name}": digest_of_problems(problems)
            for name, problems in further.items()
        },
        "prompt_template": template.digest(),
    }


def _inputs(bench: Bench) -> dict[str, str]:
    """Return the digests of what went into a run; see `inputs_of`."""
    return inputs_of(bench.run, bench.policy.effects, bench.test, bench.further)


def _distance(policy: Policy, start: dict[str, Tensor]) -> float:
    """Return the L2 norm of what is trained less its copies from the start."""
    now = trainable_parameters(policy)
    squares = [(now[name].detach() - start[name]).double().square().sum() for name in start]
    return float(torch.stack(squares).sum().sqrt())


def _keep_adapter(policy: Policy, folder: Path) -> None:
    """Write the policy's adapter to `folder`, in place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    save_adapter(policy, folder)
