"""The project's side: updates on drawn rows, and whole steps of its trainer.

    ours_bf16, ours_nvfp4                LoRA on the seven projections, by weight format
    ours_nvfp4_aqn, ours_bf16_folded     the same with noise, or the adapter folded in, in rollouts

An update is `Learner.backward` and `step`, as the trainer calls them, on rows that lie on the host
when the clock starts, as they do after a rollout. A whole step is the trainer's own, from a run
that is loaded as any other (`repro.procedures.train`), with the seconds that the trainer's clock
gives each phase; `score` is grading. Reading the updated adapter is part of `update`.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.peers import harness
from benchmarks.peers.harness import ALPHA, RANK, THREADS
from benchmarks.peers.workloads import TEMPLATE
from repro.distributed import ALONE
from repro.procedures.train import learner_of_run, loaded, train_run
from repro.reward.custom import reward_named
from repro.reward.score import Graded
from repro.rl.advantage import Advantages
from repro.rl.collect import Rollout
from repro.rl.learner import Learner
from repro.rl.rollout_receipts import Values
from repro.rl.rows import make_rows, mean_of, token_mean
from repro.rl.step import StepInputs, StepOutput
from repro.rl.trainer import Hooks
from repro.rl.training_state import TrainState, fresh_state
from repro.rollout.engine import Engine
from repro.rollout.sampler import Completion
from repro.spec.arm import Arm, LossConfig, NoiseConfig, WeightFormat
from repro.spec.config import (
    DataConfig,
    EvaluationConfig,
    LearningRates,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TrainScale,
)
from repro.spec.tier import Tier

PACKAGES = ("qerl-repro", "torch", "triton", "transformers", "peft")
_run = partial(RunConfig, target="peers", target_version=1, tier=Tier.PAPER.value)
_PARTS = ("rollout", "grading", "logprobs", "update", "other")
# More steps than are ever timed, so that no schedule ends.
_MOST_STEPS = 1000


def run_of(way: str, scale: TrainScale, seed: int, reward: str = "") -> RunConfig:
    """Return the run of a way whose steps are timed; `reward` is one of `benchmarks.peers`."""
    arm = Arm(
        name=way,
        label=way,
        weight_format=cast(WeightFormat, way.split("_")[1]),
        lora_rank=RANK,
        lora_alpha=float(ALPHA),
        noise=NoiseConfig() if way.endswith("_aqn") else None,
        rollout_adapter="folded" if way.endswith("_folded") else "apart",
        loss=LossConfig(name="token_mean", aggregation="token_mean"),
        reward_function=reward_named(f"benchmarks.peers.harness:{reward}") if reward else None,
    )
    return _run(procedure="train", arm=arm, scale=scale, seed=seed)


def scale_of(asked: Namespace, data: DataConfig, rate: float) -> TrainScale:
    """Return the training whose steps are timed; `asked` has the sizes of a step."""
    sampling = SamplingConfig(max_new_tokens=asked.new_tokens)
    rates = LearningRates(lora_16bit=rate, lora_4bit=rate, full=rate)
    return TrainScale(
        checkpoint=asked.folder,
        data=data,
        steps=asked.steps if asked.sampled else _MOST_STEPS,
        prompts_per_rollout=asked.prompts,
        group_size=asked.group,
        max_prompt_tokens=asked.prompt_tokens,
        rollout=sampling,
        optimizer=OptimizerConfig(learning_rates=rates),
        evaluation=EvaluationConfig(sampling=sampling),
        prompt_template=TEMPLATE,
        compute_dtype=asked.dtype,
        checkpoint_every=_MOST_STEPS,
    )


def measure_steps(asked: Namespace) -> dict[str, Any]:
    """Return the entry of whole steps of the project's trainer."""
    scale = scale_of(asked, DataConfig(source=asked.data), 1e-4)
    run = run_of(asked.way, scale, asked.seed, asked.reward)
    sampled: list[dict[str, float]] = []
    steps: list[dict[str, float]] = []
    ended: list[float] = []

    def on_rollout(step: int, rollout: Rollout) -> None:
        reward = mean_of([graded.reward for graded in rollout.graded]) or 0.0
        sampled.append({"tokens": rollout.tokens_sampled, "reward": reward})

    def on_step(step: int, values: Values) -> None:
        seconds = {name: float(values[f"seconds_{name}"] or 0.0) for name in _PARTS}
        parts = {
            "rollout": seconds["rollout"],
            "score": seconds["grading"] + seconds["logprobs"],
            "update": seconds["update"] + seconds["other"],
        }
        steps.append({"total": sum(parts.values()), "sync": 0.0, **parts, **sampled[-1]})
        ended.append(time.time())
        if len(steps) > harness.WARM_UP:
            harness.write_entry(asked, PACKAGES, entry())
        harness.say(f"{asked.way}: step {step}: {steps[-1]['total']:.3f} s")

    def entry() -> dict[str, Any]:
        chosen = {"micro_batch_tokens": learner.micro_tokens, "threads": THREADS}
        return harness.whole_steps(steps, began, ended) | chosen

    with loaded(run, ALONE, lambda text, values: None, THREADS) as made:
        learner = learner_of_run(made)
        engine = getattr(made.sampler, "engine", made.sampler)
        if asked.ignore_end and isinstance(engine, Engine):
            engine.config = dataclasses.replace(engine.config, ignore_end=True)
        hooks = Hooks(on_step=on_step, on_rollout=on_rollout, tally=made.tally)
        began = time.time()
        with tempfile.TemporaryDirectory() as folder:
            train_run(made, learner, hooks, Path(folder) / "checkpoint")
    return entry()


def drawn_rollout(drawn: dict[str, Any]) -> Rollout:
    """Return drawn rows as a rollout whose every second completion was paid."""
    completions = [
        Completion(token_ids=(*ids,), sampled_logprobs=(0.0,) * len(ids), finish_reason="stop")
        for ids in drawn["completions"]
    ]
    prompts, count = drawn["prompts"], len(completions)
    rows = make_rows(prompts, completions, group_size=count // len(prompts))
    advantages = harness.by_turns(count)
    reward: list[float | None] = [float(value > 0) for value in advantages]
    return Rollout(
        rows=rows,
        advantages=Advantages(
            values=advantages.double(),
            scored=torch.ones(count, dtype=torch.bool),
            groups=len(prompts),
            zero_variance_groups=0,
        ),
        graded=[Graded(accuracy=value, reward=value) for value in reward],
        batches=1,
        tokens_sampled=int(rows.mask.sum()),
        informative=1.0,
    )


def update(learner: Learner, state: TrainState, rollout: Rollout, step: int) -> StepOutput:
    """Make the passes and the optimiser step of a rollout."""
    part = StepInputs(step=step, rollout=rollout, index=torch.arange(len(rollout.rows)))
    output = learner.backward(part, state)
    learner.step(step)
    return output


def measure_update(asked: Namespace) -> dict[str, Any]:
    """Return the entry of updates on drawn rows."""
    steps = harness.json_lines(asked.rows)
    scale = scale_of(asked, DataConfig(train_problems=asked.prompts, test_problems=1), 1e-5)
    run = run_of(asked.way, scale, asked.seed)
    with loaded(run, ALONE, lambda text, values: None, THREADS) as made:
        learner, state = learner_of_run(made), fresh_state(run)
        first = drawn_rollout(steps[0])
        warm = update(learner, state, first, 0)

        def prepared(step: int) -> Callable[[], object]:
            return partial(update, learner, state, drawn_rollout(steps[step]), step)

        return harness.time_steps(prepared, asked, steps) | {
            "logprob": token_mean(warm.logprobs, first.rows.mask),
            "micro_batch_tokens": learner.micro_tokens,
        }


def main() -> None:
    """Measure one way of one model on one workload."""
    asked = harness.requested()
    measure = measure_steps if asked.sampled else measure_update
    harness.write_entry(asked, PACKAGES, measure(asked))


if __name__ == "__main__":
    main()
