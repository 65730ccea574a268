"""Measures checkpoints of a policy as they were written, on the device where it was trained."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from repro.evaluate.asking import Alone, Asker, Evaluator, Stacked
from repro.evaluate.quality import Manner, Quality, measure_habits, measure_quality
from repro.models.policy import Policy, end_token_ids, load_policy
from repro.pretrain.material import Material
from repro.reward.grader import GraderPool
from repro.rl.stacked.sampler import StackSampler
from repro.rl.stacked.stack import stack_policies
from repro.rl.torch_sampler import TorchSampler
from repro.spec.arm import WeightFormat
from repro.spec.config import OPENING_TOKENS

# On a GPU: completions sampled at once.
_ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Examination:
    """Questions to checkpoints of one material.

    Attributes
    ----------
    seed
        Of the problems and completions.
    """

    material: Material
    pool: GraderPool
    seed: int
    device: torch.device

    def quality(self, folder: Path, problems: int) -> Quality:
        """Measure a 16-bit checkpoint on generated problems, and on the human-written ones."""
        manner, asked = self.material.manner, self.material.problems(problems)
        evaluator = self._evaluator(self._load(folder, "bf16"))
        quality = measure_quality(evaluator, manner, asked, self.material.human.asked)
        del evaluator
        self._free()
        return quality

    def habits(self, folder: Path, weight_format: WeightFormat, problems: int) -> dict[str, Any]:
        """Measure a checkpoint's greedy answers alone, in a weight format."""
        began = time.perf_counter()
        policy = self._load(folder, weight_format)
        error = policy.effects["relative_weight_error_mean"]
        evaluator = self._evaluator(policy)
        asked = self.material.problems(problems)
        habits = measure_habits(evaluator, self.material.manner, asked)
        del policy, evaluator
        self._free()
        seconds = time.perf_counter() - began
        return habits | {"relative_weight_error_mean": error, "seconds": seconds}

    def _load(self, folder: Path, weight_format: WeightFormat) -> Policy:
        return load_policy(
            folder,
            weight_format=weight_format,
            compute_dtype="float32" if self.device.type == "cpu" else "bfloat16",
            device=self.device,
            recipe="float32",
        )

    def _evaluator(self, policy: Policy) -> Evaluator:
        asker = asker_of(policy, self.material.manner)
        return Evaluator(asker, self.material.tokenizer, self.pool, [self.seed], "quality")

    def _free(self) -> None:
        """Give back a measured policy's memory."""
        # Captured graphs keep their memory until the last reference, cycles included, is gone.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def asker_of(policy: Policy, manner: Manner) -> Asker:
    """Return what asks one policy where it is: on a GPU the sampler of its tier, a stack of one."""
    if policy.device.type == "cpu":
        return Alone(TorchSampler(policy))
    return stacked_alone(policy, manner)


def stacked_alone(policy: Policy, manner: Manner) -> Stacked:
    """Return what asks one untrained policy as a stack of one."""
    stack = stack_policies([policy], end_token_ids=end_token_ids(policy), device=policy.device)
    positions = manner.max_prompt_tokens + OPENING_TOKENS + manner.max_new_tokens
    return Stacked(StackSampler(stack, positions), _ROWS_AT_ONCE)
