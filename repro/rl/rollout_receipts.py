"""Records of each rollout in a run's state: values of series, and receipts in `facts`.

Facts are sums and maxima over rollouts (norms perturbed and their realised sigma, rows trained
on). Checkpoints hold them, so a resumed run's receipts are those of the whole run; only `seconds`
differ from an uninterrupted one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from repro.rl.collect import Rollout
from repro.rl.noise import NoiseReceipt
from repro.rl.rows import sampler_mismatch
from repro.rl.training_state import TrainState
from repro.spec.config import RunConfig, TrainScale

Values = dict[str, float | int | None]


class Tally:
    """Counts of a process for a run besides its steps: here none, and the base of those that do."""

    def counts(self) -> dict[str, Any]:
        """Return the counts of all starts of the run so far, as JSON values."""
        return {}

    def go_on_from(self, counts: Mapping[str, Any]) -> None:
        """Continue from the counts that an earlier start saved in a checkpoint."""


def note_rollout(
    run: RunConfig,
    state: TrainState,
    rollout: Rollout,
    receipt: NoiseReceipt,
    before: Tensor,
    done: Tensor,
) -> Values:
    """Add a rollout to the run's receipts; return the values that all its steps share.

    `before`, (B, T), are the trainer's log-probabilities before the rollout's first step. On the
    rows that were trained on, `done`, (rows,), int64, the sampler is compared with the trainer.
    """
    _note_noise(state, receipt)
    _note_rows(state, rollout, run.scale)
    groups = rollout.advantages.groups
    values: Values = {
        "sigma": receipt.sigma,
        "sigma_realised": receipt.sigma_realised,
        "noise_stage": receipt.stage,
        "zero_variance_groups": rollout.advantages.zero_variance_groups / groups if groups else 1.0,
        "informative_groups": rollout.informative,
        "prompts_consumed": state.draws * run.scale.prompts_per_rollout,
        **sampler_mismatch(
            before[done], rollout.rows.sampled_logprobs[done], rollout.rows.mask[done]
        ),
    }
    if run.scale.evaluation.threshold:
        values["accuracy_sampled"] = rollout.accuracy_sampled
        # So far, as the prompts consumed are.
        values["tokens_sampled"] = state.facts["rows"]["tokens_sampled"]
    return values


def _note_rows(state: TrainState, rollout: Rollout, scale: TrainScale) -> None:
    facts = state.facts
    facts["advantage_group_mean_max"] = max(
        facts.get("advantage_group_mean_max", 0.0), _largest_group_mean(rollout)
    )
    counted = ("trained_on", "truncated", "without_reward", "groups_drawn", "tokens_sampled")
    rows = facts.setdefault("rows", dict.fromkeys(counted, 0))
    rows["trained_on"] += len(rollout.rows)
    rows["truncated"] += int(rollout.rows.truncated.sum())
    rows["without_reward"] += int((~rollout.advantages.scored).sum())
    rows["groups_drawn"] += rollout.batches * scale.prompts_per_rollout
    rows["tokens_sampled"] += rollout.tokens_sampled


def _note_noise(state: TrainState, receipt: NoiseReceipt) -> None:
    """Add a rollout's perturbation to the run's receipts."""
    noise = state.facts.setdefault(
        "noise",
        {
            "form": receipt.form,
            "rollouts_asked": 0,
            "rollouts_perturbed": 0,
            "modules": 0,
            "channels_changed": 0,
            "sigma_max": 0.0,
            "sigma_realised_max": 0.0,
            "digest": "",
        },
    )
    noise["rollouts_asked"] += int(receipt.sigma > 0)
    noise["rollouts_perturbed"] += int(receipt.channels_changed > 0)
    noise["modules"] = max(noise["modules"], len(receipt.modules))
    noise["channels_changed"] += receipt.channels_changed
    noise["sigma_max"] = max(noise["sigma_max"], receipt.sigma)
    noise["sigma_realised_max"] = max(noise["sigma_realised_max"], receipt.sigma_realised)
    if receipt.digest:
        noise["digest"] = hashlib.sha256((noise["digest"] + receipt.digest).encode()).hexdigest()


def note_smaller_batches(state: TrainState, step: int, asked: int, fitting: int) -> None:
    """Note that memory ran out with `asked` tokens in a micro-batch, but not with `fitting`.

    Later steps begin with `fitting`; the gradient is the same, the time differs.
    """
    if fitting < asked:
        state.facts["micro_tokens"] = fitting
        state.facts.setdefault("micro_batch_fallbacks", []).append([step, asked, fitting])


def _largest_group_mean(rollout: Rollout) -> float:
    """Return the largest |mean advantage| of a group: 0 where advantages are centred."""
    if not len(rollout.rows):
        return 0.0  # dynamic sampling found no informative group
    group, values = rollout.rows.prompt_of_row, rollout.advantages.values
    sums = torch.zeros(len(rollout.rows.prompts), dtype=values.dtype).index_add_(0, group, values)
    return float((sums / torch.bincount(group, minlength=len(sums)).clamp(min=1)).abs().max())


def note_test(state: TrainState, step: int, values: Mapping[str, float]) -> None:
    """Note what the test split gave after `step` steps, as series `test_<metric>`."""
    state.note(test_steps=step, **{f"test_{name}": value for name, value in values.items()})


def note_accuracy(state: TrainState, step: int, accuracy: float) -> None:
    """Note a held-out accuracy with the steps and the tokens sampled for training behind it."""
    sampled = state.facts["rows"]["tokens_sampled"] if step else 0
    state.note(evaluation_step=step, evaluation_accuracy=accuracy, evaluation_tokens=sampled)
