"""Fine-tune an arm on worked solutions and evaluate it: `repro.procedures.train` without rewards.

The same policy, questions and evaluator; what is trained on is the training split's own solutions
(`repro.rl.supervised`). Beside the accuracies there is `solution_loss`: the next-token loss on the
test split's worked solutions, before training and after it, without added noise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from repro.evidence.derived import tuning_metrics
from repro.evidence.procedure import Measured, Progress
from repro.evidence.record import Estimate
from repro.procedures.loaded_runs import LoadedRuns
from repro.procedures.train import train_and_measure
from repro.rl.lessons import lessons_of
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
    return train_and_measure(run, SFTTraining, folder, progress, should_stop, threads)


class SFTTraining:
    """Fine-tunes policies, and keeps their losses on the test split's solutions.

    A `repro.procedures.loaded_runs.TrainingMethod`; no run is trained on the solutions of the test
    split.

    Parameters
    ----------
    policies
        Of the loaded runs, as they start.
    """

    shown = ("loss",)

    def __init__(self, loaded_runs: LoadedRuns, policies: Policies) -> None:
        self._loaded_runs, self._policies = loaded_runs, policies
        self._unseen = lessons_of(
            loaded_runs.problems.test, loaded_runs.loaded, loaded_runs.runs[0]
        )
        self._losses = {_BEFORE: policies.mean_losses(self._unseen)}

    def train(self, hooks: Hooks, folder: Path) -> list[TrainResult | FailedRun]:
        """Train every run on worked solutions, or go on from a checkpoint in `folder`."""
        loaded_runs = self._loaded_runs
        lessons = lessons_of(loaded_runs.problems.train, loaded_runs.loaded, loaded_runs.runs[0])
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
