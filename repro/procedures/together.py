"""Train and evaluate many small runs at once on one device; each yields what it would alone.

`train_together` sorts runs into ensembles (`repro.ensemble.grouping`), loads each run's policy as
`repro.procedures.train` does, and asks the same questions by the same evaluator. A run that fails
comes back as `FailedRun`; the others of its ensemble go on.

What is shared is said in each record: `effects["together"]` holds how many runs there were and the
seconds that the ensemble took before, during and after training; those in `seconds` are the run's
share, and `peak_bytes` is of the process that held them all.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from repro.data.load import load_problems
from repro.data.problem import Problem, digest_of_problems
from repro.ensemble.collecting import RUN_FAILURES
from repro.ensemble.grouping import footprint, group_runs
from repro.ensemble.hooks import FailedRun, Hooks
from repro.ensemble.sampler import StackSampler
from repro.ensemble.stack import Stack, stack_policies
from repro.ensemble.trainer import train_ensemble
from repro.evaluate.asking import Stacked
from repro.evaluate.board import Board, final_metrics
from repro.evaluate.grades import Answers
from repro.evaluate.questions import OPENING_TOKENS
from repro.evidence.procedure import Measured, Progress, Stopped
from repro.evidence.record import Estimate
from repro.measure.memory_use import peak_bytes, reset_peak
from repro.models.policy import Policy
from repro.procedures.train import (
    further_sets,
    gain,
    inputs_of,
    left_out,
    load_arm,
    training_metrics,
)
from repro.procedures.tune_together import Tuning
from repro.reward.grader import GraderPool
from repro.rl.loop import TrainResult
from repro.rl.receipts import Values
from repro.rollout.torch_sampler import end_token_ids
from repro.spec.config import RunConfig, TrainScale, digest_of

# Without a CUDA device, runs are few and small, for tests: no estimate divides them.
_HOST_BYTES = 64 * 2**30

Outcome = Measured | FailedRun
Done = Callable[[RunConfig, Outcome], None]


def train_together(
    runs: Sequence[RunConfig],
    *,
    device: str,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
    done: Done | None = None,
) -> list[Outcome]:
    """Carry out runs of `train`, `finetune` and `evaluate`, as many at once as memory allows.

    Parameters
    ----------
    runs
        With a `TrainScale` each.
    device
        `cpu`, `cuda` or `cuda:<n>`.
    folder
        Of the ensembles' checkpoints; the same call goes on from them.
    threads
        Of torch, and workers that grade.
    done
        Called with each run and what it came to, as soon as its ensemble is done.

    Returns
    -------
    list
        What each run came to, in the order of `runs`.

    Raises
    ------
    Stopped
        When asked to stop; the ensemble at hand leaves a checkpoint.
    """
    torch.set_num_threads(threads)
    target = torch.device(device)
    if target.type == "cuda":
        torch.cuda.set_device(target.index or 0)  # graphs are captured on the current device
    memory = memory_of(device)
    found: dict[str, Outcome] = {}
    with GraderPool(workers=threads) as pool:
        for group in group_runs(runs, memory):
            outcomes = _carry_out(group, device, memory, pool, progress, folder, should_stop)
            for run, outcome in zip(group, outcomes, strict=True):
                found[run.digest()] = outcome
                if done is not None:
                    done(run, outcome)
            shutil.rmtree(_folder_of(group, folder), ignore_errors=True)
            # Captured graphs keep their memory until the last reference, cycles included, is gone.
            gc.collect()
            if target.type == "cuda":
                torch.cuda.empty_cache()
    return [found[run.digest()] for run in runs]


def _carry_out(
    group: Sequence[RunConfig],
    device: str,
    memory: int,
    pool: GraderPool,
    progress: Progress,
    folder: Path,
    should_stop: Callable[[], bool],
) -> list[Outcome]:
    """Return what each run of one ensemble came to; runs that cannot be loaded have failed."""
    reset_peak()
    began = time.perf_counter()
    progress("loading", {"runs": float(len(group))})
    loaded = _policies(group, device)
    ready = [number for number, policy in enumerate(loaded) if isinstance(policy, Policy)]
    outcomes: list[Outcome] = [found for found in loaded if isinstance(found, FailedRun)]
    if ready:
        policies = [policy for policy in loaded if isinstance(policy, Policy)]
        stack = stack_policies(policies, end_token_ids=end_token_ids(policies[0]), device=device)
        del loaded, policies
        ensemble = _Ensemble([group[number] for number in ready], stack, memory, pool, progress)
        ensemble.seconds["loading"] = time.perf_counter() - began
        for number, outcome in zip(
            ready, ensemble.carry_out(_folder_of(group, folder), should_stop), strict=True
        ):
            outcomes.insert(number, outcome)
    return outcomes


def memory_of(device: str) -> int:
    """Return the bytes of a device's memory; of the host, a number that holds every test."""
    if torch.device(device).type == "cpu":
        return _HOST_BYTES
    return int(torch.cuda.get_device_properties(device).total_memory)


def _folder_of(group: Sequence[RunConfig], folder: Path) -> Path:
    return folder / f"ensemble-{digest_of([run.digest() for run in group])[:16]}"


class _Ensemble:
    """The runs of one batched model, from loading to what each came to."""

    def __init__(
        self,
        runs: Sequence[RunConfig],
        stack: Stack,
        memory: int,
        pool: GraderPool,
        progress: Progress,
    ) -> None:
        self.runs, self.pool, self.stack = runs, pool, stack
        self.scale: TrainScale = runs[0].scale
        self.failures: list[FailedRun | None] = [None] * len(runs)
        self._say = progress
        self.test = load_problems(self.scale.data, "test")
        self.further = further_sets(self.scale)
        longest = max(
            self.scale.rollout.max_new_tokens, self.scale.evaluation.sampling.max_new_tokens
        )
        positions = self.scale.max_prompt_tokens + OPENING_TOKENS + longest
        self.sampler = StackSampler(self.stack, positions)
        self.board = Board(runs, Stacked(self.sampler), stack.tokenizer, pool)
        self.groups_at_once = footprint(runs).groups_at_once(
            len(runs), memory, self.scale.prompts_per_rollout
        )
        # Of the whole ensemble, by what it did.
        self.seconds: dict[str, float] = {}
        self.tuning: Tuning | None = None

    @property
    def alive(self) -> list[bool]:
        return [failure is None for failure in self.failures]

    def carry_out(self, folder: Path, should_stop: Callable[[], bool]) -> list[Outcome]:
        """Train where there is something to train, and measure."""
        if self.stack.masters is None:
            if should_stop():
                raise Stopped
            return self._measured(None, None, {})
        problems = load_problems(self.scale.data, "train")
        self._tell("evaluating the start")
        began = time.perf_counter()
        start = self.board.greedy(self.test, self.alive)
        if self.runs[0].procedure == "finetune":
            settings = self.runs, self.stack, self.sampler, self.test, self.groups_at_once
            self.tuning = Tuning(*settings)
        masters = self.stack.masters
        untouched = masters.values.to("cpu", copy=True)
        self.seconds["start"] = time.perf_counter() - began
        began = time.perf_counter()
        results = self._train(problems, folder, should_stop)
        self.seconds["training"] = time.perf_counter() - began
        inputs = {"train_problems": digest_of_problems(problems)}
        self.moved = [
            float(torch.linalg.vector_norm((now.cpu() - before).double()))
            for now, before in zip(masters.values, untouched, strict=True)
        ]
        self.sampler.refresh()
        return self._measured(start, results, inputs)

    def _train(
        self, problems: Sequence[Problem], folder: Path, should_stop: Callable[[], bool]
    ) -> list[TrainResult | None]:
        """Return each run's result, None for failed ones; raise `Stopped` when not finished."""
        development = []
        if self.scale.evaluation.every > 0:
            development = load_problems(self.scale.data, "development")

        def on_development(step: int, alive: Sequence[bool]) -> list[float | None]:
            del step
            answers = self.board.greedy(development, alive)
            return [None if found is None else fmean(found.accuracy) for found in answers]

        hooks = Hooks(
            score=self.board.score,
            evaluate=on_development if development else None,
            on_step=self._on_step,
            should_stop=should_stop,
        )
        if self.tuning is not None:
            results = self.tuning.tune(problems, hooks, folder)
        else:
            results = train_ensemble(
                self.runs,
                self.stack,
                self.sampler,
                problems,
                hooks,
                folder=folder,
                groups_at_once=self.groups_at_once,
            )
        kept: list[TrainResult | None] = []
        for number, result in enumerate(results):
            if isinstance(result, FailedRun):
                self.failures[number] = result
                kept.append(None)
                continue
            if not result.finished:
                raise Stopped
            kept.append(result)
        return kept

    def _measured(
        self,
        start: Sequence[Answers | None] | None,
        results: Sequence[TrainResult | None] | None,
        inputs: dict[str, str],
    ) -> list[Outcome]:
        """Ask the final policies, and put together what each run came to."""
        self._tell("evaluating")
        began = time.perf_counter()
        answers = {}
        if any(self.alive):
            answers = self.board.final(self.test, self.further, self.alive)
        self.seconds["final"] = time.perf_counter() - began
        outcomes: list[Outcome] = []
        for number, run in enumerate(self.runs):
            failure = self.failures[number]
            if failure is None:
                try:
                    result = None if results is None else results[number]
                    begun = None if start is None else start[number]
                    outcomes.append(self._one(number, run, begun, result, answers, inputs))
                    continue
                except RUN_FAILURES as error:
                    failure = FailedRun(
                        step=run.scale.steps, reason=f"{type(error).__name__}: {error}"
                    )
            outcomes.append(failure)
        return outcomes

    def _one(
        self,
        number: int,
        run: RunConfig,
        start: Answers | None,
        result: TrainResult | None,
        answers: dict[str, list[Answers | None]],
        inputs: dict[str, str],
    ) -> Measured:
        metrics = final_metrics(answers, number)
        metrics["peak_bytes"] = Estimate(
            value=float(peak_bytes()),
            unit="bytes",
            method=f"peak of the process during {len(self.runs)} runs at once",
        )
        effects: dict[str, Any] = self.stack.effects[number] | {
            "test_sets_left_out": left_out(run, self.further),
            "grades": self.board.grades(number),
            "grader_workers_killed": self.pool.workers_killed,
            "together": {
                "runs": len(self.runs),
                "groups_at_once": self.groups_at_once,
                "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            },
        }
        if self.stack.device.type != "cpu":
            effects["sampler"] = type(self.sampler).__name__
        series: dict[str, list[float | None]] = {}
        if result is not None and start is not None:
            metrics |= gain(start.estimates()["accuracy"], metrics["accuracy_greedy"])
            if self.tuning is None:
                metrics |= training_metrics(result)
            else:
                metrics |= self.tuning.metrics(number, result)
            effects |= result.effects
            effects["trained_change_l2"] = self.moved[number]
            effects["optimizer_steps"] = result.step
            series = {name: list(values) for name, values in result.series.items()}
        return Measured(
            metrics=metrics,
            series=series,
            effects=effects,
            inputs=inputs_of(run, self.stack.effects[number], self.test, self.further) | inputs,
        )

    def _on_step(self, step: int, values: Sequence[Values | None]) -> None:
        found = [v.get("reward") for v in values if v is not None]
        rewards = [reward for reward in found if reward is not None]
        shown = {"step": float(step), "steps": float(self.scale.steps)}
        if rewards:
            shown["reward"] = fmean(rewards)
        self._tell("training", shown)

    def _tell(self, text: str, values: dict[str, float] | None = None) -> None:
        self._say(text, {"runs": float(len(self.runs))} | (values or {}))


def _policies(runs: Sequence[RunConfig], device: str) -> list[Policy | FailedRun]:
    """Return the runs' policies, or why there is none; runs that start alike share one."""
    loaded: dict[str, Policy | FailedRun] = {}
    found = []
    for run in runs:
        arm = run.arm
        seeded = arm.training == "lora" or arm.weight_noise is not None
        weights = [arm.weight_format, arm.training, arm.norms_trained, run.seed if seeded else None]
        key = digest_of(
            [*weights, arm.lora_rank, arm.lora_alpha, str(arm.weight_noise), run.scale.checkpoint]
        )
        if key not in loaded:
            try:
                loaded[key] = load_arm(run, device)
            except RUN_FAILURES as error:
                loaded[key] = FailedRun(step=0, reason=f"{type(error).__name__}: {error}")
        found.append(loaded[key])
    return found
