"""Train and evaluate many small runs at once on one device, with the results of separate runs.

`train_together` sorts runs into ensembles (`repro.rl.stacked.grouping`), loads each run's policy as
`repro.procedures.train` does, and evaluates it with the same evaluator on the same problems. A run
that fails is returned as a `FailedRun`; the other runs of its ensemble continue.

Each record says what the runs shared. `facts["together"]` holds the number of runs, the seconds
of the ensemble before, during and after training, the tokens that one pass may take, the peak of
the memory in tensors, and how often the allocator had to free cached blocks and retry. The record's
`seconds` are the run's share; `peak_bytes` is the peak of the whole process.
"""

from __future__ import annotations

import dataclasses
import gc
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch

from repro.data.prompts import render
from repro.evaluate.asking import StackAsker
from repro.evaluate.grades import Answers
from repro.evaluate.scale_evaluator import ScaleEvaluator
from repro.evidence.procedure import Measured, Progress, Stopped
from repro.measure.device_state import retries
from repro.measure.memory_use import allocated_peak_bytes, reset_peak
from repro.models.policy import Policy, device_bytes, end_token_ids
from repro.procedures.loaded_runs import (
    LoadedRuns,
    ProblemSets,
    TrainingOutcome,
    digests_at_start,
)
from repro.procedures.tally import RunTally
from repro.procedures.train import load_arm, train_runs
from repro.reward.grader import GraderPool
from repro.rl.runs import RUN_FAILURES, FailedRun, TrainResult, reason_of
from repro.rl.stacked.grouping import evaluation_share, footprint, group_runs
from repro.rl.stacked.stack import Stack, stack_policies
from repro.rl.stacked.stacked_policies import StackedPolicies
from repro.rl.stacked.stacked_sampler import StackedSampler
from repro.runlog.run_logger import LogOptions, RunLogger
from repro.spec.config import OPENING_TOKENS, RunConfig, TrainScale, digest_of

# Without a CUDA device, runs are few and small, for tests: no estimate divides them.
_HOST_BYTES = 64 * 2**30

RunOutcome = Measured | FailedRun
Done = Callable[[RunConfig, RunOutcome], None]
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
) -> list[RunOutcome]:
    """Carry out runs of the procedures `train` and `evaluate`, as many at once as fit in memory.

    Raises `Stopped` if `should_stop` returned true; the current ensemble has written a checkpoint.

    Parameters
    ----------
    runs
        Each with a `TrainScale`.
    device
        `cpu`, `cuda` or `cuda:<n>`.
    folder
        For the checkpoints of ensembles; the same call resumes from them.
    threads
        Threads of torch, and number of grader processes.
    done
        Called with each run and its outcome, as soon as its ensemble is done.
    folder_of
        Returns a run's folder, for the log of its steps and completions; None logs neither.

    Returns
    -------
    list
        The outcome of each run, in the order of `runs`.
    """
    torch.set_num_threads(threads)
    target, memory = torch.device(device), _HOST_BYTES
    if target.type == "cuda":  # CUDA graphs are captured on the current device
        torch.cuda.set_device(target.index or 0)
        memory = device_bytes(target)
    outcome_of: dict[str, RunOutcome] = {}
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
            # Captured graphs keep their memory as long as anything refers to them, cycles included.
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
) -> list[RunOutcome]:
    """Return the outcome of each run of one ensemble; a run that cannot be loaded has failed."""
    reset_peak()
    began = time.perf_counter()
    progress("loading", {"runs": float(len(group))})
    loaded = _policies(group, device)
    ready = [number for number, policy in enumerate(loaded) if isinstance(policy, Policy)]
    outcomes: list[RunOutcome] = [one for one in loaded if isinstance(one, FailedRun)]
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


def _folder_of(group: Sequence[RunConfig], folder: Path) -> Path:
    return folder / f"ensemble-{digest_of([run.digest() for run in group])[:16]}"


class _Ensemble:
    """The runs that are computed as one batched model, and their outcomes."""

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
        self.failures: list[FailedRun | None] = [None] * len(runs)
        self._progress = progress
        scale: TrainScale = runs[0].scale
        rewarded = any(run.arm.reward_function is not None for run in runs)
        problems = ProblemSets.of(scale, trains=stack.masters is not None, rewarded=rewarded)
        longest = _longest_prompt(problems, scale, stack)
        positions = longest + OPENING_TOKENS + scale.longest_completion
        self.sampler = StackedSampler(stack, positions)
        share = evaluation_share(memory)
        self.tokens_at_once = footprint(runs, longest, share).tokens_at_once(len(runs), memory)
        self._retries = retries()
        # Of the whole ensemble, by phase.
        self.seconds: dict[str, float] = {}
        asker = StackAsker(self.sampler, share=share)
        evaluation = ScaleEvaluator(runs, asker, stack.tokenizer, pool)
        self.loaded_runs = LoadedRuns(
            runs=runs,
            loaded=stack,
            sampler=self.sampler,
            problems=problems,
            evaluation=evaluation,
            tallies=[
                RunTally(evaluation, pool, number, digests_at_start(facts, problems))
                for number, facts in enumerate(stack.facts)
            ],
            facts=stack.facts,
            during=f"{len(runs)} runs at once",
        )
        self.folders = None if folder_of is None else [folder_of(run) for run in runs]

    @property
    def alive(self) -> list[bool]:
        return [failure is None for failure in self.failures]

    def carry_out(self, folder: Path, should_stop: Callable[[], bool]) -> list[RunOutcome]:
        """Train the runs if they train anything, and evaluate them."""
        masters, loaded_runs = self.stack.masters, self.loaded_runs
        if masters is None:
            if should_stop():
                raise Stopped
            return self._outcomes(lambda number: None)
        self._show("evaluating the start", {})
        began = time.perf_counter()
        start = loaded_runs.evaluation.greedy(loaded_runs.problems.test, self.alive)
        policies = StackedPolicies(self.runs, self.stack, self.sampler, self.tokens_at_once)
        untouched = masters.values.to("cpu", copy=True)
        self.seconds["start"] = time.perf_counter() - began
        began = time.perf_counter()
        results = self._train(policies, folder, should_stop)
        self.seconds["training"] = time.perf_counter() - began
        moved = [
            float(torch.linalg.vector_norm((now.cpu() - before).double()))
            for now, before in zip(masters.values, untouched, strict=True)
        ]
        policies.refresh()

        def trained(number: int) -> TrainingOutcome:
            result = cast(TrainResult, results[number])  # only called for runs that are alive
            return TrainingOutcome(
                start=cast(Answers, start[number]),
                result=result,
                change_l2=moved[number],
            )

        return self._outcomes(trained)

    def _train(
        self, policies: StackedPolicies, folder: Path, should_stop: Callable[[], bool]
    ) -> list[TrainResult | FailedRun]:
        """Train, and note which runs failed; raise `Stopped` if training was stopped."""
        hooks = self.loaded_runs.hooks(self._show, should_stop)
        with ExitStack() as contexts:
            if self.folders is not None:
                options = LogOptions.from_environment()
                logger = RunLogger(self.runs, self.folders, options, self._show)
                hooks = contexts.enter_context(logger).around(hooks, self.stack.tokenizer)
            results = train_runs(self.loaded_runs, policies, hooks, folder)
        self.failures = [one if isinstance(one, FailedRun) else None for one in results]
        if not all(isinstance(one, FailedRun) or one.finished for one in results):
            raise Stopped
        return results

    def _outcomes(self, trained: Callable[[int], TrainingOutcome | None]) -> list[RunOutcome]:
        """Evaluate the final policies and return the outcome of each run."""
        self._show("evaluating", {})
        began = time.perf_counter()
        if not any(self.alive):
            return [failure for failure in self.failures if failure is not None]
        final = self.loaded_runs.final(self.alive)
        self.seconds["final"] = time.perf_counter() - began
        loaded_runs = dataclasses.replace(self.loaded_runs, receipts={"together": self._receipt()})
        outcomes: list[RunOutcome] = []
        for number, failure in enumerate(self.failures):
            if failure is not None:
                outcomes.append(failure)
                continue
            try:
                outcomes.append(loaded_runs.outcome(number, final, trained(number)))
            except RUN_FAILURES as error:
                steps = self.runs[number].scale.steps
                outcomes.append(FailedRun(step=steps, reason=reason_of(error)))
        return outcomes

    def _receipt(self) -> dict[str, Any]:
        return {
            "runs": len(self.runs),
            "tokens_at_once": self.tokens_at_once,
            "allocated_bytes": allocated_peak_bytes(),
            "allocator_retries": retries() - self._retries,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }

    def _show(self, text: str, values: dict[str, float]) -> None:
        self._progress(text, {"runs": float(len(self.runs))} | values)


def _longest_prompt(problems: ProblemSets, scale: TrainScale, stack: Stack) -> int:
    """Return the tokens of the longest prompt, at most the scale's limit."""
    every = [problems.train, problems.development, problems.test, *problems.further.values()]
    template, tokenizer = scale.prompt_template, stack.tokenizer
    lengths = [len(render(p, template, tokenizer)) for problems in every for p in problems]
    return min(max(lengths), scale.longest_prompt)


def _policies(runs: Sequence[RunConfig], device: str) -> list[Policy | FailedRun]:
    """Return each run's policy or its failure; runs with equal initial weights share a policy."""
    loaded: dict[str, Policy | FailedRun] = {}
    policies = []
    for run in runs:
        arm = run.arm
        seeded = arm.training == "lora" or run.scale.permuted
        weights = [arm.weight_format, arm.training, arm.norms_trained, run.seed if seeded else None]
        adapter = arm.lora_rank, arm.lora_alpha
        key = digest_of([*weights, str(arm.rounding), *adapter, run.scale.checkpoint])
        if key not in loaded:
            try:
                loaded[key] = load_arm(run, device)
            except RUN_FAILURES as error:
                loaded[key] = FailedRun(step=0, reason=reason_of(error))
        policies.append(loaded[key])
    return policies
