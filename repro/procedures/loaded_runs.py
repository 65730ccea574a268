"""Shared by single runs and ensembles: problems, evaluation, training hooks and the result.

A single run (`repro.procedures.train`) is a list of one; an ensemble (`repro.procedures.together`)
is a list of several runs that are computed as one batched model. Both load problems, evaluate and
assemble their results with the code of this module, so that their records have the same contents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

from repro.data.load import load_problems
from repro.data.problem import Problem, digest_of_problems
from repro.data.prompts import template_inputs
from repro.evaluate.grades import Answers
from repro.evaluate.scale_evaluator import ScaleEvaluator, final_tallies, mean_tokens
from repro.evidence.procedure import Measured, Progress
from repro.evidence.record import Estimate
from repro.models.checkpoint import checkpoint_inputs, resolve
from repro.models.policy import Policy
from repro.procedures.tally import RunTally
from repro.rl.collect import order_of_epoch
from repro.rl.loop import Hooks, StepValues
from repro.rl.runs import TrainResult
from repro.rl.stacked.stack import Stack
from repro.rl.stacked.stacked_sampler import StackedSampler
from repro.rollout.engine import Engine
from repro.rollout.sampler import Sampler
from repro.spec.config import RunConfig, TrainScale, digest_of
from repro.spec.hub import resolved_revision

# Names of the values that progress shows.
_SHOWN = ("reward", "entropy")
Alive = Sequence[bool] | None
# By metric, each run's answers at the end; see `ScaleEvaluator.final`.
FinalAnswers = Mapping[str, Sequence[Answers | None]]


@dataclass(frozen=True, kw_only=True)
class ProblemSets:
    """The problems of a scale.

    Attributes
    ----------
    train, development
        Empty where nothing is trained; `development` also where training is not evaluated.
    test
        Problems that `accuracy` is computed on: the test split, or all further sets together.
    further
        The further test sets, by name.
    rewarded
        Whether a user's reward pays, which may read any column of the rows that are trained on.
    """

    train: list[Problem]
    development: list[Problem]
    test: list[Problem]
    further: dict[str, list[Problem]]
    rewarded: bool = False

    @classmethod
    def of(cls, scale: TrainScale, *, trains: bool, rewarded: bool = False) -> ProblemSets:
        """Load a scale's problems; the training problems only if `trains`."""
        further = {item.name: load_problems(item.data, "test") for item in scale.test_sets}
        develops = trains and scale.evaluation.every > 0
        return cls(
            train=load_problems(scale.data, "train") if trains else [],
            development=load_problems(scale.data, "development") if develops else [],
            test=load_problems(scale.data, "test")
            if scale.accuracy_over == "split"
            else [problem for problems in further.values() for problem in problems],
            further=further,
            rewarded=rewarded,
        )

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digests of the test sets, by their names in a record."""
        further = {f"test_problems_{name}": problems for name, problems in self.further.items()}
        every = {"test_problems": self.test, **further}
        return {name: digest_of_problems(problems) for name, problems in every.items()}

    @cached_property
    def train_digest(self) -> str:
        """Digest of the training problems, with the columns that a user's reward may read."""
        columns = {str(name) for problem in self.train * self.rewarded for name in problem.row}
        return digest_of_problems(self.train, sorted(columns))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingOutcome:
    """The result of training one run.

    Attributes
    ----------
    start
        Its greedy answers before training.
    change_l2
        L2 norm of the change of the trained parameters.
    """

    start: Answers
    result: TrainResult
    change_l2: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedRuns:
    """Loaded runs of one scale, with everything that their training and evaluation need.

    Attributes
    ----------
    loaded
        The policy of a single run, or the stack of an ensemble.
    evaluation, tallies
        For all runs, in their order.
    facts
        What loading did, per run: `Policy.facts`.
    receipts
        Further facts, the same for every run.
    during
        What the process was doing while its peak memory was measured, for the record.
    """

    runs: Sequence[RunConfig]
    loaded: Policy | Stack
    sampler: Sampler | StackedSampler
    problems: ProblemSets
    evaluation: ScaleEvaluator
    tallies: Sequence[RunTally]
    facts: Sequence[Mapping[str, Any]]
    receipts: Mapping[str, Any] = field(default_factory=dict)
    during: str = "the run"

    def hooks(self, progress: Progress, should_stop: Callable[[], bool] | None) -> Hooks:
        """Return the training hooks: evaluation on held-out problems, progress, stopping."""

        def on_step(step: int, values: StepValues) -> None:
            numbers = {"step": float(step), "steps": float(self.evaluation.scale.steps)}
            for name in _SHOWN:
                of_runs = [own.get(name) for own in values if own is not None]
                known = [value for value in of_runs if value is not None]
                if known:
                    numbers[name] = fmean(known)
            progress("training", numbers)

        def on_development(step: int, alive: Sequence[bool]) -> list[float | None]:
            del step
            answers = self.evaluation.greedy(self.problems.development, alive)
            return [None if own is None else fmean(own.accuracy) for own in answers]

        def on_test(step: int, alive: Sequence[bool]) -> list[dict[str, float] | None]:
            del step
            answers = self.evaluation.final(self.problems.test, {}, alive)
            return [
                {
                    name: fmean(own.accuracy)
                    for name, own in zip(answers, of_run, strict=True)
                    if own
                }
                or None
                for of_run in zip(*answers.values(), strict=True)
            ]

        return Hooks(
            test=on_test,
            evaluate=on_development if self.problems.development else None,
            on_step=on_step,
            should_stop=should_stop,
            tallies=self.tallies,
        )

    def final(self, alive: Alive = None) -> FinalAnswers:
        """Evaluate the runs that are alive; return the answers of each run by metric."""
        return self.evaluation.final(self.problems.test, self.problems.further, alive)

    def outcome(
        self, number: int, final: FinalAnswers, trained: TrainingOutcome | None = None
    ) -> Measured:
        """Assemble the measurements of run `number`; `trained` is None for untrained arms."""
        run, problems, tally = self.runs[number], self.problems, self.tallies[number]
        metrics = mean_tokens(final, number)
        metrics["peak_bytes"] = Estimate(
            value=float(tally.peak_bytes),
            unit="bytes",
            method=f"peak of the process during {self.during}",
        )
        facts = {**self.facts[number], **self.receipts}
        if self.loaded.device.type != "cpu" or run.scale.sampler != "own":
            facts["sampler"] = type(self.sampler).__name__
        if isinstance(self.sampler, Engine):
            facts["road"] = self.sampler.road
        facts |= {
            "test_sets_left_out": [
                item.name for item in run.scale.test_sets if item.name not in problems.further
            ],
            "grades": tally.grades,
            "grader_workers_killed": tally.workers_killed,
        }
        answers = final_tallies(final, number)
        inputs = self._inputs(number)
        if trained is None:
            return Measured(metrics=metrics, facts=facts | {"answers": answers}, inputs=inputs)
        facts |= trained.result.facts
        facts["answers"] = answers | {"accuracy_greedy_start": trained.start.tallies()}
        facts["trained_change_l2"] = trained.change_l2
        facts["optimizer_steps"] = trained.result.step
        inputs["train_problems"] = problems.train_digest
        inputs["order_of_problems"] = digest_of(
            [problems.train[place].id for place in order_of_epoch(run.seed, 0, len(problems.train))]
        )
        series = {name: list(values) for name, values in trained.result.series.items()}
        return Measured(metrics=metrics, series=series, facts=facts, inputs=inputs)

    def _inputs(self, number: int) -> dict[str, str]:
        """Return the digests of a run's inputs: checkpoint, problems, prompt template."""
        scale: TrainScale = self.evaluation.scale
        commit = resolved_revision(resolve(scale.checkpoint, scale.revision))
        inputs = {
            **checkpoint_inputs(self.facts[number]),
            **self.problems.digests,
            **template_inputs(scale.prompt_template, self.loaded.tokenizer),
        }
        return inputs | ({"checkpoint_revision": commit} if commit else {})


def digests_at_start(facts: Mapping[str, Any], problems: ProblemSets) -> dict[str, str]:
    """Return the digests, by name, that must be unchanged when a run resumes from a checkpoint."""
    own = problems.digests | {"train_problems": problems.train_digest}
    return {**facts["checkpoint_files"], **own}
