"""Configuration values: what the paper varies (an arm) and what the hardware varies (a scale).

An `Arm` and a scale (`TrainScale` and its siblings) have no field in common, so a contrast between
two arms is the same contrast at every scale. Learning rates, lengths and batch sizes belong to the
scale; formats, noise, loss and rank belong to the arm, whose module says how values are cited.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from repro.spec.arm import Arm, OptimizerName
from repro.spec.checks import Bound, Checked, Count, Natural, check_fields, check_value, require
from repro.spec.settings import OMIT_AT_DEFAULT, plain_values

Seeds = tuple[Natural, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Checked):
    """Where problems come from and how they are split.

    Attributes
    ----------
    source
        `generated`, a public data set's name (`gsm8k`, `bigmath`, `math500`, `aime24`, `aime25`,
        `amc23`), or a user's own: `folder:PATH`, `file:PATH`, `hub:OWNER/NAME`.
    columns
        Names of a user's own columns, such as `question=prompt,answer=solution`; empty takes the
        usual ones.
    levels
        Difficulty levels kept (the generator's steps, Big-Math's quintiles); empty keeps all.
    train_problems, test_problems, development_problems
        How many of each split are used; 0 takes all there are.
    seed
        Seed of the generator and of the order; the training order itself follows the run's seed.
    """

    source: str = "generated"
    columns: str = field(default="", metadata=OMIT_AT_DEFAULT)
    levels: tuple[int, ...] = ()
    train_problems: Natural = 0
    test_problems: Natural = 0
    development_problems: Natural = 0
    seed: int = 2025

    WHERE = "data."


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """A further set of problems on which the final policy is measured, as `accuracy_<name>`.

    Its longest prompt has `max_prompt_tokens`; 0 takes the scale's.
    """

    name: str
    data: DataConfig
    max_prompt_tokens: Natural = field(default=0, metadata=OMIT_AT_DEFAULT)

    def __post_init__(self) -> None:
        check_fields(self, f"test set {self.name}: ")
        require(
            self.name.isidentifier(), f"test set name {self.name!r} must be a Python identifier"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig(Checked):
    """How completions are drawn, of at most `max_new_tokens`, the end token included.

    Temperature 0 is greedy. Rollouts: 1.0 (Table 4). Evaluation: 0.6 (section 4.1). With `top_p`
    the smallest set of tokens with that mass is drawn from; 1 takes all. Evaluation: 0.95 (section
    4.1).
    """

    temperature: Annotated[float, Bound(least=0.01, most=100, or_zero=True)] = 1.0
    top_p: Annotated[float, Bound(above=0, most=1)] = 1.0
    max_new_tokens: Annotated[int, Bound(least=1, most=1e8)] = 64

    RETIRED: ClassVar = {"top_k": 0, "min_p": 0.0}

    @property
    def filtered(self) -> bool:
        """Whether tokens are removed before one is drawn."""
        return self.top_p < 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """How accuracy is measured, the same for every arm, trained or not.

    Attributes
    ----------
    every
        Steps between evaluations on the development split during training; 0 switches off.
    samples
        Completions per problem under `sampling` (mean pass@1 is reported over them).
    sampling
        "temperature 0.6, top_p 0.95, 4096 tokens, evaluated multiple times" (section 4.1);
        the number of times is not stated.
    test_at
        Steps after which the test split is answered as at the end, sampled and greedily; the end
        is tested in any case.
    until
        Percent of right greedy answers to the test split at which training ends, at one of
        `test_at`; these tests are greedy alone. 0 trains all steps.
    explored_samples, explored_problems
        Completions of each of so many test problems that the policy samples at the end as in
        rollouts, for pass@k and its entropy; 0 samples takes none.
    prompts_of_steps
        Steps whose prompts an untrained arm samples once, by the seeds with which a trained arm
        samples them; 0 takes none.
    token_budget
        Sampled training tokens over which the area under the held-out accuracy is taken; 0 takes
        none.
    at
        Each k for which pass@k and maj@k are estimated from a problem's samples, mean@samples
        beside them; at most `samples`.
    threshold
        Percent of right completions in training at which a run has taken off; with it a run shows
        what was sampled in each step, and how fast, how far and how steadily it learnt. 0 asks
        for none of it.
    """

    every: Natural = 0
    samples: Annotated[int, Bound(least=1, most=65_536)] = 1
    sampling: SamplingConfig = SamplingConfig(temperature=0.6, top_p=0.95)
    test_at: tuple[Count, ...] = field(default=(), metadata=OMIT_AT_DEFAULT)
    until: Annotated[float, Bound(least=0, most=100)] = field(default=0.0, metadata=OMIT_AT_DEFAULT)
    explored_samples: Annotated[int, Bound(least=0, most=65_536)] = field(
        default=0, metadata=OMIT_AT_DEFAULT
    )
    explored_problems: Count = field(default=200, metadata=OMIT_AT_DEFAULT)
    prompts_of_steps: Natural = field(default=0, metadata=OMIT_AT_DEFAULT)
    token_budget: Natural = field(default=0, metadata=OMIT_AT_DEFAULT)
    at: tuple[int, ...] = field(default=(), metadata=OMIT_AT_DEFAULT)
    threshold: Annotated[float, Bound(least=0, most=100)] = field(
        default=0.0, metadata=OMIT_AT_DEFAULT
    )

    def __post_init__(self) -> None:
        check_fields(self, "evaluation.")
        for step, before in zip(self.test_at, (0, *self.test_at), strict=False):
            require(
                step > before,
                f"evaluation.test_at is {self.test_at}; its steps must rise, from 1 on",
            )
        for k in self.at:
            require(
                1 <= k <= self.samples,
                f"evaluation.at names k = {k}; with {self.samples} samples per problem it must lie "
                f"in [1, {self.samples}]",
            )


# AdamW's step is as large as its rate, so at most 1. What a scale trains in no arm may have 0.
_TRAINING = Bound(least=1e-12, most=1)
LearningRate = Annotated[float, replace(_TRAINING, or_zero=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRates(Checked):
    """Peak learning rates by what is trained: "1e-5 (QeRL, QLoRA); 5e-6 (LoRA)" (Table 4).

    The rate of full training is not stated in the paper. Arms that train the same thing on weights
    of the same width share a rate, so that added noise, rank, loss or reward is all in which they
    differ.
    """

    lora_16bit: LearningRate
    lora_4bit: LearningRate
    full: LearningRate

    WHERE = "optimizer.learning_rates."

    def of(self, arm: Arm) -> float:
        """Return the peak learning rate of `arm`, its factor included."""
        rate: float = getattr(self, self.name_of(arm))
        return rate * arm.learning_rate_factor

    @staticmethod
    def name_of(arm: Arm) -> str:
        """Return which of the rates is that of `arm`."""
        if arm.training == "full":
            return "full"
        return "lora_16bit" if arm.weight_format == "bf16" else "lora_4bit"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig(Checked):
    """AdamW: "AdamW-8bit" (Table 4); betas, decay, warm-up and clipping are not in the paper.

    `schedule` after the warm-up is `constant` or `cosine` to zero at the last step.
    """

    name: OptimizerName = "adamw"
    learning_rates: LearningRates
    beta1: Annotated[float, Bound(least=0, below=1)] = 0.9
    beta2: Annotated[float, Bound(least=0, below=1)] = 0.99
    weight_decay: Annotated[float, Bound(least=0, most=1)] = 0.0
    warmup_steps: Natural = 0
    schedule: Literal["constant", "cosine"] = "constant"
    max_grad_norm: Annotated[float, Bound(least=1e-6)] = 1.0

    WHERE = "optimizer."


# A forced opening makes a prompt longer than its own limit by no more than this.
OPENING_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainScale:
    """How large a training run is on one tier of hardware.

    Attributes
    ----------
    checkpoint, revision
        `tiny` (in the package), a folder, or a hub name; and of a hub name the branch, tag or
        commit. A record names the commit that was loaded.
    steps
        Optimiser steps. One rollout batch serves `updates_per_rollout` of them.
    prompts_per_rollout, group_size
        P and G; a rollout has B = P * G rows. Table 4: 128 and 8 (GSM8K), 128 and 16 (BigMath).
    updates_per_rollout
        4 on GSM8K, 1 on BigMath (Table 4); the released scripts use 1.
    micro_batch_rows
        A micro-batch has at most the tokens of this many rows of the step's longest length; changes
        memory, never the gradient, except that `token_mean_local` takes a mean over this many rows.
        A published model on a GPU takes as many tokens as its device holds instead.
    compute_dtype
        Dtype of activations; master weights of what is trained are float32 at every tier.
    checkpoint_every
        Steps between resumable checkpoints.
    test_sets
        Further sets on which the final policy is measured.
    accuracy_over
        What `accuracy` is: that of the test split of `data` (`split`), or the plain mean over the
        further test sets (`sets`), where what is trained on has no test split.
    permuted
        Whether each seed has an order of channels of its own: the same function, and another draw
        of every rounding.
    sampler
        What samples rollouts and answers to questions: `own` engine, or `vllm` (docs/scale.md).
    """

    checkpoint: str
    revision: str = field(default="", metadata=OMIT_AT_DEFAULT)
    data: DataConfig
    steps: Natural
    prompts_per_rollout: Annotated[int, Bound(least=1, most=1e9)]
    group_size: Annotated[int, Bound(least=1, most=4096)]
    updates_per_rollout: Count = 1
    micro_batch_rows: Count = 64
    max_prompt_tokens: Annotated[int, Bound(least=1, most=1e8)] = 256
    rollout: SamplingConfig = SamplingConfig()
    optimizer: OptimizerConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    prompt_template: str = "paper"
    format_reward: Annotated[float, Bound(least=0, most=1)] = 0.2
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    checkpoint_every: Count = 10
    test_sets: tuple[ProblemSet, ...] = field(default=(), metadata=OMIT_AT_DEFAULT)
    accuracy_over: Literal["split", "sets"] = field(default="split", metadata=OMIT_AT_DEFAULT)
    permuted: bool = field(default=False, metadata=OMIT_AT_DEFAULT)
    sampler: Literal["own", "vllm"] = field(default="own", metadata=OMIT_AT_DEFAULT)
    seeds: Seeds = (0, 1, 2, 3, 4)

    def __post_init__(self) -> None:
        check_fields(self)
        rows = self.prompts_per_rollout * self.group_size
        require(
            rows % self.updates_per_rollout == 0,
            f"a rollout of {rows} rows does not split into {self.updates_per_rollout} updates",
        )
        warm_up = self.optimizer.warmup_steps
        require(
            self.steps == 0 or warm_up <= self.steps,
            f"optimizer.warmup_steps is {warm_up}; with {self.steps} steps it must be at most "
            f"{self.steps}, or the learning rate is never reached (--steps cuts both)",
        )
        require(
            self.accuracy_over == "split" or bool(self.test_sets),
            "accuracy_over is sets; it needs test_sets",
        )
        late = [step for step in self.evaluation.test_at if step >= self.steps]
        require(
            not late,
            f"evaluation.test_at names step {late[:1]}; the run has {self.steps}, and its end is "
            "tested in any case",
        )
        require(
            self.accuracy_over == "split"
            or not (self.evaluation.test_at or self.evaluation.explored_samples),
            "evaluation.test_at and evaluation.explored_samples answer the test split; "
            "accuracy_over must be split",
        )
        every, held_out = self.evaluation.every, self.data.development_problems
        require(
            every == 0 or held_out >= 1,
            f"evaluation.every is {every} and data.development_problems {held_out}; asking a "
            "development split during training needs 1 or more problems held out",
        )

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, in training and in every test set."""
        return max(self.max_prompt_tokens, *(item.max_prompt_tokens for item in self.test_sets), 0)

    @property
    def longest_completion(self) -> int:
        """Tokens of the longest completion, in training and in evaluation."""
        return max(self.rollout.max_new_tokens, self.evaluation.sampling.max_new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainScale(Checked):
    """Pre-training of a policy from scratch, by a recipe that the procedure holds.

    `recipe_version` moves whenever the recipe would give another policy. The `threads` of torch on
    a CPU are part of what decides the result's bits.
    """

    recipe_version: int = 1
    threads: Annotated[int, Bound(least=1, most=1024)] = 2
    seeds: Seeds = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationScale(Checked):
    """Timing of single operations on the shapes of real models, with random weights.

    Attributes
    ----------
    blocks
        Decoder blocks whose four linear layers are summed ("7b", "32b").
    rows
        M of the forward products.
    backward_rows
        M of the gradients with respect to x.
    adapter_rows
        M at which a fused adapter of rank `adapter_rank` is timed.
    replays
        Timed replays of a graph; the median counts.
    """

    blocks: tuple[str, ...] = ("7b", "32b")
    rows: tuple[Count, ...] = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    backward_rows: tuple[Count, ...] = (2048, 4096, 8192)
    adapter_rows: tuple[Count, ...] = (1, 8, 32, 64, 256)
    adapter_rank: Count = 32
    replays: Count = 9
    seeds: Seeds = (0, 1, 2, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides one run's result: target, tier, procedure, arm, scale and seed."""

    target: str
    target_version: int
    tier: str
    procedure: str
    arm: Arm
    scale: Any
    seed: Natural

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            is_dataclass(self.scale) and not isinstance(self.scale, type),
            f"scale is {type(self.scale).__name__}; needs the settings of a tier",
        )
        require(
            self.arm.training == "lora" or not self.arm.norms_trained,
            f"arm {self.arm.name}: norms_trained adds norm gains to LoRA's parameters; training is "
            f"{self.arm.training!r}, and must be lora",
        )
        if isinstance(self.scale, TrainScale) and self.procedure in ("train", "dose"):
            _require_sampled(self)
            if self.procedure == "train":
                _require_trained(self)

    @property
    def rollout(self) -> SamplingConfig:
        """How completions of training are drawn: the scale's way, at the arm's temperature."""
        sampling: SamplingConfig = self.scale.rollout
        factor = self.arm.temperature_factor
        return replace(sampling, temperature=sampling.temperature * factor)

    def resolved(self) -> dict[str, Any]:
        """Return the whole configuration as plain JSON values, sorted by the writer."""
        values: dict[str, Any] = plain_values(self)
        return values

    def digest(self) -> str:
        """Return the SHA-256 hex digest of the resolved configuration, the seed included."""
        return digest_of(self.resolved())


def _require_sampled(run: RunConfig) -> None:
    """Raise `ValueError` unless completions are draws from the policy's whole distribution."""
    where, drawn = f"arm {run.arm.name}: ", run.rollout
    require(
        drawn.temperature > 0,
        f"{where}rollout.temperature is {drawn.temperature}; rollouts are draws, so it must be "
        "above 0",
    )
    require(
        not drawn.filtered,
        f"{where}rollouts use top_p {drawn.top_p}; the trainer's log-probabilities are of the full "
        "softmax, so it must be 1",
    )


def _require_trained(run: RunConfig) -> None:
    """Raise `ValueError` where a run would end without training what its arm trains."""
    where, arm, scale = f"arm {run.arm.name}: ", run.arm, run.scale
    require(arm.training != "none", f"{where}training is 'none'; to train it must be lora or full")
    require(scale.steps >= 1, f"{where}steps is 0; to train it must be 1 or more")
    require(
        scale.group_size >= 2,
        f"{where}group_size is {scale.group_size}; a reward is compared with the others of its "
        "group, so it must be 2 or more",
    )
    rates, factor = scale.optimizer.learning_rates, arm.learning_rate_factor
    by_factor = f" times arm.learning_rate_factor {factor:g}" if factor != 1 else ""
    path = f"{where}optimizer.learning_rates.{rates.name_of(arm)}{by_factor}"
    check_value(rates.of(arm), Annotated[float, _TRAINING], path)


def digest_of(value: Any) -> str:
    """Return the SHA-256 hex digest of a JSON-able value in its canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


# Runs side by side that share a seed ask for the same streams; 1, 1.0 and True are three names.
@functools.lru_cache(maxsize=65_536, typed=True)
def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on every part, by name: `derive_seed(seed, "noise", step)`.

    Random streams are derived by name rather than drawn from one generator, so that switching one
    of them on (added noise, say) leaves all others where they were.
    """
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
