"""What the training loop trains: a policy with its sampler, its optimiser and its checkpoints.

The sampler and the trainer's passes read the same tensors, so noise on the module's norms affects
both while it is added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from repro.distributed import ALONE, Ranks
from repro.models.policy import Policy, trainable_parameters
from repro.rl.collect import Rollout
from repro.rl.noise import NoiseReceipt, perturbed
from repro.rl.optimizers import build_optimizer, gradient_step
from repro.rl.rollout_receipts import Values, note_smaller_batches
from repro.rl.rows import Rows
from repro.rl.step import (
    StepInputs,
    StepOutput,
    accumulate_step,
    evaluate_rows,
    exchanged,
    zero_missing_gradients,
)
from repro.rl.training_state import TrainState, load_checkpoint, save_checkpoint
from repro.rollout.sampler import Sampler, shared
from repro.spec.config import RunConfig, TrainScale
from repro.spec.schedule import learning_rate_of_run

During = Literal["rollout", "update"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Learner:
    """A policy with its optimiser and its sampler.

    Attributes
    ----------
    sampler
        Samples from the policy.
    reference
        Copies of the trained parameters from before training, if the loss has a KL term; else
        empty.
    micro_tokens
        Packed tokens of a micro-batch; None takes `micro_batch_rows` times the longest row.
    kept_blocks
        Number of blocks whose activations are kept for backward; None keeps all.
    """

    run: RunConfig
    policy: Policy
    sampler: Sampler
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    reference: dict[str, Tensor]
    micro_tokens: int | None = None
    kept_blocks: int | None = 0
    ranks: Ranks = ALONE

    def perturbed(self, step: int, during: During) -> AbstractContextManager[NoiseReceipt]:
        """Add the noise of a step, counted from 0, to the norms inside a `with` block.

        During the `rollout` the sampler reads it. During the `update` the trainer's passes do, if
        `NoiseConfig.reach` is "shared"; else there is none.
        """
        scale: TrainScale = self.run.scale
        noise = self.run.arm.noise
        if during == "update" and noise is not None and noise.reach != "shared":
            noise = None
        return perturbed(self.policy, noise, seed=self.run.seed, step=step, total_steps=scale.steps)

    def old_logprobs(self, rollout: Rollout, parts: Sequence[Tensor], state: TrainState) -> Tensor:
        """Return (B, T) log-probabilities of the rows of all steps but the first, no gradient.

        The first step takes those of its own pass, so that its ratio is exactly 1. `parts` are the
        rows of each optimiser step.
        """
        every = torch.zeros(rollout.rows.mask.shape)  # (B, T)
        for part in parts[1:]:
            every += self._evaluated(rollout.rows, part, state)
        return every

    def reference_logprobs(self, rollout: Rollout, state: TrainState) -> Tensor | None:
        """Return (B, T) log-probabilities under the initial weights, for a loss that needs them."""
        if self.run.arm.loss.beta == 0:
            return None
        with exchanged(self.parameters, self.reference):
            return self._evaluated(rollout.rows, torch.arange(len(rollout.rows)), state)

    def _evaluated(self, rows: Rows, index: Tensor, state: TrainState) -> Tensor:
        """Return (B, T) log-probabilities of rows `index` under the weights as they are."""
        budget, temperature = self._micro_tokens(rows, index, state), self.run.rollout.temperature
        logprobs, fitting = evaluate_rows(
            self.policy, rows, index, temperature, micro_tokens=budget, ranks=self.ranks
        )
        note_smaller_batches(state, state.step, budget, fitting)
        return logprobs

    def backward(self, part: StepInputs, state: TrainState) -> StepOutput:
        """Run the forward and backward passes of one optimiser step; `step` uses their gradients.

        If memory runs out the passes start over with smaller micro-batches, which receipts note.

        Raises `torch.OutOfMemoryError` if the smallest pass does not fit.
        """
        budget = self._micro_tokens(part.rollout.rows, part.index, state)
        output, fitting = accumulate_step(
            self.policy,
            part,
            self.run,
            parameters=self.parameters,
            micro_tokens=budget,
            kept_blocks=self.kept_blocks,
            ranks=self.ranks,
        )
        note_smaller_batches(state, part.step, budget, fitting)
        return output

    def step(self, step: int) -> Values:
        """Clip the gradients and make optimiser step `step`, counted from 0.

        Returns `grad_norm` before clipping and `learning_rate`.

        Raises `ValueError` when the gradient's norm is not finite, or a rank's gradient is not.
        """
        shards = self.policy.shards
        if shards is not None:
            shards.take_gradients()
        zero_missing_gradients(self.parameters)
        self.ranks.add_gradients(self.parameters, step, () if shards is None else shards.cut)
        rate, most = learning_rate_of_run(self.run, step), self.run.scale.optimizer.max_grad_norm
        norm = gradient_step(
            self.optimizer, self.parameters, rate=rate, max_grad_norm=most, shards=shards
        )
        return {"grad_norm": norm, "learning_rate": rate}

    def save(self, folder: Path, state: TrainState) -> None:
        """Write a checkpoint into `folder`."""
        shards, first = self.policy.shards, self.ranks.first
        cut = {} if shards is None else shards.cut
        alike = {name: p for name, p in self.parameters.items() if name not in cut}
        self.ranks.require_same(alike, state.step)
        if first or cut:
            save_checkpoint(
                folder, state, self.parameters, self.optimizer, shards=shards, writes=first
            )

    def load(self, folder: Path) -> TrainState | None:
        """Restore the last checkpoint in `folder`; return None if there is none.

        Raises `ValueError` if the checkpoint belongs to another run or is damaged.
        """
        # The first rank reads before the others, because it alone renames a damaged snapshot:
        # what another cannot read now may be whole.
        state = None
        for reads in (self.ranks.first, not self.ranks.first):
            if reads:
                shards, own = self.policy.shards, self.run.digest()
                state = load_checkpoint(
                    folder,
                    own,
                    self.parameters,
                    self.optimizer,
                    shards=shards,
                    sets_aside=self.ranks.first,
                )
            self.ranks.any(False)
        steps = self.ranks.objects("none" if state is None else str(state.step))
        if len(set(steps)) > 1:
            raise ValueError(
                f"ranks find checkpoints of steps {', '.join(steps)} in {folder}; all need the "
                "same, in a folder that their hosts share"
            )
        return state

    def _micro_tokens(self, rows: Rows, index: Tensor, state: TrainState) -> int:
        """Return the packed tokens of a micro-batch of rows `index` to begin with.

        They are those of `micro_batch_rows` rows as long as the longest where nothing else is set,
        or the smaller size to which an earlier step had to reduce them.
        """
        scale: TrainScale = self.run.scale
        longest = max(rows.packed_tokens()[index].tolist(), default=1)
        budget = self.micro_tokens or scale.micro_batch_rows * longest
        return min(budget, state.facts.get("micro_tokens", budget))


def learner_of(
    run: RunConfig,
    policy: Policy,
    sampler: Sampler,
    *,
    micro_tokens: int | None = None,
    kept_blocks: int | None = 0,
    ranks: Ranks = ALONE,
) -> Learner:
    """Return a freshly loaded policy with its optimiser and, if the loss needs it, a reference.

    Raises `ValueError` if a module of the policy has dropout.
    """
    for name, module in policy.model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(f"{name} drops out with p = {module.p}; training needs 0")
    parameters = trainable_parameters(policy)
    reference: dict[str, Tensor] = {}
    if run.arm.loss.beta > 0:
        # Copied before a checkpoint is loaded, because the reference is the initial policy.
        reference = {name: p.detach().clone() for name, p in parameters.items()}
    return Learner(
        run=run,
        policy=policy,
        sampler=shared(sampler, ranks),
        parameters=parameters,
        optimizer=build_optimizer(parameters, run.scale.optimizer),
        reference=reference,
        micro_tokens=micro_tokens,
        kept_blocks=kept_blocks,
        ranks=dataclasses.replace(ranks, abreast=policy.shards is not None),
    )
