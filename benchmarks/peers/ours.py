"""The project's update on the rows of `step_rows`, and its whole step, compared with TRL's.

    ours_bf16, ours_nvfp4    `Learner.backward` and `step`, as the trainer calls them, on a
                             policy with LoRA on the seven projections

Rows lie on the host when the clock starts, as they do after a rollout. With lengths `sampled` a
step is the engine's rollout of a group per question, the update, and the engine's refresh; every
second completion is paid, as under TRL here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.peers import harness
from benchmarks.peers.step_rows import (
    ALPHA,
    MODELS,
    RANK,
    SAMPLED,
    StepRows,
    draw_step,
    questions,
    sizes_of,
)
from repro.models.policy import Policy, load_policy
from repro.models.random_policy import random_policy
from repro.procedures.train import fitting_update
from repro.rl.advantage import Advantages
from repro.rl.collect import BatchRequest, Graded, Rollout
from repro.rl.learner import Learner, StepInputs, learner_of
from repro.rl.rows import Rows, make_rows, token_mean
from repro.rl.step import StepOutput
from repro.rl.training_state import TrainState, fresh_state
from repro.rollout.for_policy import sampler_for
from repro.rollout.sampler import RolloutBatch, Sampler
from repro.spec.arm import Arm, LossConfig, WeightFormat
from repro.spec.config import (
    DataConfig,
    LearningRates,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TrainScale,
    derive_seed,
)
from repro.spec.tier import Tier

WAYS = ("ours_bf16", "ours_nvfp4")
PACKAGES = ("qerl-repro", "torch", "triton", "transformers", "peft")
_LEARNING_RATE = 1e-5
# Of a question, its chat template included.
_QUESTION_TOKENS = 192
# More steps than are ever timed, so that no schedule ends.
_MOST_STEPS = 1000


class NoSampler:
    """Stands where rows are drawn instead of sampled."""

    def refresh(self) -> None:
        """Do nothing."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        group_size: int,
        seeds: Sequence[int],
    ) -> RolloutBatch:
        """Raise, for nothing samples here."""
        raise RuntimeError("rows are drawn; nothing samples")


def policy_asked(asked: argparse.Namespace) -> Policy:
    """Return the way's policy, from its folder or with random weights."""
    settings: dict[str, Any] = {
        "weight_format": asked.way.removeprefix("ours_"),
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "compute_dtype": asked.dtype,
        "seed": asked.seed,
        "device": asked.device,
    }
    if asked.folder:
        return load_policy(asked.folder, training="lora", **settings)
    return random_policy(MODELS[asked.model], **settings)


def run_asked(asked: argparse.Namespace, lengths: str, folder: str) -> RunConfig:
    """Return the run whose steps are timed.

    Parameters
    ----------
    folder
        Holds the model's config.json, by which training sizes its micro-batches.
    """
    sizes = sizes_of(lengths, harness.sizes_asked(asked))
    weight_format = cast(WeightFormat, asked.way.removeprefix("ours_"))
    arm = Arm(
        name=asked.way,
        label=asked.way,
        weight_format=weight_format,
        lora_rank=RANK,
        lora_alpha=float(ALPHA),
        loss=LossConfig(name="token_mean", aggregation="token_mean"),
    )
    rates = LearningRates(lora_16bit=_LEARNING_RATE, lora_4bit=_LEARNING_RATE, full=_LEARNING_RATE)
    sampled = lengths == SAMPLED
    longest = asked.new_tokens if sampled else max(sizes.most, sizes.mean)
    scale = TrainScale(
        checkpoint=folder,
        data=DataConfig(train_problems=sizes.prompts),
        steps=_MOST_STEPS,
        prompts_per_rollout=sizes.prompts,
        group_size=sizes.group,
        max_prompt_tokens=_QUESTION_TOKENS if sampled else sizes.prompt_tokens,
        rollout=SamplingConfig(max_new_tokens=longest),
        optimizer=OptimizerConfig(learning_rates=rates),
        compute_dtype=asked.dtype,
    )
    return RunConfig(
        target="peers", target_version=1, tier=Tier.PAPER.value, procedure="step_time", arm=arm,
        scale=scale, seed=asked.seed,
    )  # fmt: skip


def rows_of(drawn: StepRows) -> Rows:
    """Return drawn rows as the trainer has them."""
    token_ids = torch.nn.utils.rnn.pad_sequence(drawn.completions, batch_first=True)  # (B, T)
    lengths = torch.tensor([len(completion) for completion in drawn.completions])
    mask = torch.arange(token_ids.shape[1]) < lengths[:, None]  # (B, T)
    return Rows(
        prompts=tuple(tuple(prompt) for prompt in drawn.prompts.tolist()),
        prompt_of_row=torch.arange(len(drawn.prompts)).repeat_interleave(drawn.group),
        token_ids=token_ids,
        mask=mask,
        sampled_logprobs=torch.zeros(token_ids.shape),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
    )


def paid_by_turns(rows: Rows, advantages: Tensor) -> Rollout:
    """Return rows as a rollout whose every second completion was paid."""
    count = len(rows)
    reward: list[float | None] = [float(value > 0) for value in advantages]
    return Rollout(
        rows=rows,
        advantages=Advantages(
            values=advantages.double(),
            scored=torch.ones(count, dtype=torch.bool),
            groups=len(rows.prompts),
            zero_variance_groups=0,
        ),
        graded=[Graded(accuracy=value, reward=value) for value in reward],
        batches=1,
        groups_drawn=len(rows.prompts),
        tokens_sampled=int(rows.mask.sum()),
        informative=1.0,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """A policy that trains, and the state of its run."""

    learner: Learner
    state: TrainState

    def update(self, rollout: Rollout, step: int) -> StepOutput:
        """Make the passes and the optimiser step of a rollout."""
        every = torch.arange(len(rollout.rows))
        part = StepInputs(step=step, rollout=rollout, index=every, old=None, reference=None)
        output = self.learner.backward(part, self.state)
        self.learner.step(step)
        return output


def stepping_of(run: RunConfig, policy: Policy, sampler: Sampler) -> Stepping:
    """Return a policy with a fresh optimiser, its micro-batches as training would have them."""
    tokens, kept = fitting_update(run, policy.device) or (None, 0)
    learner = learner_of(run, policy, sampler, micro_tokens=tokens, kept_blocks=kept)
    return Stepping(learner=learner, state=fresh_state(run))


def measure_update(
    policy: Policy, run: RunConfig, asked: argparse.Namespace, lengths: str
) -> dict[str, Any]:
    """Return the entry of updates on drawn rows."""
    sizes, device = sizes_of(lengths, harness.sizes_asked(asked)), torch.device(asked.device)
    vocabulary = policy.decoder.get_parameter("model.embed_tokens.weight").shape[0]
    steps = [
        draw_step(lengths, step, asked.seed, sizes, vocabulary) for step in range(asked.steps + 1)
    ]
    stepping = stepping_of(run, policy, NoSampler())

    def rollout(step: int) -> Rollout:
        return paid_by_turns(rows_of(steps[step]), steps[step].advantages)

    first = rollout(0)
    warm = stepping.update(first, 0)

    def once(step: int) -> float:
        own = rollout(step)
        return harness.seconds_of(lambda: stepping.update(own, step), device)

    entry = harness.time_steps(once, asked)
    tokens = [step.completion_tokens for step in steps[1:]][: len(entry["seconds"])]
    return entry | {
        "logprob": token_mean(warm.logprobs, first.rows.mask),
        "micro_batch_tokens": stepping.learner.micro_tokens,
        "completion_tokens": tokens,
        "computed_tokens": [count + sizes.rows * sizes.prompt_tokens for count in tokens],
    }


def measure_steps(policy: Policy, run: RunConfig, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the entry of whole steps: rollout, update, refresh."""
    scale, device = cast(TrainScale, run.scale), torch.device(asked.device)
    B = scale.prompts_per_rollout * scale.group_size
    sampler = sampler_for(
        policy,
        rows=B,
        max_new_tokens=asked.new_tokens,
        max_positions=_QUESTION_TOKENS + asked.new_tokens,
    )
    stepping = stepping_of(run, policy, sampler)
    rollouts: list[float] = []
    tokens: list[int] = []

    def sampled(step: int) -> Rollout:
        texts = questions(scale.prompts_per_rollout, step, asked.seed)
        prompts = [_prompt(policy.tokenizer, text) for text in texts]
        seeds = [derive_seed(asked.seed, step, row) for row in range(B)]
        request = BatchRequest(prompts=prompts, golds=[""] * B, seeds=seeds, problems=[])
        completions = stepping.learner.sample(request)
        rows = make_rows(prompts, completions, group_size=scale.group_size)
        return paid_by_turns(rows, 1.0 - 2.0 * (torch.arange(B) % 2))

    def once(step: int) -> float:
        drawn: list[Rollout] = []
        rollouts.append(harness.seconds_of(lambda: drawn.append(sampled(step)), device))
        tokens.append(drawn[0].tokens_sampled)

        def rest() -> None:
            stepping.update(drawn[0], step)
            stepping.learner.refresh()

        return rollouts[-1] + harness.seconds_of(rest, device)

    for step in (asked.steps + 1, asked.steps + 2):
        once(step)
    rollouts.clear()
    tokens.clear()
    entry = harness.time_steps(once, asked)
    updates = [whole - part for whole, part in zip(entry["seconds"], rollouts, strict=True)]
    return entry | {
        "rollout_seconds": rollouts,
        "update_seconds": updates,
        "completion_tokens": tokens,
    }


def _prompt(tokenizer: Any, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    said = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False))


def main() -> None:
    """Measure one way of one model on each kind of lengths asked for."""
    asked = harness.arguments(__doc__.partition("\n")[0], WAYS).parse_args()
    policy = policy_asked(asked)
    with tempfile.TemporaryDirectory() as made:
        folder = asked.folder or made
        if not asked.folder:
            text = json.dumps(MODELS[asked.model])
            Path(made, "config.json").write_text(text, encoding="utf-8")
        for lengths in asked.lengths.split(","):
            harness.free_memory()
            run = run_asked(asked, lengths, folder)
            if lengths == SAMPLED:
                entry = measure_steps(policy, run, asked)
            else:
                entry = measure_update(policy, run, asked, lengths)
            harness.append_entry(asked, lengths, PACKAGES, entry)


if __name__ == "__main__":
    main()
