"""One optimiser step of S runs: passes on the device together, losses run by run.

The device computes log-probabilities of all runs' rows, micro-batch by micro-batch. Each run's loss
is then `repro.rl.loss.policy_loss` on the host, on the few numbers that concern it, with its own
options and counts; its gradient with respect to the log-probabilities goes back to the device,
which carries all of them on in one backward pass. So no option of a loss is written twice.

Micro-batches take whole groups, longest first, those that give a gradient before those that do not;
a micro-batch in which no run has a gradient goes forward only. Their size changes memory, never the
gradient: rows are divided by the counts of the step that `plan_step` made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from repro.rl.collect import loss_mask
from repro.rl.loss import LossResult
from repro.rl.micro_batches import Plan, plan_step, token_budget
from repro.rl.policies import StepInputs
from repro.rl.rows import Rows, spread
from repro.rl.stacked.batch import Batch, cut, group_lengths, make_batch
from repro.rl.stacked.batch_logprobs import batch_logprobs
from repro.rl.stacked.stack import Stack
from repro.rl.stacked.stacked_block import Rotary
from repro.rl.step import StepOutput, loss_of_rows
from repro.spec.config import TrainScale


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passes:
    """How log-probabilities are computed.

    Attributes
    ----------
    tokens_at_once
        Padded tokens of each run in a micro-batch at most; see `repro.rl.stacked.batch.cut`.
    noise
        (S, 2 L + 1, H) that the trainer adds, or None.
    """

    stack: Stack
    rotary: Rotary
    temperature: float
    group_size: int
    tokens_at_once: int
    noise: Tensor | None = None

    def batches(
        self,
        rows: Sequence[Rows | None],
        groups: Sequence[Sequence[int]],
        *,
        learning: int = 0,
    ) -> Iterator[tuple[list[list[int]], Batch]]:
        """Yield micro-batches of each run's groups, and which; see `repro.rl.stacked.batch.cut`."""
        size = self.group_size
        pieces = cut(rows, groups, size, self.tokens_at_once, learning=learning)
        for chosen in pieces:
            yield chosen, make_batch(rows, chosen, size)

    def logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of a batch's counting tokens, on the device."""
        stack = self.stack
        return batch_logprobs(
            stack.weights(self.noise),
            stack.shape,
            batch.to(stack.device),
            self.rotary,
            self.temperature,
            stream=stack.stream,
            dtype=stack.dtype,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class RunStep:
    """One run's part in an optimiser step while its passes are made.

    Attributes
    ----------
    number : Tensor, (B,), int64
        Which of the plan's micro-batches a row is in; -1 of the plan's idle rows, -2 of rows that
        are not in the plan.
    counting : Tensor, (B, T), bool
        Tokens that the loss counts.
    logprobs, entropy : Tensor, (B, T), float32
        Filled at the step's rows.
    failure
        Why its loss could not be computed; the run then gives no gradient.
    """

    part: StepInputs
    plan: Plan
    number: Tensor
    counting: Tensor
    logprobs: Tensor
    entropy: Tensor
    loss: float = 0.0
    results: list[LossResult] = field(default_factory=list)
    failure: Exception | None = None

    def output(self) -> StepOutput:
        """Return the parts of the step's metrics."""
        return StepOutput(
            plan=self.plan,
            logprobs=self.logprobs,
            entropy=self.entropy,
            loss=self.loss,
            results=self.results,
        )

    def active_groups(self, size: int) -> list[int]:
        """Return the groups with a row that gives a gradient, the longest first."""
        rows = [index for index, _ in self.plan.micro_batches]
        return _groups(torch.cat(rows) if rows else torch.zeros(0), self.part.rollout.rows, size)

    def gradient(self, rows: Tensor, logprobs: Tensor) -> Tensor | None:
        """Return d loss / d logprobs, (b, T), of rows (b,); None where none gives a gradient."""
        part, whole = self.part, self.part.rollout
        leaf = logprobs.detach().requires_grad_()
        total: Tensor | None = None
        numbers = self.number[rows]  # (b,)
        for number in sorted(set(numbers.tolist()) - {-1, -2}):
            _, counts = self.plan.micro_batches[number]
            own = (numbers == number).nonzero().squeeze(1)  # places in `rows`, (c,)
            here = rows[own]
            width = int(whole.rows.mask[here].sum(1).max())
            result = loss_of_rows(
                leaf[own, :width], whole, here, self.counting, part.run.arm.loss, counts,
                old_logprobs=part.old, ref_logprobs=part.reference,
            )  # fmt: skip
            self.results.append(result)
            self.loss += float(result.loss.detach())
            total = result.loss if total is None else total + result.loss
        if total is None:
            return None
        total.backward()
        return leaf.grad


def plan_run(part: StepInputs | None) -> RunStep | None:
    """Plan one run's part in an optimiser step, if it takes one."""
    if part is None:
        return None
    scale: TrainScale = part.run.scale
    loss, rows = part.run.arm.loss, part.rollout.rows
    counting = loss_mask(part.rollout, mask_truncated=loss.mask_truncated)
    sizes = rows.packed_tokens()
    plan = plan_step(
        rows,
        part.index,
        part.rollout.advantages.values,
        counting,
        loss,
        micro_tokens=token_budget(sizes, part.index, scale.micro_batch_rows),
        micro_batch_rows=scale.micro_batch_rows,
        length_limit=scale.rollout.max_new_tokens,
    )
    number = torch.full((len(rows),), -2)
    number[plan.index] = -1
    for place, (index, _) in enumerate(plan.micro_batches):
        number[index] = place
    return RunStep(
        part=part,
        plan=plan,
        number=number,
        counting=counting,
        logprobs=torch.zeros(rows.mask.shape),
        entropy=torch.zeros(rows.mask.shape),
    )


def accumulate_gradients(passes: Passes, steps: Sequence[RunStep | None]) -> None:
    """Run every run's forward and backward passes; gradients add up in the masters.

    A run whose loss raises is marked with the failure and gives no gradient. A step of None takes
    no part.
    """
    size = passes.group_size
    active = [[] if step is None else step.active_groups(size) for step in steps]
    every = [
        [] if step is None else _groups(step.plan.index, step.part.rollout.rows, size)
        for step in steps
    ]
    rest = [_without(groups, active[s]) for s, groups in enumerate(every)]
    rows = [None if step is None else step.part.rollout.rows for step in steps]
    order = [a + r for a, r in zip(active, rest, strict=True)]
    most = max((len(groups) for groups in active), default=0)
    for groups, batch in passes.batches(rows, order, learning=most):
        learning = any(set(groups[s]) & set(active[s]) for s in range(len(steps)))
        with torch.set_grad_enabled(learning):
            logprobs, entropy = passes.logprobs(batch)
        # (n,) run by run; each run's own on the host
        values = logprobs.detach().cpu().split(batch.counts)
        entropies = entropy.detach().cpu().split(batch.counts)
        gradient = [
            _take_in(step, batch.rows[s], values[s], entropies[s]) for s, step in enumerate(steps)
        ]
        if learning:
            logprobs.backward(torch.cat(gradient).to(logprobs.device))


def evaluate_runs(
    passes: Passes,
    taken: Sequence[Rows | None],
    index: Tensor,
    into: Sequence[tuple[Tensor, Tensor] | None],
) -> None:
    """Write log-probabilities and entropies of rows `index` of each run, without gradient.

    Parameters
    ----------
    into
        One pair of (B, T) tensors per run; None, as in `taken`, where a run takes no part.
    """
    size = passes.group_size
    groups = [[] if r is None else _groups(index[index < len(r)], r, size) for r in taken]
    for _, batch in passes.batches(taken, groups):
        with torch.no_grad():
            logprobs, entropies = (
                value.cpu().split(batch.counts) for value in passes.logprobs(batch)
            )
        for s, run in enumerate(taken):
            target = into[s]
            if run is None or target is None or not len(batch.rows[s]):
                continue
            here = batch.rows[s]
            asked = torch.isin(here, index)
            for tensor, values in zip(target, (logprobs[s], entropies[s]), strict=True):
                tensor[here[asked]] = spread(values, run.mask[here])[asked].to(tensor.dtype)


def _take_in(step: RunStep | None, rows: Tensor, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Note a micro-batch's values in a run's step; return the gradient by counting token."""
    zero = torch.zeros_like(logprobs)
    if step is None or not len(rows):
        return zero
    mask = step.part.rollout.rows.mask[rows]
    own = step.number[rows] > -2
    wide = spread(logprobs, mask)
    step.logprobs[rows[own]] = wide[own].to(step.logprobs.dtype)
    step.entropy[rows[own]] = spread(entropy, mask)[own].to(step.entropy.dtype)
    if step.failure is not None:
        return zero
    try:
        gradient = step.gradient(rows, wide)
    except (ValueError, FloatingPointError) as error:
        step.failure = error
        return zero
    return zero if gradient is None else gradient[mask]


def _groups(index: Tensor, rows: Rows, size: int) -> list[int]:
    """Return the groups that rows (b,) belong to, the one with the longest completion first."""
    longest = group_lengths(rows, size)
    return sorted(set((index // size).long().tolist()), key=lambda g: (-longest[g], g))


def _without(groups: Sequence[int], others: Sequence[int]) -> list[int]:
    left_out = set(others)
    return [group for group in groups if group not in left_out]
