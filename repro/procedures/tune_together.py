"""`repro.procedures.finetune` for S runs at once: what it has beside `train`'s questions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from repro.data.problem import Problem
from repro.ensemble.hooks import FailedRun, Hooks
from repro.ensemble.sampler import StackSampler
from repro.ensemble.stack import Stack
from repro.ensemble.supervised import fine_tune_ensemble, mean_losses
from repro.evidence.record import Estimate
from repro.procedures.finetune import solution_loss, tuning_metrics
from repro.rl.lessons import lessons_of
from repro.rl.loop import TrainResult
from repro.spec.config import RunConfig, TrainScale


class Tuning:
    """Fine-tunes the runs of a stack, and keeps their losses on the test split's solutions.

    Parameters
    ----------
    test
        The test split, whose worked solutions no run is trained on.
    groups_at_once
        Groups of a rollout that a backward pass would have room for.
    """

    def __init__(
        self,
        runs: Sequence[RunConfig],
        stack: Stack,
        sampler: StackSampler,
        test: Sequence[Problem],
        groups_at_once: int,
    ) -> None:
        self._runs, self._stack, self._sampler = runs, stack, sampler
        self._unseen = lessons_of(test, stack, runs[0])
        scale: TrainScale = runs[0].scale
        prompt, new = scale.max_prompt_tokens, scale.rollout.max_new_tokens
        room = groups_at_once * (prompt + scale.group_size * new)
        self.lessons_at_once = max(1, room // (prompt + new))
        self._losses = {"before training": self._measured()}

    def tune(
        self, problems: Sequence[Problem], hooks: Hooks, folder: Path
    ) -> list[TrainResult | FailedRun]:
        """Train every run on the problems' worked solutions, or go on from a checkpoint."""
        found = fine_tune_ensemble(
            self._runs,
            self._stack,
            self._sampler,
            lessons_of(problems, self._stack, self._runs[0]),
            hooks,
            folder=folder,
            lessons_at_once=self.lessons_at_once,
        )
        self._losses["after training"] = self._measured()
        return found

    def metrics(self, number: int, result: TrainResult) -> dict[str, Estimate]:
        """Return what fine-tuning says of one run, losses on unseen solutions included."""
        losses = {
            when: solution_loss(values[number], len(self._unseen), when)
            for when, values in self._losses.items()
        }
        return tuning_metrics(result) | {
            "solution_loss_start": losses["before training"],
            "solution_loss": losses["after training"],
        }

    def _measured(self) -> list[float]:
        return mean_losses(self._stack, self._sampler, self._unseen, self.lessons_at_once)
