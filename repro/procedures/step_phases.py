"""One GRPO step on a GPU, phase by phase: rollout, rewards, old log-probabilities, update.

Everything is what training does (engine, graders, packed passes, optimiser) but for the weights,
which are random, and so the reward that is trained on: graders read the completions' text and find
nothing right in it, so the `random` kind of reward gives the advantages.

Phases are timed by events on the device's own stream; rewards by the host's clock, as they run
beside the device's work. `idle` is the time between phases in which the device waited for them.

Easy mistakes
-------------
* Ending a phase by the host's clock without waiting for the device measures launches.
* The last reserved byte counts, not the last allocated one, and the driver's context beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from repro.data.generator import GeneratorConfig
from repro.data.load import load_problems
from repro.data.tiny_tokenizer import build_tokenizer
from repro.models.policy import Policy, trainable_parameters
from repro.reward.grader import GraderPool
from repro.reward.score import Rewards, score
from repro.rl.advantage import group_advantages
from repro.rl.optimizer import build_optimizer, gradient_step, set_learning_rate
from repro.rl.packed_step import accumulate_packed, evaluate_packed, split_rows
from repro.rl.rows import Rows, make_rows
from repro.rollout.engine import Engine
from repro.rollout.for_policy import CopySampler
from repro.rollout.sampler import Completion
from repro.spec.config import (
    GRPO,
    DataConfig,
    LearningRates,
    OptimizerConfig,
    SamplingConfig,
    derive_seed,
)
from repro.spec.step import StepPoint, StepScale

PHASES = ("rollout", "logprob", "update", "optimizer", "idle")
AFTER_THE_ROLLOUT = ("logprob", "update", "optimizer")
_LEARNING_RATE = 1e-5  # Table 4, LoRA on 4-bit weights
_FORMAT_REWARD = 0.2


@dataclass(slots=True, kw_only=True)
class Stepper:
    """A policy with all that a step needs.

    Attributes
    ----------
    policy, engine
        The engine samples from the policy's own weights, or from a 16-bit copy of float32 masters.
    point, scale
        What is measured.
    micro_tokens
        Tokens of a micro-batch; smaller after memory ran out.
    fallbacks
        Sizes with which memory ran out.
    """

    policy: Policy
    engine: Engine | CopySampler
    pool: GraderPool
    point: StepPoint
    scale: StepScale
    seed: int
    micro_tokens: int
    fallbacks: list[int]
    optimizer: torch.optim.Optimizer
    tokenizer: PreTrainedTokenizerBase
    golds: list[str]

    @classmethod
    def build(
        cls,
        policy: Policy,
        engine: Engine | CopySampler,
        pool: GraderPool,
        point: StepPoint,
        scale: StepScale,
        *,
        seed: int,
        micro_tokens: int,
    ) -> Stepper:
        """Return a stepper with a fresh optimiser."""
        rates = LearningRates(
            lora_16bit=_LEARNING_RATE, lora_4bit=_LEARNING_RATE, full=_LEARNING_RATE
        )
        config = OptimizerConfig(name=scale.optimizer, learning_rates=rates)
        optimizer = build_optimizer(trainable_parameters(policy), config)
        set_learning_rate(optimizer, _LEARNING_RATE)
        problems = load_problems(DataConfig(train_problems=point.prompts), "train")
        return cls(
            policy=policy,
            engine=engine,
            pool=pool,
            point=point,
            scale=scale,
            seed=seed,
            micro_tokens=micro_tokens,
            fallbacks=[],
            optimizer=optimizer,
            tokenizer=build_tokenizer(GeneratorConfig()),
            golds=[p.answer for p in problems for _ in range(point.group)],
        )

    def step(self, number: int) -> dict[str, Any]:
        """Carry out one step.

        Returns
        -------
        dict
            Seconds by phase, and `total`, `reward`, `grad_norm`; under `again` the seconds of the
            phases that were repeated on the same rollout (`StepScale.updates`).
        """
        clock = _Clock()
        sampled = self._rollout(number)
        clock.mark("rollout")
        rows, seeds = self._rows(sampled, number), self._seeds(number)
        warming = number < self.scale.warm_up
        if warming:
            # One micro-batch takes every kernel's turn; the others would repeat it.
            first = split_rows(rows, self.micro_tokens)[0]
            rows, seeds = rows.select(first), [seeds[row] for row in first.tolist()]
        part = torch.arange(len(rows))
        if self.point.memory_only:
            part = torch.cat(split_rows(rows, self.micro_tokens)[:2])
        taking_part = rows.select(part)
        with ThreadPoolExecutor(max_workers=1) as executor:
            future = executor.submit(self._reward, rows, seeds)
            clock.mark("idle")
            old = self._evaluate(taking_part, clock)
            rewards, seconds = _result(future)
        advantages = group_advantages(
            rewards.total, rows.prompt_of_row, scale_by_std=True, epsilon=GRPO.advantage_epsilon
        ).values[part]
        clock.mark("idle")
        norm = self._update(taking_part, advantages, old, clock)
        found: dict[str, Any] = clock.read()
        gap = (taking_part.sampled_logprobs - old).abs()
        gap = gap[taking_part.mask & (taking_part.sampled_logprobs != 0)]
        found["sampler_trainer_abs_diff_mean"] = float(gap.mean()) if len(gap) else 0.0
        found |= {"reward": seconds, "grad_norm": norm, "again": []}
        if not warming:
            for _ in range(self.scale.updates - 1):
                found["again"].append(self._again(taking_part, advantages))
        return found

    def _again(self, rows: Rows, advantages: Tensor) -> dict[str, float]:
        """Repeat what follows a rollout; return the seconds of its phases."""
        clock = _Clock()
        self._update(rows, advantages, self._evaluate(rows, clock), clock)
        found = clock.read()
        return {name: found[name] for name in AFTER_THE_ROLLOUT}

    def _evaluate(self, rows: Rows, clock: _Clock) -> Tensor:
        old = evaluate_packed(
            self.policy, rows, 1.0, micro_tokens=self.micro_tokens, fallbacks=self.fallbacks
        )
        clock.mark("logprob")
        return old

    def _update(self, rows: Rows, advantages: Tensor, old: Tensor, clock: _Clock) -> float:
        """Update the policy; return the gradient's norm."""
        done = accumulate_packed(
            self.policy,
            rows,
            advantages,
            GRPO,
            1.0,
            length_limit=self.point.completion_tokens,
            micro_tokens=self.micro_tokens,
            old_logprobs=old,
            checkpointing=self.point.checkpointing,
        )
        self.micro_tokens = done.micro_tokens
        self.fallbacks += done.fallbacks
        clock.mark("update")
        norm = gradient_step(self.optimizer, trainable_parameters(self.policy), max_grad_norm=1.0)
        self.engine.refresh()
        clock.mark("optimizer")
        return norm

    def _seeds(self, number: int) -> list[int]:
        return [derive_seed(self.seed, "step", number, row) for row in range(self.point.rows)]

    def _rollout(self, number: int) -> tuple[list[tuple[int, ...]], Sequence[Completion]]:
        point = self.point
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "prompts", number))
        vocabulary = self.policy.decoder.get_parameter("model.embed_tokens.weight").shape[0]
        # Below the special tokens, which lie at the end of the vocabulary.
        ids = torch.randint(
            0, vocabulary - 1024, (point.prompts, point.prompt_tokens), generator=generator
        )
        prompts = [tuple(row) for row in ids.tolist()]
        limit = point.sampled_tokens or point.completion_tokens
        if number < self.scale.warm_up:
            limit = min(limit, self.scale.warm_up_tokens)
        batch = self.engine.sample(
            prompts,
            SamplingConfig(max_new_tokens=limit),
            group_size=point.group,
            seeds=self._seeds(number),
        )
        return prompts, batch.completions

    def _rows(
        self, sampled: tuple[list[tuple[int, ...]], Sequence[Completion]], number: int
    ) -> Rows:
        """Return the rows, each completion filled up to its full length with random tokens."""
        prompts, completions = sampled
        missing = self.point.completion_tokens - len(completions[0].token_ids)
        if missing:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "filling", number))
            filling = torch.randint(0, 1000, (len(completions), missing), generator=generator)
            completions = [
                Completion(
                    token_ids=(*completion.token_ids, *more),
                    sampled_logprobs=(*completion.sampled_logprobs, *[0.0] * missing),
                    finish_reason="length",
                )
                for completion, more in zip(completions, filling.tolist(), strict=True)
            ]
        return make_rows(prompts, completions, group_size=self.point.group)

    def _reward(self, rows: Rows, seeds: list[int]) -> tuple[Rewards, float]:
        """Read and grade the completions, beside the device's work."""
        started = time.perf_counter()
        size = len(self.tokenizer)
        texts = [
            str(self.tokenizer.decode([token % size for token in row]))
            for row in rows.token_ids.tolist()
        ]
        golds = self.golds[: len(texts)]
        rewards = score(texts, golds, "random", _FORMAT_REWARD, self.pool, seeds)
        return rewards, time.perf_counter() - started


def _result(future: Future[tuple[Rewards, float]]) -> tuple[Rewards, float]:
    return future.result()


class _Clock:
    """Events between phases; a phase that occurs twice is summed."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._marks: list[tuple[str, Any]] = [("", self._event())]

    @staticmethod
    def _event() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, phase: str) -> None:
        """End the phase that began at the last mark."""
        self._marks.append((phase, self._event()))

    def read(self) -> dict[str, float]:
        """Return seconds by phase and `total`."""
        torch.cuda.synchronize()
        found = dict.fromkeys(PHASES, 0.0)
        for (_, begin), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            found[phase] += begin.elapsed_time(end) / 1e3
        first, last = self._marks[0][1], self._marks[-1][1]
        return found | {"total": first.elapsed_time(last) / 1e3}


def driver_bytes() -> int:
    """Return the device memory in use as the driver sees it, of all processes together."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def context_bytes() -> int:
    """Return what is in use on the device beyond the allocator's reserve."""
    return driver_bytes() - int(torch.cuda.memory_reserved())


def parameter_image(policy: Policy) -> Tensor:
    """Return a few values of every trained tensor, to see later that an update moved them."""
    return torch.cat(
        [parameter.detach().flatten()[:64] for parameter in trainable_parameters(policy).values()]
    ).clone()
