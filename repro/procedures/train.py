"""Train an arm and evaluate it, or evaluate an untrained one: the rows of an accuracy table.

Both ask the same questions with the same evaluator (`repro.evaluate.scale_evaluator`). A trained
arm is asked greedily before training too, with its own quantised weights, so that its gain is its
own.

A run can be stopped between rollouts; it leaves a checkpoint and the next start goes on from it,
to the same numbers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from repro.evaluate.asking import SingleAsker
from repro.evaluate.grades import Answers
from repro.evaluate.scale_evaluator import ScaleEvaluator
from repro.evidence.procedure import Measured, Progress, Stopped
from repro.measure.device_state import release
from repro.measure.memory_use import reset_peak
from repro.models.files.adapter_files import save_adapter
from repro.models.files.merged_files import write_merged
from repro.models.memory_plan import fit_training
from repro.models.policy import Policy, load_policy, trainable_parameters
from repro.models.sharding import shard
from repro.models.training_memory import training_step
from repro.procedures.loaded_runs import (
    LoadedRuns,
    ProblemSets,
    TrainingOutcome,
    digests_at_start,
)
from repro.procedures.matched_noise import plant_arms_noise
from repro.procedures.tally import RunTally
from repro.reward.grader import GraderPool
from repro.reward.score import Rewards
from repro.rl.collect import Asked, PromptSource, Score
from repro.rl.loop import Hooks
from repro.rl.policies import Policies
from repro.rl.runs import FailedRun, TrainResult
from repro.rl.single_run.for_policy import CopySampler, sampler_for
from repro.rl.single_run.policy import SinglePolicy, single_policy
from repro.rl.single_run.ranks import Ranks
from repro.rl.trainer import train
from repro.rollout.sampler import Sampler
from repro.runlog.run_logger import LogOptions, RunLogger
from repro.spec.config import OPENING_TOKENS, RunConfig, TrainScale, digest_of
from repro.spec.tier import REAL_CHECKPOINTS, Tier, cuda_devices


def train_runs(
    loaded_runs: LoadedRuns, policies: Policies, hooks: Hooks, folder: Path
) -> list[TrainResult | FailedRun]:
    """Train every run by rewards, or go on from a checkpoint in `folder`."""
    problems, tokenizer = loaded_runs.problems.train, loaded_runs.evaluation.evaluator.tokenizer
    prompts = dict[str, list[int]]()
    sources = [PromptSource(problems, tokenizer, run, prompts) for run in loaded_runs.runs]
    score = _alike_on_ranks(loaded_runs.evaluation.score, Ranks.joined())
    return train(policies, sources, score, hooks, folder=folder)


def _alike_on_ranks(score: Score, ranks: Ranks) -> Score:
    """Return a score that raises `ValueError` where ranks reward the same completions unlike."""
    if ranks.world == 1:
        return score

    def checked(asked: Sequence[Asked | None]) -> Sequence[Rewards | None]:
        rewards = score(asked)
        digests = ranks.texts(digest_of([None if own is None else own.total for own in rewards]))
        other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise ValueError(
                f"rank {other[0]} rewards the same completions otherwise than rank 0; several "
                "ranks need a reward that depends on text and gold alone"
            )
        return rewards

    return checked


def train_and_evaluate(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Train `run`'s arm and measure it; keep what was trained in `folder`.

    Of several ranks the first alone writes, and all stop after the same step. See
    `repro.procedures.Procedure`.
    """
    ranks = Ranks.joined()
    options = LogOptions.from_environment() if ranks.first else LogOptions()
    with (
        RunLogger([run], [folder], options, progress) as logger,
        loaded(run, progress, threads) as loaded_runs,
    ):
        policy = cast(Policy, loaded_runs.loaded)
        parameters = trainable_parameters(policy)
        # Off the device: under full training they would take as much of it as the masters.
        copies = {name: p.detach().to("cpu", copy=True) for name, p in parameters.items()}
        progress("evaluating the start", {})
        (start,) = loaded_runs.evaluation.greedy(loaded_runs.problems.test)
        policies = policies_of(loaded_runs)
        hooks = loaded_runs.hooks(progress, lambda: ranks.any(should_stop()))
        if ranks.first:
            hooks = logger.around(hooks, loaded_runs.evaluation.evaluator.tokenizer)
        result = finished(train_runs(loaded_runs, policies, hooks, folder / "checkpoint"))
        policies.refresh()
        progress("evaluating", {})
        final = loaded_runs.final()
        trained = TrainingOutcome(
            start=cast(Answers, start),  # the one run is alive
            result=result,
            change_l2=_distance(policy, copies),
        )
        measured = loaded_runs.outcome(0, final, trained)
        if ranks.first:
            sampler = cast(CopySampler, loaded_runs.sampler)
            keep_policy(policy if policy.shards is None else sampler.of_trained(), folder)
        return measured


def evaluate_untrained(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Measure an untrained arm; see `repro.procedures.Procedure`."""
    del folder
    with loaded(run, progress, threads) as loaded_runs:
        if Ranks.joined().any(should_stop()):
            raise Stopped
        progress("evaluating", {})
        return loaded_runs.outcome(0, loaded_runs.final())


def load_arm(run: RunConfig, device: str) -> Policy:
    """Return the policy of a run's arm as it starts, weight noise planted where the arm has any."""
    scale: TrainScale = run.scale
    arm = run.arm
    policy = load_policy(
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
    plant_arms_noise(policy, run)
    return policy


@contextmanager
def loaded(run: RunConfig, progress: Progress, threads: int) -> Iterator[LoadedRuns]:
    """Load a run's policy and all that asking it needs; the graders end with the context."""
    torch.set_num_threads(threads)
    release()  # what the process's last run leaves reserved is not this one's
    reset_peak()
    ranks = Ranks.joined()
    with GraderPool(workers=1, among=ranks if ranks.world > 1 else None) as pool:
        progress("loading", {})
        yield _loaded_runs(run, pool)


def _loaded_runs(run: RunConfig, pool: GraderPool) -> LoadedRuns:
    scale: TrainScale = run.scale
    policy = load_arm(run, "cuda" if run.tier != "smoke" and cuda_devices() else "cpu")
    ranks = Ranks.joined()
    if ranks.world > 1 and run.arm.training == "full":
        shard(policy, ranks.devices, scale.optimizer.name)
        release()  # the whole masters
    sampler = _sampler(policy, scale)
    asker = SingleAsker(sampler, ranks)
    evaluation = ScaleEvaluator([run], asker, policy.tokenizer, pool)
    fitting = fitting_update(run, policy.device)
    problems = ProblemSets.of(scale, trains=run.arm.training != "none")
    return LoadedRuns(
        runs=[run],
        loaded=policy,
        sampler=sampler,
        problems=problems,
        evaluation=evaluation,
        tallies=[RunTally(evaluation, pool, 0, digests_at_start(policy.effects, problems))],
        effects=[policy.effects],
        receipts=({} if fitting is None else dict(zip(_FITTED, fitting, strict=True)))
        | ({"ranks": ranks.world} if ranks.world > 1 else {}),
    )


def policies_of(loaded_runs: LoadedRuns) -> SinglePolicy:
    """Return the one loaded run's policy as it trains by itself."""
    (run,), policy, sampler = (
        loaded_runs.runs,
        cast(Policy, loaded_runs.loaded),
        cast(Sampler, loaded_runs.sampler),
    )
    # A CPU has room for all that it computes.
    unplanned = (None, None if policy.device.type == "cpu" else 0)
    micro_tokens, kept = fitting_update(run, policy.device) or unplanned
    return single_policy(
        run,
        policy,
        sampler,
        micro_tokens=micro_tokens,
        kept_blocks=kept,
        ranks=Ranks.joined(),
    )


# Names of what `fitting_update` returns, in a record.
_FITTED = ("micro_tokens", "kept_blocks")


def fitting_update(run: RunConfig, device: torch.device) -> tuple[int, int] | None:
    """Return the packed tokens of a micro-batch and the kept blocks that a device has room for.

    None takes the scale's rows and keeps none.
    """
    if Tier(run.tier) not in REAL_CHECKPOINTS or device.type != "cuda":
        return None
    planned = training_step(run.arm, run.scale, Ranks.joined().world)
    if planned is None:
        return None
    # Of ranks on unlike cards the smallest counts.
    room = Ranks.joined().least(torch.cuda.get_device_properties(device).total_memory)
    step = fit_training(planned, room)
    return step.micro_tokens, step.kept_blocks


def _sampler(policy: Policy, scale: TrainScale) -> Sampler:
    """Return the sampler of rollouts and questions alike."""
    longest = scale.longest_completion
    return sampler_for(
        policy,
        rows=scale.prompts_per_rollout * scale.group_size,
        max_new_tokens=longest,
        max_positions=scale.longest_prompt + OPENING_TOKENS + longest,
        optimizer=scale.optimizer.name,
    )


def finished(results: Sequence[TrainResult | FailedRun]) -> TrainResult:
    """Return the one run's result.

    Raises
    ------
    Stopped
        When it was stopped before its last step.
    """
    (result,) = results
    assert isinstance(result, TrainResult)  # a failure of the one run has raised
    if not result.finished:
        raise Stopped
    return result


def _distance(policy: Policy, start: dict[str, Tensor]) -> float:
    """Return the L2 norm of what is trained less its copies from the start."""
    now = trainable_parameters(policy)
    if policy.shards is not None:
        return float(policy.shards.norm({n: now[n].detach().cpu() - start[n] for n in start}))
    squares = [(now[name].detach().cpu() - start[name]).double().square().sum() for name in start]
    return float(torch.stack(squares).sum().sqrt())


def keep_policy(policy: Policy, folder: Path) -> None:
    """Write what was trained to `folder`, in place of what is there: `adapter/`, or `model/`."""
    if policy.training == "lora":
        shutil.rmtree(folder / "adapter", ignore_errors=True)
        save_adapter(policy, folder / "adapter")
    else:
        shutil.rmtree(folder / "model", ignore_errors=True)
        write_merged(policy, folder / "model")
