"""What a trainer asks of the policies that it trains: one by itself, or many as one batched model.

The trainer (`repro.rl.trainer`) is written once, over lists with an entry per run. What is computed
on the device differs, and stands behind this protocol:

    SinglePolicy      a list of one: a peft module, packed rows, any `Sampler`
                      (`repro.rl.single_run.policy`)
    StackedPolicies   S runs as one batched model (`repro.rl.stacked.policies`)

An entry is None where a run takes no part, because it is frozen or has nothing to ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from repro.rl.collect import BatchRequest, Rollout
from repro.rl.noise import NoiseReceipt
from repro.rl.receipts import Values
from repro.rl.runs import RunStates
from repro.rl.step import StepOutput
from repro.rollout.sampler import Completion
from repro.spec.config import RunConfig

During = Literal["rollout", "update"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInputs:
    """One run's part in an optimiser step: its rows, and what their loss compares them with.

    Attributes
    ----------
    step
        The optimiser step, counted from 0.
    index : Tensor, (b,), int64
        The rows of the rollout that it is on.
    old : Tensor or None, (B, T)
        Log-probabilities in the ratio's denominator; None takes the step's own, the ratio being
        exactly 1.
    reference : Tensor or None, (B, T)
        Those of the reference policy.
    """

    run: RunConfig
    step: int
    rollout: Rollout
    index: Tensor
    old: Tensor | None
    reference: Tensor | None


def keeps_start(run: RunConfig) -> bool:
    """Whether a run's loss needs the policy before training again."""
    return run.arm.loss.beta > 0


class Policies(Protocol):
    """Policies of one scale, with their optimiser and what samples from them."""

    @property
    def runs(self) -> Sequence[RunConfig]:
        """One per policy."""
        ...

    @property
    def freeze(self) -> bool:
        """Whether a run that fails is frozen while the others go on; see `RunStates`."""
        ...

    def perturbed(
        self, step: int, during: During
    ) -> AbstractContextManager[Sequence[NoiseReceipt]]:
        """Add the noise of a step, counted from 0, for the length of the block.

        Parameters
        ----------
        during
            `rollout`: what samples sees each run's noise. `update`: the trainer's passes see that
            of the runs whose noise reaches them.
        """
        ...

    def sample(self, asked: Sequence[BatchRequest | None]) -> Sequence[Sequence[Completion] | None]:
        """Return each run's completions of its own prompts, as its scale's rollouts sample."""
        ...

    def refresh(self) -> None:
        """Let what samples read the weights as they are now, without noise."""
        ...

    def old_logprobs(
        self,
        rollouts: Sequence[Rollout | None],
        parts: Sequence[Sequence[Tensor]],
        state: RunStates,
    ) -> list[Tensor | None]:
        """Return (B, T) log-probabilities of the rows of all parts but the first, no gradient.

        The first part's own pass serves as its old log-probabilities: the ratio is 1 to the bit.
        `parts` holds, per run, the rows of each optimiser step.
        """
        ...

    def reference_logprobs(
        self, rollouts: Sequence[Rollout | None], state: RunStates
    ) -> list[Tensor | None]:
        """Return (B, T) log-probabilities under the weights before training, where a loss asks."""
        ...

    def backward(
        self, parts: Sequence[StepInputs | None], state: RunStates
    ) -> list[StepOutput | None]:
        """Run the passes of one optimiser step; gradients are left where `step` takes them.

        Where memory runs out the passes start over, smaller, and the run's receipts say so.

        Raises `torch.OutOfMemoryError` when the smallest pass does not fit.
        """
        ...

    def step(self, state: RunStates, step: int) -> list[Values | None]:
        """Clip and make the optimiser step, counted from 0, of every live run.

        Returns
        -------
        list
            `grad_norm` before clipping and `learning_rate`; None for runs that are frozen, or now
            are because their norm is not finite.
        """
        ...

    def save(self, folder: Path, state: RunStates) -> None:
        """Write a checkpoint into `folder`."""
        ...

    def load(self, folder: Path) -> RunStates | None:
        """Restore the last checkpoint in `folder`; None when there is none.

        Raises `ValueError` when it is of other runs, or damaged.
        """
        ...
