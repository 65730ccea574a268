"""What every ensemble's training has in common, whatever a step of it is.

Steps from a checkpoint to the last one, evaluations between them, one optimiser over all runs, and
what becomes of runs that fail. What a step is, says the class that derives from it: a rollout and
its updates (`repro.ensemble.trainer`), or worked solutions (`repro.ensemble.supervised`).
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from repro.ensemble.checkpoint import EnsembleState, load_ensemble, save_ensemble
from repro.ensemble.collecting import Guard
from repro.ensemble.hooks import FailedRun, Hooks
from repro.ensemble.optimizer import StackedAdamW
from repro.ensemble.sampler import StackSampler
from repro.ensemble.stack import Stack
from repro.rl.checkpoint import TrainState
from repro.rl.loop import TrainResult
from repro.rl.optimizer import learning_rate_of_run
from repro.rl.receipts import note_accuracy
from repro.rl.trainer import require_acting_terms
from repro.spec.config import RunConfig, TrainScale


class Loop(ABC):
    """The state of an ensemble's training.

    Parameters
    ----------
    runs, stack, sampler, hooks, groups_at_once
        As of `repro.ensemble.trainer.train_ensemble`.

    Raises
    ------
    ValueError
        When the stack trains nothing.
    """

    def __init__(
        self,
        runs: Sequence[RunConfig],
        stack: Stack,
        sampler: StackSampler,
        hooks: Hooks,
        groups_at_once: int,
    ) -> None:
        if stack.masters is None:
            raise ValueError("the stack's runs train nothing; training needs LoRA or full ones")
        self.runs, self.stack, self.sampler, self.hooks = runs, stack, sampler, hooks
        self.scale: TrainScale = runs[0].scale
        self.optimizer = StackedAdamW(stack.masters, self.scale.optimizer)
        self.groups_at_once = groups_at_once
        self.rotary = sampler.rotary
        states = [
            TrainState(digest=run.digest(), step=0, draws=0, series={}, effects={}) for run in runs
        ]
        self.state = EnsembleState(step=0, runs=states, failures=[None] * len(runs))
        self.guard = Guard(self.state)

    @abstractmethod
    def iterate(self) -> None:
        """Move every live run on by one step or more."""

    def carry_on(self, folder: Path) -> list[TrainResult | FailedRun]:
        """Train from the last checkpoint in `folder`, if there is one; return what runs came to.

        Raises
        ------
        ValueError
            When a checkpoint is of other runs.
        """
        digests = [run.digest() for run in self.runs]
        found = load_ensemble(folder, digests, self.stack, self.optimizer)
        if found is not None:
            self.state, self.guard = found, Guard(found)
        state = self.state
        if self.scale.evaluation.token_budget and not any(run.series for run in state.runs):
            self.evaluate()  # the area under the curve starts where training starts
        saved = state.step
        while state.step < self.scale.steps and any(self.guard.alive):
            if self.hooks.should_stop is not None and self.hooks.should_stop():
                break
            began = state.step
            self.iterate()
            self._evaluate_if_due(began)
            if state.step - saved >= self.scale.checkpoint_every:
                save_ensemble(folder, state, self.stack, self.optimizer)
                saved = state.step
        if state.step != saved or state.step == 0:
            save_ensemble(folder, state, self.stack, self.optimizer)
        return self._results()

    def evaluate(self) -> None:
        """Evaluate every live run and note the value; see `repro.rl.receipts.note_accuracy`."""
        step = self.state.step
        if self.hooks.evaluate is None:
            return
        started = time.perf_counter()
        self.sampler.refresh()
        found = self.hooks.evaluate(step, self.guard.alive)
        for state, accuracy in zip(self.state.runs, found, strict=True):
            if accuracy is not None:
                note_accuracy(state, step, accuracy)
        self.add_seconds("evaluation_seconds", time.perf_counter() - started)

    def _evaluate_if_due(self, began: int) -> None:
        """Evaluate when the steps since `began` crossed a multiple of the interval."""
        every, step = self.scale.evaluation.every, self.state.step
        if every >= 1 and step // every != began // every:
            self.evaluate()

    def rates(self, step: int) -> list[float]:
        """Return each run's learning rate at a step counted from 0."""
        return [learning_rate_of_run(run, step) for run in self.runs]

    def move(
        self, failures: Sequence[Exception | None], rates: Sequence[float], taking: Sequence[bool]
    ) -> list[float]:
        """Clip and step every run by the gradients at hand; return their norms before clipping.

        Parameters
        ----------
        failures
            One a run: why its gradient cannot be used, or None. It is frozen, as is one whose norm
            is not finite.
        taking
            Which runs have a gradient to be judged.
        """
        norms = self.optimizer.gradient_norms()
        for s, takes in enumerate(taking):
            failure = failures[s]
            if not takes:
                continue
            if failure is not None:
                self.guard.fail(s, failure)
            elif not math.isfinite(norms[s]):
                self.guard.fail(
                    s, ValueError(f"the gradient norm is {norms[s]}; it must be finite")
                )
        self.optimizer.step(rates, norms, self.guard.alive)
        return norms

    def add_seconds(self, name: str, seconds: float) -> None:
        """Give each live run its share of seconds that all took together."""
        living = sum(self.guard.alive)
        for state, lives in zip(self.state.runs, self.guard.alive, strict=True):
            if lives:
                total = state.effects.setdefault("seconds", {})
                total[name] = total.get(name, 0.0) + seconds / living

    def _results(self) -> list[TrainResult | FailedRun]:
        """Return what became of each run."""
        found: list[TrainResult | FailedRun] = []
        finished = self.state.step >= self.scale.steps
        for number, (run, state) in enumerate(zip(self.runs, self.state.runs, strict=True)):
            if finished and self.state.failures[number] is None:
                try:
                    require_acting_terms(run, state)
                except ValueError as error:
                    self.guard.fail(number, error)
            failure = self.state.failures[number]
            if failure is not None:
                found.append(FailedRun(step=state.step, reason=failure))
                continue
            found.append(
                TrainResult(
                    finished=finished, step=state.step, series=state.series, effects=state.effects
                )
            )
        return found
