"""Train an arm and evaluate it, or evaluate an untrained one: the rows of an accuracy table.

Both use the same problems and the same evaluator (`repro.evaluation.scale_evaluator`). A trained
arm is also evaluated before training, greedily and with its own quantised weights, so its gain does
not include the effect of quantisation.

A run can be stopped between rollouts. It then writes a checkpoint; resumed from it, the run gives
the same numbers as without the interruption.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from repro.data.problem_sets import ProblemSets
from repro.distributed import ALONE, BatchError, Ranks
from repro.evaluation.scale_evaluator import ScaleEvaluator
from repro.evidence.procedure import Measured, Progress, RunContext, Stopped
from repro.evidence.record import TRAINED
from repro.measure.device_state import release, reset_peak
from repro.models.files.adapter_files import save_adapter
from repro.models.files.merged_files import write_merged
from repro.models.memory_plan import training_memory
from repro.models.policy import Policy, device_bytes, load_policy, trainable_parameters
from repro.procedures.loaded_run import LoadedRun, RunTally
from repro.reward.grader import GraderPool
from repro.reward.score import Graded, GradingRequest
from repro.rl.clock import Clock
from repro.rl.collect import GrowingRollout, PromptSource, Score, collect
from repro.rl.divide import shard
from repro.rl.learner import Learner, learner_of
from repro.rl.rows import mean_of
from repro.rl.trainer import Hooks, train
from repro.rl.training_state import TrainState
from repro.rollout.for_policy import CopySampler, sampler_for
from repro.rollout.sampler import Sampler
from repro.rollout.vllm_sampler import VllmSampler
from repro.runlog.completions import keep_batch
from repro.runlog.run_logger import LogOptions, RunLogger
from repro.spec.config import OPENING_TOKENS, RunConfig, TrainScale, digest_of
from repro.spec.facts import Facts
from repro.spec.tier import REAL_CHECKPOINTS, Tier, cuda_devices


def train_run(loaded_run: LoadedRun, learner: Learner, hooks: Hooks, folder: Path) -> TrainState:
    """Train a run on rewards, resuming from a checkpoint in `folder` if there is one.

    Raises `Stopped` if it was stopped before its last step.
    """
    evaluation, ranks = loaded_run.evaluation, loaded_run.ranks
    source = PromptSource(loaded_run.problems.train, evaluation.evaluator.tokenizer, loaded_run.run)
    score = _alike_on_ranks(evaluation.score, ranks)
    hooks = dataclasses.replace(hooks, on_fault=partial(keep_batch, folder.parent, ranks))
    return train(learner, source, score, hooks, folder=folder)


def _alike_on_ranks(score: Score, ranks: Ranks) -> Score:
    """Return a score that raises `BatchError` on all ranks where rewards are missing or differ."""

    def checked(requests: Sequence[GradingRequest]) -> Sequence[Graded]:
        try:
            graded = score(requests)
        except ValueError as error:
            ranks.agree(str(error))  # raises
        ranks.agree(None)
        digests = ranks.objects(digest_of([one.unshaped for one in graded]))
        other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise BatchError(
                f"rank {other[0]} rewards the same completions otherwise than rank 0; several "
                "ranks need a reward that depends on text and gold alone"
            )
        return graded

    return checked


def train_and_evaluate(run: RunConfig, context: RunContext) -> Measured:
    """Train and evaluate the arm of `run`, and save the trained weights in `folder`.

    With several ranks only the first writes, and all stop after the same step. See
    `repro.evidence.procedure.Procedure`.
    """
    ranks, folder, progress = Ranks.joined(), context.folder, context.progress
    options = LogOptions.from_environment() if ranks.first else LogOptions()
    with (
        RunLogger(run, folder, options, progress) as logger,
        loaded(run, ranks, progress, context.threads) as loaded_run,
    ):
        policy = loaded_run.policy
        parameters = trainable_parameters(policy)
        # On the CPU: in full training they need as much memory as the master weights.
        copies = {name: p.detach().to("cpu", copy=True) for name, p in parameters.items()}
        progress("evaluating the start", {})
        start = loaded_run.evaluation.greedy(loaded_run.problems.test)
        learner = learner_of_run(loaded_run)
        told = logger if ranks.first else None
        hooks = loaded_run.hooks(progress, lambda: ranks.any(context.should_stop()), told)
        progress("beginning to train", {})  # a step of a large model takes minutes
        result = train_run(loaded_run, learner, hooks, folder / "checkpoint")
        learner.sampler.refresh()
        progress("evaluating", {})
        measured = loaded_run.outcome(result.series)
        facts = measured.facts
        facts["answers"]["accuracy_greedy_start"] = start.tallies()
        facts.update(result.facts, trained_change_l2=_distance(policy, copies))
        facts["optimizer_steps"] = result.step
        if ranks.first:
            sampler = cast(CopySampler, loaded_run.sampler)
            keep_policy(policy if policy.shards is None else sampler.of_trained(), folder)
        return measured


def evaluate_untrained(run: RunConfig, context: RunContext) -> Measured:
    """Evaluate an untrained arm; see `repro.evidence.procedure.Procedure`."""
    ranks = Ranks.joined()

    def on_part(share: float) -> None:
        if ranks.any(context.should_stop()):
            raise Stopped
        context.progress("evaluating", {"percent": 100 * share})

    with loaded(run, ranks, context.progress, context.threads) as loaded_run:
        on_part(0.0)
        loaded_run.evaluation.evaluator.on_part = on_part
        series = _sampled_prompts(loaded_run, on_part)
        return loaded_run.outcome(series)


def _sampled_prompts(
    loaded_run: LoadedRun, on_part: Callable[[float], None]
) -> dict[str, list[float | None]]:
    """Return what the rollouts of the first steps are without an update, one value a step.

    Prompts and seeds are those of a trained arm, so that prompts are no noise between them.
    """
    run, evaluation = loaded_run.run, loaded_run.evaluation
    steps = run.scale.evaluation.prompts_of_steps
    series: dict[str, list[float | None]] = {}
    if not steps:
        return series
    source = PromptSource(loaded_run.problems.train, evaluation.evaluator.tokenizer, run)
    draws = 0
    for step in range(steps):
        on_part(0.0)  # stops between two rollouts
        growing = GrowingRollout(run, source, step=step, draws=draws)
        rollout = collect(growing, evaluation.evaluator.sampler, evaluation.score, Clock())
        draws += rollout.batches
        for name, value in {
            "reward": mean_of([one.reward for one in rollout.graded]),
            "accuracy_sampled": rollout.accuracy_sampled,
            "informative_groups": rollout.informative,
        }.items():
            series.setdefault(name, []).append(value)
    return series


def device_of(run: RunConfig) -> str:
    """Return the device that a run computes on: `smoke` takes the CPU wherever it is."""
    return "cuda" if run.tier != "smoke" and cuda_devices() else "cpu"


def load_arm(run: RunConfig, device: str) -> Policy:
    """Return the initial policy of a run's arm."""
    scale: TrainScale = run.scale
    arm = run.arm
    return load_policy(
        scale.checkpoint,
        revision=scale.revision,
        weight_format=arm.weight_format,
        training=arm.training,
        lora_rank=arm.lora_rank,
        lora_alpha=arm.lora_alpha,
        norms_trained=arm.norms_trained,
        compute_dtype=scale.compute_dtype,
        seed=run.seed,
        device=device,
        order=run.seed if scale.permuted else None,
        rounding=arm.rounding,
    )


@contextmanager
def loaded(run: RunConfig, ranks: Ranks, progress: Progress, threads: int) -> Iterator[LoadedRun]:
    """Load a run's policy and its evaluator; leaving the context stops the graders."""
    began = time.perf_counter()
    torch.set_num_threads(threads)
    release()  # memory that the process's previous run left reserved
    reset_peak()
    with GraderPool(among=ranks if ranks.world > 1 else None) as pool:
        progress("loading", {})
        made = _loaded_run(run, ranks, pool, began)
        with made.sampler if isinstance(made.sampler, VllmSampler) else nullcontext():
            yield made


def _loaded_run(run: RunConfig, ranks: Ranks, pool: GraderPool, began: float) -> LoadedRun:
    scale: TrainScale = run.scale
    policy = load_arm(run, device_of(run))
    if ranks.world > 1 and run.arm.training == "full":
        shard(policy, ranks.devices, scale.optimizer.name)
        release()  # the whole masters
    sampler = _sampler(policy, run)
    evaluation = ScaleEvaluator(run, sampler, policy.tokenizer, pool, ranks)
    rewarded = run.arm.reward_function is not None
    problems = ProblemSets.of(scale, trains=run.arm.training != "none", rewarded=rewarded)
    # What must be the same when the run resumes from a checkpoint.
    unchanging = policy.facts["checkpoint_files"] | problems.digests
    unchanging["train_problems"] = problems.train_digest
    return LoadedRun(
        run=run,
        policy=policy,
        sampler=sampler,
        problems=problems,
        evaluation=evaluation,
        ranks=ranks,
        tally=RunTally(pool, unchanging, began),
        receipts=Facts(fitting_update(run, policy.device, ranks))
        | ({"ranks": ranks.world} if ranks.world > 1 else {})
        | ({"vllm": sampler.receipt} if isinstance(sampler, VllmSampler) else {}),
    )


def learner_of_run(loaded_run: LoadedRun) -> Learner:
    """Return a loaded run in the form that the trainer takes."""
    run, policy = loaded_run.run, loaded_run.policy
    # There is no memory plan for a CPU; it keeps all activations.
    unplanned = None if policy.device.type == "cpu" else 0
    return learner_of(
        run,
        policy,
        loaded_run.sampler,
        micro_tokens=loaded_run.receipts.get("micro_tokens"),
        kept_blocks=loaded_run.receipts.get("kept_blocks", unplanned),
        ranks=loaded_run.ranks,
    )


def fitting_update(run: RunConfig, device: torch.device, ranks: Ranks = ALONE) -> dict[str, int]:
    """Return the `micro_tokens` of a micro-batch and `kept_blocks`, whose activations are kept.

    Empty where memory is not planned: the scale then sets the rows, and no activations are kept.
    """
    if Tier(run.tier) not in REAL_CHECKPOINTS or device.type != "cuda":
        return {}
    memory = training_memory(run.arm, run.scale, ranks.world)
    if memory is None:
        return {}
    # With different cards, the smallest one decides for all ranks.
    step = memory.fitting(min(ranks.objects(device_bytes(device))))
    return {"micro_tokens": step.micro_tokens, "kept_blocks": step.kept_blocks}


def _sampler(policy: Policy, run: RunConfig) -> Sampler:
    """Return the sampler, which serves both rollouts and evaluation."""
    scale: TrainScale = run.scale
    longest = scale.longest_completion
    positions = scale.longest_prompt + OPENING_TOKENS + longest
    if scale.sampler == "vllm":
        memory = training_memory(run.arm, scale)
        if memory is None or policy.device.type == "cpu":
            return VllmSampler(policy, max_positions=positions)
        share = memory.served_share(device_bytes(policy.device))
        return VllmSampler(policy, max_positions=positions, memory_share=share)
    return sampler_for(
        policy,
        rows=scale.prompts_per_rollout * scale.group_size,
        max_new_tokens=longest,
        max_positions=positions,
        optimizer=scale.optimizer.name,
        folded=run.arm.rollout_adapter == "folded",
    )


def _distance(policy: Policy, start: dict[str, Tensor]) -> float:
    """Return the L2 norm of the change of the trained parameters since `start`."""
    now = trainable_parameters(policy)
    if policy.shards is not None:
        return float(policy.shards.norm({n: now[n].detach().cpu() - start[n] for n in start}))
    squares = [(now[name].detach().cpu() - start[name]).double().square().sum() for name in start]
    return float(torch.stack(squares).sum().sqrt())


def keep_policy(policy: Policy, folder: Path) -> None:
    """Save the trained weights as `adapter/` (LoRA) or `model/` in `folder`, replacing old ones."""
    place = folder / TRAINED[policy.training]
    shutil.rmtree(place, ignore_errors=True)
    (save_adapter if policy.training == "lora" else write_merged)(policy, place)
