"""The trainer at a measured point: its own iteration, under a clock, on random weights.

What is timed is `repro.rl.trainer.iterate`, the step of every tier. Four of its parts are of the
measurement's own making: prompts of random tokens; completions that end at their limit alone, one
for all rows or one for each, of which a point of memory samples the first tokens; a grader whose
verdict is not used, since random weights never answer right; and a clock that records an event on
the device at each mark.

Every second completion is paid, so no group's rewards are equal and no row is idle: the update is
the largest that a rollout of this size can ask for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from repro.data.load import load_problems
from repro.data.problem import Problem
from repro.data.tiny_tokenizer import build_tokenizer
from repro.distributed import ALONE, EXCHANGE, Ranks
from repro.models.policy import Policy, trainable_parameters
from repro.reward.grader import GraderPool
from repro.reward.score import Graded, GradingRequest, score
from repro.rl.clock import PHASES, Clock, Phase
from repro.rl.collect import PromptSource, Score
from repro.rl.learner import learner_of
from repro.rl.micro_batches import split_by_tokens
from repro.rl.rows import Rows
from repro.rl.trainer import Training, everything, iterate
from repro.rl.training_state import TrainState
from repro.rollout.sampler import Completion, Sampler
from repro.spec.arm import Arm
from repro.spec.config import (
    DataConfig,
    LearningRates,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TrainScale,
    derive_seed,
)
from repro.spec.step_scale import StepPoint, StepScale

_LEARNING_RATE = 1e-5  # Table 4, LoRA on 4-bit weights
# Special tokens lie at the end of the vocabulary.
_SPECIAL_TOKENS = 1024
_FILLING_TOKENS = 1000


def training_of(
    policy: Policy,
    sampler: Sampler,
    pool: GraderPool,
    arm: Arm,
    point: StepPoint,
    scale: StepScale,
    *,
    seed: int,
    micro_tokens: int,
    kept_blocks: int = 0,
    ranks: Ranks = ALONE,
) -> Training:
    """Return what the trainer's iterations at a point work on, with a fresh optimiser.

    `micro_tokens` are the packed tokens of a micro-batch to begin with; `ranks` share the point's
    prompts and passes.
    """
    rates = LearningRates(lora_16bit=_LEARNING_RATE, lora_4bit=_LEARNING_RATE, full=_LEARNING_RATE)
    trained = TrainScale(
        checkpoint=f"random weights, {point.model}",
        data=DataConfig(train_problems=point.prompts),
        steps=scale.warm_up + scale.steps,
        prompts_per_rollout=point.prompts,
        group_size=point.group,
        max_prompt_tokens=point.prompt_tokens,
        rollout=SamplingConfig(max_new_tokens=point.completion_tokens),
        optimizer=OptimizerConfig(name=scale.optimizer, learning_rates=rates),
    )
    run = RunConfig(
        target="step",
        target_version=1,
        tier="systems",
        procedure="step_time",
        arm=arm,
        scale=trained,
        seed=seed,
    )
    learner = learner_of(
        run, policy, sampler, micro_tokens=micro_tokens, kept_blocks=kept_blocks, ranks=ranks
    )
    whole = PointSampler(inner=learner.sampler, point=point)
    learner = dataclasses.replace(learner, sampler=whole)
    return Training(
        learner=learner,
        source=RandomPrompts(policy, point, seed),
        score=paid_evenly(run, pool),
        # The second micro-batch meets the first one's gradients: that is the peak.
        taking_part=first_micro_batches(2, micro_tokens) if point.memory_only else everything,
    )


def warm_up(t: Training, state: TrainState, tokens: int) -> None:
    """Make a step that samples `tokens` of each row and updates on one micro-batch.

    One micro-batch takes every kernel's turn; the others would repeat it. Spread rows are sampled
    to their ends: as they leave, decode steps narrow, and each width is captured when first met.
    """
    learner, sampler = t.learner, t.learner.sampler
    assert learner.micro_tokens is not None
    assert isinstance(sampler, PointSampler)
    if sampler.point.lengths != "spread":
        most = min(tokens, sampler.point.completion_tokens)
        brief_point = dataclasses.replace(sampler.point, sampled_tokens=most)
        sampler = dataclasses.replace(sampler, point=brief_point)
    brief = dataclasses.replace(
        t,
        learner=dataclasses.replace(learner, sampler=sampler),
        taking_part=first_micro_batches(1, learner.micro_tokens),
    )
    iterate(brief, state)


def timed_step(t: Training, state: TrainState, waves: int = 1) -> dict[str, Any]:
    """Make one of the trainer's iterations under the device's clock.

    `waves` iterations like it make up the step, so seconds and tokens are multiplied by that.
    Returns seconds by phase, in `total` and in `exchange` among ranks, the step's `grad_norm` and
    `completion_tokens`; where time is measured, also `sampler_trainer_abs_diff_mean` and
    `sampler_trainer_kl`, in nats.
    """
    before = state.facts.get("rows", {}).get("tokens_sampled", 0)
    spent = t.learner.ranks.spent
    clock, exchanged = EventClock(), spent.get(EXCHANGE, 0.0)
    iterate(dataclasses.replace(t, clock=clock), state)
    measured: dict[str, Any] = clock.read()
    measured["exchange"] = spent.get(EXCHANGE, 0.0) - exchanged
    measured["completion_tokens"] = state.facts["rows"]["tokens_sampled"] - before
    measured = {name: waves * value for name, value in measured.items()}
    names = ["grad_norm"]
    sampler = t.learner.sampler
    if isinstance(sampler, PointSampler) and not sampler.point.memory_only:
        names += ["sampler_trainer_abs_diff_mean", "sampler_trainer_kl"]
    return measured | {name: state.series[name][-1] for name in names}


def first_micro_batches(count: int, micro_tokens: int) -> Callable[[Rows], Tensor]:
    """Return a choice of the rows of the first micro-batches."""

    def choose(rows: Rows) -> Tensor:
        return torch.cat(split_by_tokens(rows, everything(rows), micro_tokens)[:count])

    return choose


def paid_evenly(run: RunConfig, pool: GraderPool) -> Score:
    """Return a score function that grades as training does, and pays every second completion."""

    def rewards(requests: Sequence[GradingRequest]) -> list[Graded]:
        graded = score(requests, run.arm.reward, run.scale.format_reward, pool)
        return [dataclasses.replace(one, unshaped=float(i % 2)) for i, one in enumerate(graded)]

    return rewards


class RandomPrompts(PromptSource):
    """Prompts of random tokens in place of generated problems, whose answers are the golds."""

    def __init__(self, policy: Policy, point: StepPoint, seed: int) -> None:
        self.problems = load_problems(DataConfig(train_problems=point.prompts), "train")
        self.tokenizer = build_tokenizer()
        self._vocabulary = policy.decoder.get_parameter("model.embed_tokens.weight").shape[0]
        self._length, self._seed = point.prompt_tokens, seed

    def draw(self, batch: int) -> list[Problem]:
        """Return the batch's problems, under ids of its own."""
        return [
            dataclasses.replace(problem, id=f"{batch}/{problem.id}") for problem in self.problems
        ]

    def prompt(self, problem: Problem) -> list[int]:
        """Return tokens that depend on the seed and the problem's id."""
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "prompts", problem.id))
        highest = self._vocabulary - _SPECIAL_TOKENS
        return torch.randint(0, highest, (self._length,), generator=generator).tolist()

    def texts(
        self, completions: Sequence[Completion], prompts: Sequence[Sequence[int]]
    ) -> list[str]:
        """Return texts as long as the completions' would be."""
        del prompts
        size = len(self.tokenizer)
        ids = [[token % size for token in completion.token_ids] for completion in completions]
        return list(self.tokenizer.batch_decode(ids))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PointSampler:
    """Samples completions of a point's lengths: the first tokens, the rest filled at random.

    Rows of `inner` end at their limit alone.
    """

    inner: Any
    point: StepPoint

    def refresh(self) -> None:
        """Pass on."""
        self.inner.refresh()

    def sample(
        self, prompts: Any, sampling: SamplingConfig, *, seeds: Sequence[int], **of_rows: Any
    ) -> list[Completion]:
        """Sample rows; see `Sampler.sample`. The log-probability of a token filled in is 0."""
        lengths = self.point.drawn_lengths(seeds[0])
        most = min(self.point.sampled_tokens or sampling.max_new_tokens, max(lengths))
        brief = dataclasses.replace(sampling, max_new_tokens=most)
        if self.point.lengths == "spread":
            of_rows["limits"] = [min(length, most) for length in lengths]
        completions: list[Completion] = self.inner.sample(prompts, brief, seeds=seeds, **of_rows)
        if max(lengths) == most:
            return completions
        generator = torch.Generator().manual_seed(derive_seed(seeds[0], "filling"))
        shape = (len(lengths), max(lengths) - most)
        filling = torch.randint(0, _FILLING_TOKENS, shape, generator=generator).tolist()
        return [
            Completion(
                token_ids=(*completion.token_ids, *more[: max(0, length - most)]),
                sampled_logprobs=(*completion.sampled_logprobs, *[0.0] * max(0, length - most)),
                finish_reason="length",
            )
            for completion, more, length in zip(completions, filling, lengths, strict=True)
        ]


class EventClock(Clock):
    """Events on the device's own stream between phases; a phase that occurs twice is summed."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._marks: list[tuple[str, Any]] = [("", self._event())]

    @staticmethod
    def _event() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, phase: Phase) -> None:
        """End the phase that began at the last mark."""
        self._marks.append(("update" if phase == "logprobs" else phase, self._event()))

    def read(self) -> dict[str, float]:
        """Return seconds by phase and `total`."""
        torch.cuda.synchronize()
        seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for (_, begin), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[phase] += begin.elapsed_time(end) / 1e3
        first, last = self._marks[0][1], self._marks[-1][1]
        return seconds | {"total": first.elapsed_time(last) / 1e3}


def parameter_image(policy: Policy) -> Tensor:
    """Return a few values of every trained tensor, to see later that an update moved them."""
    return torch.cat(
        [parameter.detach().flatten()[:64] for parameter in trainable_parameters(policy).values()]
    ).clone()
