"""Train an arm and evaluate it, or evaluate an untrained one: the rows of an accuracy table.

Both ask the same questions with the same evaluator (`repro.evaluate.board`). A trained arm is asked
greedily before training too, with its own quantised weights, so that its gain is its own.

A run can be stopped between rollouts; it leaves a checkpoint and the next start goes on from it,
to the same numbers.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor

from repro.data.load import is_available, load_problems
from repro.data.problem import Problem, digest_of_problems
from repro.data.prompts import template_named
from repro.data.repeats import repeat_counts
from repro.evaluate.asking import Alone
from repro.evaluate.board import Board, final_metrics, final_tallies
from repro.evaluate.grades import Answers
from repro.evidence import derived
from repro.evidence.derived import gain
from repro.evidence.procedure import Measured, Progress, Stopped
from repro.evidence.record import Estimate
from repro.keep.keeper import Keeper, Keeping
from repro.keep.probe import write_probe
from repro.measure.device_state import release
from repro.measure.memory_use import reset_peak
from repro.models.adapter_files import save_adapter
from repro.models.checkpoint import digest_of_files, resolve
from repro.models.merged_files import write_merged
from repro.models.policy import Policy, load_policy, trainable_parameters
from repro.models.training_memory import training_memory
from repro.procedures.kl_to_start import log_ratios
from repro.procedures.matched_noise import plant_matched_noise
from repro.procedures.tally import RunTally
from repro.reward.grader import GraderPool
from repro.rl.collect import PromptSource
from repro.rl.loop import Hooks, StepValues
from repro.rl.policies import Policies
from repro.rl.runs import FailedRun, TrainResult
from repro.rl.single import SinglePolicy, single_policy
from repro.rl.trainer import train
from repro.rollout.for_policy import sampler_for
from repro.rollout.sampler import Sampler
from repro.rollout.torch_sampler import sampler_of_rollouts
from repro.spec.config import OPENING_TOKENS, RunConfig, TrainScale
from repro.spec.hub import resolved_revision
from repro.spec.resolve import plain_values
from repro.spec.tier import REAL_CHECKPOINTS, Tier, cuda_devices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bench:
    """A loaded policy with all that asking it needs; `board` and `tally` have this one run."""

    run: RunConfig
    policy: Policy
    sampler: Sampler
    board: Board
    tally: RunTally
    test: list[Problem]
    further: dict[str, list[Problem]]
    development: list[Problem]

    @property
    def micro_tokens(self) -> int | None:
        """Packed tokens of a micro-batch that the device has room for; None: the scale's rows."""
        if Tier(self.run.tier) not in REAL_CHECKPOINTS or self.policy.device.type != "cuda":
            return None
        memory = training_memory(self.run.arm, self.run.scale)
        device = torch.cuda.get_device_properties(self.policy.device)
        return None if memory is None else memory.micro_tokens(device.total_memory)

    def alone(self) -> SinglePolicy:
        """Return the policy as one that trains by itself."""
        return single_policy(self.run, self.policy, self.sampler, micro_tokens=self.micro_tokens)

    def greedy(self, problems: Sequence[Problem]) -> Answers:
        """Ask once each, greedily."""
        (answers,) = self.board.greedy(problems)
        return cast(Answers, answers)  # the one run is alive

    def hooks(
        self,
        keeper: Keeper,
        progress: Progress,
        should_stop: Callable[[], bool],
        shown: Sequence[str],
    ) -> Hooks:
        """Return what training asks of its caller: held-out questions, progress, when to stop.

        Parameters
        ----------
        keeper
            Keeps steps, evaluations and completions.
        shown
            Names of the values that progress shows.
        """

        def on_step(step: int, values: StepValues) -> None:
            (own,) = values
            numbers = {"step": float(step), "steps": float(self.run.scale.steps)}
            numbers |= {name: float(own[name] or 0) for name in shown if own and own.get(name)}
            progress("training", numbers)

        def on_development(step: int, alive: Sequence[bool]) -> list[float | None]:
            del step, alive
            return [fmean(self.greedy(self.development).accuracy)]

        hooks = Hooks(
            evaluate=on_development if self.development else None,
            on_step=on_step,
            should_stop=should_stop,
            tallies=(self.tally,),
        )
        return keeper.around(hooks, self.board.evaluator.tokenizer)


def train_and_evaluate(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Train `run`'s arm and measure it; see `repro.procedures.Procedure`."""
    keeping = Keeping.from_environment()
    with Keeper([run], [folder], keeping) as keeper, loaded(run, progress, threads) as bench:
        problems = load_problems(run.scale.data, "train")
        start = measure_start(bench, progress)
        policies = bench.alone()
        hooks = bench.hooks(keeper, progress, should_stop, ("reward", "entropy"))
        sources = [PromptSource(problems, bench.board.evaluator.tokenizer, run)]
        trained = train(policies, sources, bench.board.score, hooks, folder=folder / "checkpoint")
        result = finished(trained)
        measured = measure_end(bench, policies, start, result, problems, folder, progress)
        metrics = measured.metrics | training_metrics(run, result)
        return dataclasses.replace(measured, metrics=metrics)


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
    with loaded(run, progress, threads) as bench:
        if should_stop():
            raise Stopped
        progress("evaluating", {})
        metrics, tallies = measured_at_end(bench)
        effects = _effects(bench) | {"answers": tallies}
        return Measured(metrics=metrics, effects=effects, inputs=_inputs(bench))


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
    if arm.weight_noise is not None:
        plant_matched_noise(policy, run, load_problems(scale.data, "train"))
    return policy


def further_sets(scale: TrainScale) -> dict[str, list[Problem]]:
    """Return the scale's further test sets by name, those that can be read here."""
    return {
        item.name: load_problems(item.data, "test")
        for item in scale.test_sets
        if is_available(item.data.source)
    }


def test_problems(scale: TrainScale, further: Mapping[str, Sequence[Problem]]) -> list[Problem]:
    """Return the problems behind `accuracy`: the test split's, or those of all further sets."""
    if scale.accuracy_over == "split":
        return load_problems(scale.data, "test")
    return [problem for problems in further.values() for problem in problems]


@contextmanager
def loaded(run: RunConfig, progress: Progress, threads: int) -> Iterator[Bench]:
    """Load a run's policy and all that asking it needs; the graders end with the context."""
    torch.set_num_threads(threads)
    release()  # what the process's last run leaves reserved is not this one's
    reset_peak()
    with GraderPool(workers=1) as pool:
        progress("loading", {})
        yield _bench(run, pool)


def _bench(run: RunConfig, pool: GraderPool) -> Bench:
    scale: TrainScale = run.scale
    policy = load_arm(run, "cuda" if run.tier != "smoke" and cuda_devices() else "cpu")
    sampler = _sampler(policy, scale)
    sampler_of_rollouts(sampler, run.arm)  # refuses, before anything is asked, what it lacks
    wants_development = scale.evaluation.every > 0
    further = further_sets(scale)
    board = Board([run], Alone(sampler), policy.tokenizer, pool)
    return Bench(
        run=run,
        policy=policy,
        sampler=sampler,
        board=board,
        tally=RunTally(board, pool),
        test=test_problems(scale, further),
        further=further,
        development=load_problems(scale.data, "development") if wants_development else [],
    )


def _sampler(policy: Policy, scale: TrainScale) -> Sampler:
    """Return the sampler of rollouts and questions alike."""
    longest = scale.longest_completion
    return sampler_for(
        policy,
        rows=scale.prompts_per_rollout * scale.group_size,
        max_new_tokens=longest,
        max_positions=scale.longest_prompt + OPENING_TOKENS + longest,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """What an arm is before training: its greedy answers, and what will be trained, by name."""

    answers: Answers
    parameters: dict[str, Tensor]


def measure_start(bench: Bench, progress: Progress) -> Start:
    """Ask an arm greedily before training, and keep a copy of what will be trained."""
    parameters = trainable_parameters(bench.policy)
    # Off the device: under full training they would take as much of it as the masters.
    copies = {name: p.detach().to("cpu", copy=True) for name, p in parameters.items()}
    progress("evaluating the start", {})
    return Start(answers=bench.greedy(bench.test), parameters=copies)


def measure_end(
    bench: Bench,
    policies: Policies,
    start: Start,
    result: TrainResult,
    problems: Sequence[Problem],
    folder: Path,
    progress: Progress,
) -> Measured:
    """Measure an arm trained on `problems`, however it was; keep what was trained in `folder`."""
    progress("evaluating", {})
    metrics, tallies = measured_at_end(bench)
    (receipt,) = divergences(policies, bench.board, bench.test)
    metrics |= gain(start.answers.estimates()["accuracy"], metrics["accuracy_greedy"])
    effects = _effects(bench) | result.effects
    effects["answers"] = tallies | {"accuracy_greedy_start": start.answers.tallies()}
    if receipt is not None:
        effects["kl_to_start"] = receipt
        metrics["kl_to_start"] = derived.kl_estimate(receipt)
    effects["trained_change_l2"] = _distance(bench.policy, start.parameters)
    effects["optimizer_steps"] = result.step
    effects["repeated_questions"] = repeat_counts(problems, bench.test)
    keep_policy(bench.policy, folder)
    return Measured(
        metrics=metrics,
        series={name: list(values) for name, values in result.series.items()},
        effects=effects,
        inputs=_inputs(bench) | {"train_problems": digest_of_problems(problems)},
    )


def divergences(
    policies: Policies,
    board: Board,
    test: Sequence[Problem],
    alive: Sequence[bool] | None = None,
) -> list[dict[str, Any] | None]:
    """Return each run's receipt of its KL to the start; None where the scale asks for none."""
    if not policies.runs[0].scale.evaluation.kl_to_start:
        return [None] * len(policies.runs)
    return log_ratios(policies, board, test, alive)


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


def measured_at_end(bench: Bench) -> tuple[dict[str, Estimate], dict[str, Any]]:
    """Ask the policy as it is at the end of a run.

    Returns
    -------
    metrics
        Of the answers, and the peak memory.
    tallies
        Of the grades behind them.
    """
    answers = bench.board.final(bench.test, bench.further)
    metrics = final_metrics(answers, at=bench.run.scale.evaluation.at)
    metrics["peak_bytes"] = Estimate(
        value=float(bench.tally.peak_bytes),
        unit="bytes",
        method="peak of the process during the run",
    )
    return metrics, final_tallies(answers)


def training_metrics(run: RunConfig, result: TrainResult) -> dict[str, Estimate]:
    """Return what a training run's series and receipts say in one number each."""
    evaluation = plain_values(run.scale.evaluation)
    return derived.training_metrics(result.series, result.effects, evaluation)


def _effects(bench: Bench) -> dict[str, Any]:
    """Return the receipts of the policy, its sampler and the graders."""
    effects = dict(bench.policy.effects)
    if bench.policy.device.type != "cpu":
        effects["sampler"] = type(bench.sampler).__name__
    if bench.micro_tokens is not None:
        effects["micro_tokens"] = bench.micro_tokens
    return effects | {
        "test_sets_left_out": left_out(bench.run, bench.further),
        "grades": bench.tally.grades,
        "grader_workers_killed": bench.tally.workers_killed,
    }


def left_out(run: RunConfig, further: Mapping[str, Sequence[Problem]]) -> list[str]:
    """Return the names of the scale's further test sets that could not be read here."""
    return [item.name for item in run.scale.test_sets if item.name not in further]


def inputs_of(
    run: RunConfig,
    effects: Mapping[str, Any],
    test: Sequence[Problem],
    further: Mapping[str, Sequence[Problem]],
) -> dict[str, str]:
    """Return the digests of what went into a run: checkpoint, problems, prompt template."""
    commit = resolved_revision(resolve(run.scale.checkpoint, run.scale.revision))
    template = template_named(run.scale.prompt_template)
    return {
        "checkpoint": checkpoint_digest(run.scale.checkpoint, effects, run.scale.revision),
        "test_problems": digest_of_problems(test),
        **{
            f"test_problems_{name}": digest_of_problems(problems)
            for name, problems in further.items()
        },
        "prompt_template": template.digest(),
        **({"checkpoint_revision": commit} if commit else {}),
    }


def checkpoint_digest(checkpoint: str, effects: Mapping[str, Any], revision: str = "") -> str:
    """Return the digest of a checkpoint's weights: as its loading found it, else of its files."""
    loaded_digest = effects.get("checkpoint_sha256")
    if loaded_digest:
        return str(loaded_digest)
    return digest_of_files(sorted(resolve(checkpoint, revision).glob("*.safetensors")))


def _inputs(bench: Bench) -> dict[str, str]:
    """Return the digests of what went into a run; see `inputs_of`."""
    return inputs_of(bench.run, bench.policy.effects, bench.test, bench.further)


def _distance(policy: Policy, start: dict[str, Tensor]) -> float:
    """Return the L2 norm of what is trained less its copies from the start."""
    now = trainable_parameters(policy)
    squares = [(now[name].detach().cpu() - start[name]).double().square().sum() for name in start]
    return float(torch.stack(squares).sum().sqrt())


def keep_policy(policy: Policy, folder: Path) -> None:
    """Write what was trained to `folder`, in place of what is there: `adapter/`, or `model/`."""
    if policy.training == "lora":
        shutil.rmtree(folder / "adapter", ignore_errors=True)
        write_probe(policy, save_adapter(policy, folder / "adapter"))
    else:
        shutil.rmtree(folder / "model", ignore_errors=True)
        write_merged(policy, folder / "model")
