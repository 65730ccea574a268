"""The trainer's interface to the policies that it trains: one, or many as one batched model.

The trainer (`repro.rl.trainer`) works on lists with an entry per run. The computation on the device
is behind this protocol, which has two implementations:

    SinglePolicy      a list of one: a peft module, packed rows, any `Sampler`
                      (`repro.rl.single_run.single_policy`)
    StackedPolicies   S runs as one batched model (`repro.rl.stacked.stacked_policies`)

An entry is None for a run that takes no part: it is frozen, or needs no completions.
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
from repro.rl.rollout_receipts import Values
from repro.rl.runs import RunStates
from repro.rl.step import StepOutput
from repro.rollout.sampler import Completion
from repro.spec.config import RunConfig

During = Literal["rollout", "update"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInputs:
    """The inputs of one run's optimiser step: its rows, and log-probabilities for the loss.

    Attributes
    ----------
    step
        The optimiser step, counted from 0.
    index : Tensor, (b,), int64
        The rows of the rollout that the step trains on.
    old : Tensor or None, (B, T)
        Log-probabilities in the ratio's denominator; None takes those of the step's own forward
        pass, so that the ratio is exactly 1.
    reference : Tensor or None, (B, T)
        Log-probabilities under the reference policy.
    """

    run: RunConfig
    step: int
    rollout: Rollout
    index: Tensor
    old: Tensor | None
    reference: Tensor | None


def keeps_start(run: RunConfig) -> bool:
    """Whether a run's loss needs the initial policy during training."""
    return run.arm.loss.beta > 0


class Policies(Protocol):
    """Policies of one scale, with their optimiser and sampler."""

    @property
    def runs(self) -> Sequence[RunConfig]:
        """One per policy."""
        ...

    @property
    def freeze(self) -> bool:
        """Whether a failed run is frozen while the others continue; see `RunStates`."""
        ...

    def perturbed(
        self, step: int, during: During
    ) -> AbstractContextManager[Sequence[NoiseReceipt]]:
        """Add the noise of a step, counted from 0, inside a `with` block.

        Parameters
        ----------
        during
            `rollout`: the sampler uses each run's noise. `update`: the trainer's passes do, for
            runs with `NoiseConfig.reach` "shared".
        """
        ...

    def sample(self, asked: Sequence[BatchRequest | None]) -> Sequence[Sequence[Completion] | None]:
        """Return each run's completions of its prompts, sampled with the scale's settings."""
        ...

    def refresh(self) -> None:
        """Let the sampler use the current weights, without noise."""
        ...

    def old_logprobs(
        self,
        rollouts: Sequence[Rollout | None],
        parts: Sequence[Sequence[Tensor]],
        state: RunStates,
    ) -> list[Tensor | None]:
        """Return (B, T) log-probabilities of the rows of all steps but the first, no gradient.

        The first step takes those of its own pass, so that its ratio is exactly 1.

        Parameters
        ----------
        parts
            Per run: the rows of each optimiser step.
        """
        ...

    def reference_logprobs(
        self, rollouts: Sequence[Rollout | None], state: RunStates
    ) -> list[Tensor | None]:
        """Return (B, T) log-probabilities under the initial weights, for losses that need them."""
        ...

    def backward(
        self, parts: Sequence[StepInputs | None], state: RunStates
    ) -> list[StepOutput | None]:
        """Run the forward and backward passes of one optimiser step; `step` uses their gradients.

        If memory runs out the passes start over with smaller micro-batches, which receipts note.

        Raises `torch.OutOfMemoryError` if the smallest pass does not fit.
        """
        ...

    def step(self, state: RunStates, step: int) -> list[Values | None]:
        """Clip the gradients and make optimiser step `step`, counted from 0, of every live run.

        Returns
        -------
        list
            `grad_norm` before clipping and `learning_rate`; None for frozen runs, including those
            frozen now because their gradient norm is not finite.
        """
        ...

    def save(self, folder: Path, state: RunStates) -> None:
        """Write a checkpoint into `folder`."""
        ...

    def load(self, folder: Path) -> RunStates | None:
        """Restore the last checkpoint in `folder`; return None if there is none.

        Raises `ValueError` if the checkpoint belongs to other runs or is damaged.
        """
        ...
