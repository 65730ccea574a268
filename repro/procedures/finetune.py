"""Fine-tune an arm on worked solutions and evaluate it: `repro.procedures.train` without rewards.

The same policy, questions and evaluator; what is trained on is the training split's own solutions
(`repro.rl.supervised`). Beside the accuracies there is `solution_loss`: the next-token loss on the
test split's worked solutions, before training and after it, without added noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from repro.data.load import load_problems
from repro.evidence.procedure import Measured, Progress, Stopped
from repro.evidence.record import Estimate
from repro.procedures.train import EDGE_STEPS, Bench, loaded, measure_end, measure_start
from repro.rl.lessons import Lesson, lessons_of, mean_loss
from repro.rl.loop import TrainResult
from repro.rl.supervised import fine_tune, require_supervised
from repro.spec.config import RunConfig


def fine_tune_and_evaluate(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Fine-tune `run`'s arm and measure it; see `repro.procedures.Procedure`."""
    require_supervised(run)
    with loaded(run, progress, threads) as bench:
        problems = load_problems(run.scale.data, "train")
        lessons = lessons_of(problems, bench.policy, run)
        unseen = lessons_of(bench.test, bench.policy, run)
        start = measure_start(bench, progress)
        loss_start = _solution_loss(bench, unseen, "before training")
        result = _tune(bench, lessons, folder / "checkpoint", progress, should_stop)
        if not result.finished:
            raise Stopped
        bench.sampler.refresh()
        found = measure_end(bench, start, result, problems, folder, progress)
        own = tuning_metrics(result) | {
            "solution_loss_start": loss_start,
            "solution_loss": _solution_loss(bench, unseen, "after training"),
        }
        return dataclasses.replace(found, metrics=found.metrics | own)


def _tune(
    bench: Bench,
    lessons: list[Lesson],
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> TrainResult:
    run = bench.run

    def on_step(step: int, values: dict[str, Any]) -> None:
        shown = {"step": float(step), "steps": float(run.scale.steps), "loss": values["loss"]}
        progress("training", shown)

    def on_development(step: int) -> float:
        del step
        bench.sampler.refresh()
        return fmean(bench.greedy(bench.development).accuracy)

    return fine_tune(
        run,
        bench.policy,
        lessons,
        folder=folder,
        on_step=on_step,
        should_stop=should_stop,
        evaluate=on_development if bench.development else None,
    )


def _solution_loss(bench: Bench, lessons: list[Lesson], when: str) -> Estimate:
    value = mean_loss(bench.policy, lessons, bench.run.scale.micro_batch_rows)
    return solution_loss(value, len(lessons), when)


def solution_loss(value: float, lessons: int, when: str) -> Estimate:
    """Return a mean loss on the test split's solutions, so many of them, as it is recorded."""
    return Estimate(
        value=value,
        unit="nats",
        n=lessons,
        method=f"mean over the tokens of the test split's worked solutions, {when}, without noise",
    )


def tuning_metrics(result: TrainResult) -> dict[str, Estimate]:
    """Return what the run's series and receipts say in one number each."""
    losses = [float(value) for value in result.series["loss"] if value is not None]

    def mean(values: list[float], where: str) -> Estimate:
        return Estimate(
            value=fmean(values), unit="nats", n=len(values), method=f"mean over {where}"
        )

    return {
        "train_loss_first": mean(losses[:EDGE_STEPS], f"the first {EDGE_STEPS} steps"),
        "train_loss_last": mean(losses[-EDGE_STEPS:], f"the last {EDGE_STEPS} steps"),
        "train_seconds": Estimate(
            value=result.effects["seconds"]["update_seconds"],
            unit="seconds",
            method="updates, by the clock",
        ),
    }
