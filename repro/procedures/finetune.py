"""Fine-tune an arm on worked solutions and evaluate it: `repro.procedures.train` without rewards.

The same policy, questions and evaluator; what is trained on is the training split's own solutions
(`repro.rl.supervised`). Beside the accuracies there is `solution_loss`: the next-token loss on the
test split's worked solutions, before training and after it, without added noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from repro.data.load import load_problems
from repro.data.problem import Problem
from repro.evidence.derived import tuning_metrics
from repro.evidence.procedure import Measured, Progress
from repro.evidence.record import Estimate
from repro.keep.keeper import Keeper, Keeping
from repro.procedures.train import finished, loaded, measure_end, measure_start
from repro.rl.lessons import Reader, lessons_of
from repro.rl.loop import Hooks
from repro.rl.policies import Policies
from repro.rl.runs import FailedRun, TrainResult
from repro.rl.supervised import fine_tune, require_supervised
from repro.spec.config import RunConfig

_BEFORE, _AFTER = "before training", "after training"


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
    keeping = Keeping.from_environment()
    with Keeper([run], [folder], keeping) as keeper, loaded(run, progress, threads) as bench:
        problems = load_problems(run.scale.data, "train")
        start = measure_start(bench, progress)
        policies = bench.alone()
        tuning = Tuning(policies, bench.policy, bench.test)
        hooks = bench.hooks(keeper, progress, should_stop, ("loss",))
        result = finished(tuning.tune(problems, hooks, folder / "checkpoint"))
        bench.sampler.refresh()
        measured = measure_end(bench, policies, start, result, problems, folder, progress)
        return dataclasses.replace(measured, metrics=measured.metrics | tuning.metrics(0, result))


class Tuning:
    """Fine-tunes policies, and keeps their losses on the test split's solutions.

    Parameters
    ----------
    policies
        As they start.
    reader
        Reads and writes their tokens.
    test
        The test split, whose worked solutions no run is trained on.
    """

    def __init__(self, policies: Policies, reader: Reader, test: Sequence[Problem]) -> None:
        self._policies, self._reader = policies, reader
        self._unseen = lessons_of(test, reader, policies.runs[0])
        self._losses = {_BEFORE: policies.mean_losses(self._unseen)}

    def tune(
        self, problems: Sequence[Problem], hooks: Hooks, folder: Path
    ) -> list[TrainResult | FailedRun]:
        """Train every run on the problems' worked solutions, or go on from a checkpoint."""
        lessons = lessons_of(problems, self._reader, self._policies.runs[0])
        results = fine_tune(self._policies, lessons, hooks, folder=folder)
        if all(isinstance(result, FailedRun) or result.finished for result in results):
            self._losses[_AFTER] = self._policies.mean_losses(self._unseen)
        return results

    def metrics(self, number: int, result: TrainResult) -> dict[str, Estimate]:
        """Return what fine-tuning says of one finished run, losses on unseen solutions included."""
        start, end = (
            Estimate(
                value=self._losses[when][number],
                unit="nats",
                n=len(self._unseen),
                method="mean over the tokens of the test split's worked solutions, "
                f"{when}, without noise",
            )
            for when in (_BEFORE, _AFTER)
        )
        metrics = tuning_metrics(result.series, result.effects)
        return metrics | {"solution_loss_start": start, "solution_loss": end}
