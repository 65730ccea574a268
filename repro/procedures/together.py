"""Train and evaluate many small runs at once on one device; each yields what it would alone.

`train_together` sorts runs into ensembles (`repro.rl.stacked.grouping`), loads each run's policy as
`repro.procedures.train` does, and asks the same questions by the same evaluator. A run that fails
comes back as `FailedRun`; the others of its ensemble go on.

What is shared is said in each record: `effects["together"]` holds how many runs there were, the
seconds that the ensemble took before, during and after training, and of its memory the tokens that
a pass might take, the most that was in tensors, and how often the allocator had to give blocks back
and ask again; those in `seconds` are the run's share, and `peak_bytes` is of the process that held
them all.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from repro.data.load import load_problems
from repro.data.problem import digest_of_problems
from repro.data.prompts import render
from repro.data.repeats import repeat_counts
from repro.evaluate.asking import Stacked
from repro.evaluate.board import Board, final_metrics, final_tallies
from repro.evaluate.grades import Answers
from repro.evidence.derived import gain, kl_estimate
from repro.evidence.procedure import Measured, Progress, Stopped
from repro.evidence.record import Estimate
from repro.keep.keeper import Keeper, Keeping
from repro.measure.device_state import retries
from repro.measure.memory_use import allocated_peak_bytes, reset_peak
from repro.models.policy import Policy
from repro.procedures.finetune import Tuning
from repro.procedures.tally import RunTally
from repro.procedures.train import (
    divergences,
    further_sets,
    inputs_of,
    left_out,
    load_arm,
    training_metrics,
)
from repro.reward.grader import GraderPool
from repro.rl.collect import PromptSource
from repro.rl.loop import Hooks, StepValues
from repro.rl.runs import RUN_FAILURES, FailedRun, TrainResult
from repro.rl.stacked.grouping import footprint, group_runs
from repro.rl.stacked.noise import sharing_of
from repro.rl.stacked.policies import StackedPolicies
from repro.rl.stacked.sampler import StackSampler
from repro.rl.stacked.stack import Stack, stack_policies
from repro.rl.trainer import train
from repro.rollout.torch_sampler import end_token_ids
from repro.spec.config import OPENING_TOKENS, RunConfig, TrainScale, digest_of

# Without a CUDA device, runs are few and small, for tests: no estimate divides them.
_HOST_BYTES = 64 * 2**30

Outcome = Measured | FailedRun
Done = Callable[[RunConfig, Outcome], None]
FolderOf = Callable[[RunConfig], Path]


def train_together(
    runs: Sequence[RunConfig],
    *,
    device: str,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
    done: Done | None = None,
    folder_of: FolderOf | None = None,
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
        Called with each run and its outcome, as soon as its ensemble is done.
    folder_of
        A run's own folder, for its steps and completions; None keeps neither.

    Returns
    -------
    list
        The outcome of each run, in the order of `runs`.

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
    outcome_of: dict[str, Outcome] = {}
    with GraderPool(workers=threads) as pool:
        for group in group_runs(runs, memory):
            outcomes = _carry_out(
                group, device, memory, pool, progress, folder, should_stop, folder_of
            )
            for run, outcome in zip(group, outcomes, strict=True):
                outcome_of[run.digest()] = outcome
                if done is not None:
                    done(run, outcome)
            shutil.rmtree(_folder_of(group, folder), ignore_errors=True)
            # Captured graphs keep their memory until the last reference, cycles included, is gone.
            gc.collect()
            if target.type == "cuda":
                torch.cuda.empty_cache()
    return [outcome_of[run.digest()] for run in runs]


def _carry_out(
    group: Sequence[RunConfig],
    device: str,
    memory: int,
    pool: GraderPool,
    progress: Progress,
    folder: Path,
    should_stop: Callable[[], bool],
    folder_of: FolderOf | None,
) -> list[Outcome]:
    """Return the outcome of each run of one ensemble; runs that cannot be loaded have failed."""
    reset_peak()
    began = time.perf_counter()
    progress("loading", {"runs": float(len(group))})
    loaded = _policies(group, device)
    ready = [number for number, policy in enumerate(loaded) if isinstance(policy, Policy)]
    outcomes: list[Outcome] = [one for one in loaded if isinstance(one, FailedRun)]
    if ready:
        policies = [policy for policy in loaded if isinstance(policy, Policy)]
        stack = stack_policies(policies, end_token_ids=end_token_ids(policies[0]), device=device)
        del loaded, policies
        ensemble = _Ensemble(
            [group[number] for number in ready], stack, memory, pool, progress, folder_of
        )
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
    """The runs of one batched model, from loading to the outcome of each."""

    def __init__(
        self,
        runs: Sequence[RunConfig],
        stack: Stack,
        memory: int,
        pool: GraderPool,
        progress: Progress,
        folder_of: FolderOf | None,
    ) -> None:
        self.runs, self.stack = runs, stack
        self.scale: TrainScale = runs[0].scale
        self.failures: list[FailedRun | None] = [None] * len(runs)
        self._say = progress
        self.test = load_problems(self.scale.data, "test")
        trains, develops = stack.masters is not None, self.scale.evaluation.every > 0
        self.problems = load_problems(self.scale.data, "train") if trains else []
        self.development = (
            load_problems(self.scale.data, "development") if trains and develops else []
        )
        self.repeats: dict[str, int] = {}
        self.further = further_sets(self.scale)
        longest = self._longest_prompt()
        positions = longest + OPENING_TOKENS + self.scale.longest_completion
        self.sampler = StackSampler(self.stack, positions, sharing_of(runs))
        self.board = Board(runs, Stacked(self.sampler), stack.tokenizer, pool)
        self.tallies = [RunTally(self.board, pool, number) for number in range(len(runs))]
        self.tokens_at_once = footprint(runs, longest).tokens_at_once(len(runs), memory)
        self._retries = retries()
        # Of the whole ensemble, by what it did.
        self.seconds: dict[str, float] = {}
        self.tuning: Tuning | None = None
        self.policies: StackedPolicies | None = None
        # Of each run, the receipt of its KL to the start.
        self.divergences: list[dict[str, Any] | None] = [None] * len(runs)
        self.folders = None if folder_of is None else [folder_of(run) for run in runs]

    @property
    def alive(self) -> list[bool]:
        return [failure is None for failure in self.failures]

    def carry_out(self, folder: Path, should_stop: Callable[[], bool]) -> list[Outcome]:
        """Train where there is something to train, and measure."""
        if self.stack.masters is None:
            if should_stop():
                raise Stopped
            return self._measured(None, None, {})
        self._tell("evaluating the start")
        began = time.perf_counter()
        start = self.board.greedy(self.test, self.alive)
        masters = self.stack.masters
        policies = StackedPolicies(self.runs, self.stack, self.sampler, self.tokens_at_once)
        self.policies = policies
        if self.runs[0].procedure == "finetune":
            self.tuning = Tuning(policies, self.stack, self.test)
        untouched = masters.values.to("cpu", copy=True)
        self.seconds["start"] = time.perf_counter() - began
        began = time.perf_counter()
        results = self._train(policies, folder, should_stop)
        self.seconds["training"] = time.perf_counter() - began
        inputs = {"train_problems": digest_of_problems(self.problems)}
        self.repeats = repeat_counts(self.problems, self.test)
        self.moved = [
            float(torch.linalg.vector_norm((now.cpu() - before).double()))
            for now, before in zip(masters.values, untouched, strict=True)
        ]
        self.sampler.refresh()
        return self._measured(start, results, inputs)

    def _longest_prompt(self) -> int:
        """Return the tokens of the longest prompt of all; what exceeds the scale's limit raises."""
        template, tokenizer = self.scale.prompt_template, self.stack.tokenizer
        every = [self.problems, self.development, self.test, *self.further.values()]
        lengths = [len(render(p, template, tokenizer)) for problems in every for p in problems]
        return min(max(lengths), self.scale.longest_prompt)

    def _train(
        self,
        policies: StackedPolicies,
        folder: Path,
        should_stop: Callable[[], bool],
    ) -> list[TrainResult | None]:
        """Return each run's result, None for failed ones; raise `Stopped` when not finished."""

        def on_development(step: int, alive: Sequence[bool]) -> list[float | None]:
            del step
            answers = self.board.greedy(self.development, alive)
            return [None if own is None else fmean(own.accuracy) for own in answers]

        hooks = Hooks(
            evaluate=on_development if self.development else None,
            on_step=self._on_step,
            should_stop=should_stop,
            tallies=self.tallies,
        )
        with ExitStack() as contexts:
            if self.folders is not None:
                keeper = Keeper(self.runs, self.folders, Keeping.from_environment())
                hooks = contexts.enter_context(keeper).around(hooks, self.stack.tokenizer)
            if self.tuning is not None:
                results = self.tuning.tune(self.problems, hooks, folder)
            else:
                tokenizer = self.stack.tokenizer
                shared: dict[str, list[int]] = {}
                sources = [PromptSource(self.problems, tokenizer, run, shared) for run in self.runs]
                results = train(policies, sources, self.board.score, hooks, folder=folder)
        trained: list[TrainResult | None] = []
        for number, result in enumerate(results):
            if isinstance(result, FailedRun):
                self.failures[number] = result
                trained.append(None)
                continue
            if not result.finished:
                raise Stopped
            trained.append(result)
        return trained

    def _measured(
        self,
        start: Sequence[Answers | None] | None,
        results: Sequence[TrainResult | None] | None,
        inputs: dict[str, str],
    ) -> list[Outcome]:
        """Ask the final policies, and put together the outcome of each run."""
        self._tell("evaluating")
        began = time.perf_counter()
        answers = {}
        if any(self.alive):
            answers = self.board.final(self.test, self.further, self.alive)
            if self.policies is not None:
                self.divergences = divergences(self.policies, self.board, self.test, self.alive)
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
        metrics = final_metrics(answers, number, self.scale.evaluation.at)
        metrics["peak_bytes"] = Estimate(
            value=float(self.tallies[number].peak_bytes),
            unit="bytes",
            method=f"peak of the process during {len(self.runs)} runs at once",
        )
        effects: dict[str, Any] = self.stack.effects[number] | {
            "test_sets_left_out": left_out(run, self.further),
            "grades": self.tallies[number].grades,
            "answers": final_tallies(answers, number),
            "grader_workers_killed": self.tallies[number].workers_killed,
            "together": {
                "runs": len(self.runs),
                "tokens_at_once": self.tokens_at_once,
                "allocated_bytes": allocated_peak_bytes(),
                "allocator_retries": retries() - self._retries,
                "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            },
        }
        if self.stack.device.type != "cpu":
            effects["sampler"] = type(self.sampler).__name__
        series: dict[str, list[float | None]] = {}
        if result is not None and start is not None:
            metrics |= gain(start.estimates()["accuracy"], metrics["accuracy_greedy"])
            if self.tuning is None:
                metrics |= training_metrics(run, result)
            else:
                metrics |= self.tuning.metrics(number, result)
            effects |= result.effects
            effects["answers"]["accuracy_greedy_start"] = start.tallies()
            receipt = self.divergences[number]
            if receipt is not None:
                effects["kl_to_start"] = receipt
                metrics["kl_to_start"] = kl_estimate(receipt)
            effects["trained_change_l2"] = self.moved[number]
            effects["optimizer_steps"] = result.step
            effects["repeated_questions"] = self.repeats
            series = {name: list(values) for name, values in result.series.items()}
        return Measured(
            metrics=metrics,
            series=series,
            effects=effects,
            inputs=inputs_of(run, self.stack.effects[number], self.test, self.further) | inputs,
        )

    def _on_step(self, step: int, values: StepValues) -> None:
        own = [v.get("reward") for v in values if v is not None]
        rewards = [reward for reward in own if reward is not None]
        shown = {"step": float(step), "steps": float(self.scale.steps)}
        if rewards:
            shown["reward"] = fmean(rewards)
        self._tell("training", shown)

    def _tell(self, text: str, values: dict[str, float] | None = None) -> None:
        self._say(text, {"runs": float(len(self.runs))} | (values or {}))


def _policies(runs: Sequence[RunConfig], device: str) -> list[Policy | FailedRun]:
    """Return the runs' policies, or why there is none; runs that start alike share one."""
    loaded: dict[str, Policy | FailedRun] = {}
    policies = []
    for run in runs:
        arm = run.arm
        seeded = arm.training == "lora" or arm.weight_noise is not None or run.scale.permuted
        weights = [arm.weight_format, arm.training, arm.norms_trained, run.seed if seeded else None]
        changes = str(arm.weight_noise), str(arm.rounding)
        key = digest_of([*weights, *changes, arm.lora_rank, arm.lora_alpha, run.scale.checkpoint])
        if key not in loaded:
            try:
                loaded[key] = load_arm(run, device)
            except RUN_FAILURES as error:
                loaded[key] = FailedRun(step=0, reason=f"{type(error).__name__}: {error}")
        policies.append(loaded[key])
    return policies
