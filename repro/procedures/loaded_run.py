"""A loaded run: its policy, problems and evaluation, its training hooks and what it measured."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from repro.data.problem_sets import ProblemSets
from repro.data.prompts import template_inputs
from repro.distributed import Ranks
from repro.evaluation.scale_evaluator import ScaleEvaluator, mean_tokens
from repro.evidence.procedure import Measured, Progress
from repro.evidence.record import Estimate
from repro.measure.device_state import peak_bytes
from repro.models.checkpoint import checkpoint_inputs, resolve
from repro.models.policy import Policy
from repro.reward.grader import GraderPool
from repro.rl.collect import Rollout, order_of_epoch
from repro.rl.rollout_receipts import Tally, Values
from repro.rl.trainer import Hooks
from repro.rollout.engine import Engine
from repro.rollout.for_policy import FoldedSampler
from repro.rollout.sampler import Sampler
from repro.runlog.run_logger import RunLogger
from repro.spec.config import RunConfig, TrainScale, digest_of
from repro.spec.facts import Facts
from repro.spec.hub import resolved_revision

# Names of the values that progress shows.
_SHOWN = ("reward", "entropy")
_EXPLORED = "accuracy_explored"


class RunTally(Tally):
    """Grades, killed graders, peak memory and seconds of one run, summed over all its starts.

    They are counted by the process; so each checkpoint saves them, and a resumed run continues from
    them. Each start evaluates the initial policy again, which the checkpoint has already counted;
    so its grades replace those that the new process has counted until then, and are not added to
    them. The digests of the run's inputs must be the same in every start.
    """

    def __init__(self, pool: GraderPool, inputs: Mapping[str, str], began: float) -> None:
        self._began, self._seconds_before = began, 0.0
        self._inputs, self._pool = dict(inputs), pool
        # A pool may have served other runs before this one.
        self._killed_before = -pool.workers_killed
        self._uncounted, self._grades_before = pool.counters.copy(), Counter[str]()
        self._peak_before = 0

    def counts(self) -> dict[str, Any]:
        """Return the counts of all starts, as JSON values.

        They are the grades by status, the graders that were killed for being late, peak memory in
        bytes and wall seconds, loading included; beside them the digests of the run's inputs.
        """
        return {
            "grades": dict(self._grades_before + (self._pool.counters - self._uncounted)),
            "workers_killed": self._killed_before + self._pool.workers_killed,
            "peak_bytes": max(self._peak_before, peak_bytes()),
            "seconds": self._seconds_before + time.perf_counter() - self._began,
            "inputs": self._inputs,
        }

    def go_on_from(self, counts: Mapping[str, Any]) -> None:
        """Continue an earlier start's counts; `ValueError` if files or problems have changed."""
        before, now = counts.get("inputs") or self._inputs, self._inputs
        changed = [n for n in sorted(before.keys() | now.keys()) if before.get(n) != now.get(n)]
        if changed:
            raise ValueError(
                f"{', '.join(changed)} changed since the run's checkpoint was written; put back "
                "what was there, or remove the run's folder to start again"
            )
        self._uncounted, self._grades_before = self._pool.counters.copy(), Counter(counts["grades"])
        self._killed_before += counts["workers_killed"]
        self._peak_before = counts["peak_bytes"]
        self._seconds_before = counts.get("seconds", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedRun:
    """A run with everything that its training and evaluation need.

    `receipts` are facts beside those of loading and training; all `ranks` carry the run out
    together.
    """

    run: RunConfig
    policy: Policy
    sampler: Sampler
    problems: ProblemSets
    evaluation: ScaleEvaluator
    ranks: Ranks
    tally: RunTally
    receipts: Facts

    def hooks(
        self, progress: Progress, should_stop: Callable[[], bool], logger: RunLogger | None
    ) -> Hooks:
        """Return the training hooks: evaluation, progress, stopping, and what a logger is told."""
        tokenizer = self.evaluation.evaluator.tokenizer

        def on_step(step: int, values: Values) -> None:
            if logger is not None:
                logger.step(step, values)
            shown = {name: values.get(name) for name in _SHOWN}
            numbers = {name: float(value) for name, value in shown.items() if value is not None}
            steps = float(self.run.scale.steps)
            progress("training", {"step": float(step), "steps": steps} | numbers)

        def on_rollout(step: int, rollout: Rollout) -> None:
            if logger is not None:
                logger.rollout(step, rollout, tokenizer)

        def noted(step: int, values: Values) -> None:
            if logger is not None:
                logger.evaluation(step, values)

        def on_development(step: int) -> float:
            accuracy = fmean(self.evaluation.greedy(self.problems.development).accuracy)
            noted(step, {"evaluation_accuracy": accuracy})
            return accuracy

        def on_test(step: int) -> dict[str, float]:
            if self.run.scale.evaluation.until:
                accuracy = fmean(self.evaluation.greedy(self.problems.test).accuracy)
                found = {"accuracy_greedy": accuracy, "seconds": self.tally.counts()["seconds"]}
            else:
                answers = self.evaluation.final(self.problems.test, {})
                found = {name: fmean(own.accuracy) for name, own in answers.items()}
            noted(step, {f"test_{name}": value for name, value in found.items()})
            return found

        return Hooks(
            test=on_test,
            evaluate=on_development if self.problems.development else None,
            on_step=on_step,
            on_rollout=on_rollout,
            should_stop=should_stop,
            tally=self.tally,
        )

    def outcome(self, series: Mapping[str, Sequence[float | None]]) -> Measured:
        """Evaluate the policy as it is now; return all measurements, with `series` of its steps."""
        run, problems = self.run, self.problems
        scale: TrainScale = run.scale
        final = self.evaluation.final(problems.test, problems.further)
        if scale.evaluation.explored_samples:
            final[_EXPLORED] = self.evaluation.explored(problems.test)
        metrics, counts = mean_tokens(final), self.tally.counts()
        metrics["peak_bytes"] = Estimate(
            value=float(counts["peak_bytes"]),
            unit="bytes",
            method="peak of the process during the run",
        )
        facts = self.policy.facts | self.receipts
        if self.policy.device.type != "cpu" or scale.sampler != "own":
            facts["sampler"] = type(self.sampler).__name__
        if isinstance(self.sampler, FoldedSampler):
            facts |= self.sampler.receipt()
        if isinstance(self.sampler, Engine):
            facts["road"] = self.sampler.road
        facts |= {
            "test_sets_left_out": [
                item.name for item in scale.test_sets if item.name not in problems.further
            ],
            "grades": counts["grades"],
            "grader_workers_killed": counts["workers_killed"],
            "answers": {name: own.tallies() for name, own in final.items()},
        }
        if _EXPLORED in final:
            facts["explored"] = final[_EXPLORED].surprisal()
        inputs = {
            **checkpoint_inputs(self.policy.facts),
            **problems.digests,
            **template_inputs(scale.prompt_template, self.policy.tokenizer),
        }
        if commit := resolved_revision(resolve(scale.checkpoint, scale.revision)):
            inputs["checkpoint_revision"] = commit
        if problems.train:
            order = order_of_epoch(run.seed, 0, len(problems.train))
            inputs["train_problems"] = problems.train_digest
            inputs["order_of_problems"] = digest_of([problems.train[place].id for place in order])
        of_steps = {name: list(values) for name, values in series.items()}
        return Measured(metrics=metrics, series=of_steps, facts=facts, inputs=inputs)
