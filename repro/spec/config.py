"""Configuration values: what the paper varies (an arm) and what the hardware varies (a scale).

An `Arm` and a scale (`TrainScale` and its siblings) have no field in common, so a contrast between
two arms is the same contrast at every scale. Everything is frozen; a variant is a
`dataclasses.replace` away. Learning rates, lengths and batch sizes belong to the scale; formats,
noise, loss and rank belong to the arm.

Places in the paper (arXiv 2510.11696v1) stand beside each constant; where it is silent, that is
said.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

WeightFormat = Literal["bf16", "nf4", "mxfp4", "nvfp4"]
Training = Literal["none", "lora", "full"]
NoiseSchedule = Literal["exponential", "linear", "cosine", "logarithmic"]
NoiseForm = Literal["as_described", "as_released", "as_published"]
NoiseReach = Literal["rollout", "shared"]
RewardKind = Literal["task", "random", "format"]
Aggregation = Literal["sequence_mean", "token_mean", "token_mean_local", "constant"]
RatioLevel = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]
OldPolicy = Literal["trainer", "sampler"]

WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_choice(name: str, value: object, choices: object) -> None:
    """Raise `ValueError` unless `value` is one of the literal type's choices."""
    allowed = get_args(choices)
    require(
        value in allowed, f"{name} is {value!r}; it must be one of {', '.join(map(str, allowed))}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseConfig:
    """Adaptive quantisation noise (AQN): Gaussian noise added to the gains of RMSNorm.

    Attributes
    ----------
    schedule
        How sigma falls over the stages (Fig. 9, Fig. 15; Eq. 8 is the exponential one).
    sigma_start, sigma_end
        Standard deviations of the first and last noisy stage. "Noise range 1e-2 to 5e-4" (Table 4);
        section 4.1 says 5e-2 to 5e-4.
    num_stages
        K, stage 0 being without added noise. K = 10 on GSM8K; not stated for BigMath.
    form
        `as_described`: Eq. 8 and Eq. 10, float32, the two norms of every block, redrawn each step.
        `as_released`: the released scheduler's exponents and stage rule, rounded to bfloat16, the
        final norm included, as it would act if its type test matched.
        `as_published`: the released code as it runs with vLLM's own RMSNorm: nothing is touched.
    reach
        `rollout`: only the sampler sees the noise (Fig. 2). `shared`: the trainer's
        log-probabilities see the same noise.
    """

    schedule: NoiseSchedule = "exponential"
    sigma_start: float = 1e-2
    sigma_end: float = 5e-4
    num_stages: int = 10
    form: NoiseForm = "as_described"
    reach: NoiseReach = "rollout"

    def __post_init__(self) -> None:
        require_choice("noise.schedule", self.schedule, NoiseSchedule)
        require_choice("noise.form", self.form, NoiseForm)
        require_choice("noise.reach", self.reach, NoiseReach)
        require(
            0 < self.sigma_end <= self.sigma_start,
            f"noise sigma falls from {self.sigma_start} to {self.sigma_end}; "
            "it needs 0 < sigma_end <= sigma_start",
        )
        require(
            self.num_stages >= 3, f"noise.num_stages is {self.num_stages}; it must be 3 or more"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """One policy-gradient objective; GRPO, DAPO, Dr. GRPO and GSPO are values of it.

    Attributes
    ----------
    scale_by_std
        Divide (r - mean) by the group's standard deviation (ddof = 1) plus `advantage_epsilon`.
    aggregation
        `sequence_mean` (GRPO, Eq. 3), `token_mean` over the whole optimiser step (DAPO),
        `token_mean_local` over each micro-batch (the released code's "bnpo"),
        `constant` (Dr. GRPO: divided by rows times the length limit).
    ratio
        `token` or `sequence` (GSPO's length-normalised ratio).
    clip_low, clip_high
        The ratio is clipped to [1 - clip_low, 1 + clip_high]: "0.2 / 0.28" (Table 4).
    dual_clip
        For negative advantages, an upper bound of the loss at `dual_clip * |A|`; None switches off.
    beta, kl_estimator
        KL penalty against the reference policy: "no entropy loss and no KL loss" (App. E), so 0.
    old_policy
        What the ratio divides by: the `trainer`'s own clean log-probabilities at rollout time
        (released code) or the `sampler`'s, noise included (Algorithm 1 as written).
    importance_cap
        Truncated importance sampling between sampler and trainer: weights min(pi_old/mu, cap)
        without gradient; None switches off (paper and released code).
    mask_truncated
        Completions that hit the length limit get no loss (DAPO's overlong filtering).
    overlong_buffer
        Fraction of the length limit over which DAPO's soft length penalty grows to -1; 0 is off.
    dynamic_sampling
        Most rollout batches drawn per step while replacing groups whose accuracy is all 0 or all 1;
        0 is off.
    """

    name: str = "grpo"
    scale_by_std: bool = True
    advantage_epsilon: float = 1e-4
    aggregation: Aggregation = "sequence_mean"
    ratio: RatioLevel = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    beta: float = 0.0
    kl_estimator: KLEstimator = "k3"
    old_policy: OldPolicy = "trainer"
    importance_cap: float | None = None
    mask_truncated: bool = False
    overlong_buffer: float = 0.0
    dynamic_sampling: int = 0

    def __post_init__(self) -> None:
        require_choice("loss.aggregation", self.aggregation, Aggregation)
        require_choice("loss.ratio", self.ratio, RatioLevel)
        require_choice("loss.kl_estimator", self.kl_estimator, KLEstimator)
        require_choice("loss.old_policy", self.old_policy, OldPolicy)
        require(0 < self.clip_low < 1, f"loss.clip_low is {self.clip_low}; it must lie in (0, 1)")
        require(self.clip_high > 0, f"loss.clip_high is {self.clip_high}; it must be positive")
        require(self.beta >= 0, f"loss.beta is {self.beta}; it must not be negative")
        require(
            self.dual_clip is None or self.dual_clip > 1,
            f"loss.dual_clip is {self.dual_clip}; it must be greater than 1 or None",
        )
        require(
            self.importance_cap is None or self.importance_cap > 0,
            f"loss.importance_cap is {self.importance_cap}; it must be positive or None",
        )
        require(
            0 <= self.overlong_buffer < 1,
            f"loss.overlong_buffer is {self.overlong_buffer}; it must lie in [0, 1)",
        )
        require(
            self.dynamic_sampling >= 0,
            f"loss.dynamic_sampling is {self.dynamic_sampling}; it must not be negative",
        )


GRPO = LossConfig()
DAPO = LossConfig(
    name="dapo",
    aggregation="token_mean",
    mask_truncated=True,
    overlong_buffer=0.2,
    dynamic_sampling=3,
)
# The released scripts call this "equals to DAPO": a local token mean and overlong filtering only.
RELEASED_BNPO = LossConfig(name="bnpo", aggregation="token_mean_local", mask_truncated=True)
DR_GRPO = LossConfig(name="dr_grpo", scale_by_std=False, aggregation="constant")
# Clip range of order 3e-4 / 4e-4 as GSPO's authors give it: a sequence ratio moves far less.
GSPO = LossConfig(name="gspo", ratio="sequence", clip_low=3e-4, clip_high=4e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One row of a table: what the paper compares.

    Attributes
    ----------
    name
        Stable identifier, used in paths and expectations (`nvfp4_lora_aqn`).
    label
        What the report prints.
    weight_format, training
        Base weights of the seven projections; what is trained on top of them.
    lora_rank, lora_alpha
        "r = 32" (section 4.1); alpha is not stated in the paper, the released code has alpha = r.
    norms_trained
        The paper trains LoRA alone; the released code also trains both block norms.
    learning_rate_factor
        Multiplies the scale's learning rate (Fig. 16, Fig. 17).
    """

    name: str
    label: str
    weight_format: WeightFormat = "bf16"
    training: Training = "lora"
    lora_rank: int = 32
    lora_alpha: float = 32.0
    norms_trained: bool = False
    noise: NoiseConfig | None = None
    loss: LossConfig = GRPO
    reward: RewardKind = "task"
    learning_rate_factor: float = 1.0

    def __post_init__(self) -> None:
        require(self.name.isidentifier(), f"arm name {self.name!r} must be a Python identifier")
        require_choice(f"arm {self.name}: weight_format", self.weight_format, WeightFormat)
        require_choice(f"arm {self.name}: training", self.training, Training)
        require_choice(f"arm {self.name}: reward", self.reward, RewardKind)
        require(
            self.lora_rank >= 1,
            f"arm {self.name}: lora_rank is {self.lora_rank}; it must be 1 or more",
        )
        require(
            not (self.training == "full" and self.weight_format != "bf16"),
            f"arm {self.name}: full training of {self.weight_format} weights is not defined; "
            "full training needs bf16",
        )
        require(
            not (self.training == "none" and self.noise is not None),
            f"arm {self.name}: an untrained arm takes no added noise",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where problems come from and how they are split.

    Attributes
    ----------
    source
        `generated`, a public data set's name (`gsm8k`, `bigmath`, `math500`, `aime24`, `aime25`,
        `amc23`) or `folder:<path>` for local JSONL.
    levels
        Difficulty levels kept (the generator's steps, or Big-Math's quintiles); empty keeps all.
    train_problems, test_problems, development_problems
        How many of each split are used; 0 takes all there are.
    seed
        Seed of the generator and of the order; the training order itself follows the run's seed.
    """

    source: str = "generated"
    levels: tuple[int, ...] = ()
    train_problems: int = 0
    test_problems: int = 0
    development_problems: int = 0
    seed: int = 2025


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How completions are drawn.

    Attributes
    ----------
    temperature
        0 is greedy. Rollouts: 1.0 (Table 4). Evaluation: 0.6 (section 4.1).
    top_p, top_k, min_p
        1.0, 0 and 0.0 switch each off. Evaluation uses top_p 0.95 (section 4.1).
    max_new_tokens
        Length limit of a completion, the end token included.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        require(
            self.temperature >= 0, f"temperature is {self.temperature}; it must not be negative"
        )
        require(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must lie in (0, 1]")
        require(self.top_k >= 0, f"top_k is {self.top_k}; it must not be negative")
        require(0 <= self.min_p < 1, f"min_p is {self.min_p}; it must lie in [0, 1)")
        require(
            self.max_new_tokens >= 1,
            f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """How accuracy is measured, the same for every arm, trained or not.

    Attributes
    ----------
    every
        Steps between evaluations on the development split during training; 0 switches off.
    samples
        Completions a problem under `sampling` (mean pass@1 is reported over them).
    sampling
        "temperature 0.6, top_p 0.95, 4096 tokens, evaluated multiple times" (section 4.1);
        the number of times is not stated.
    """

    every: int = 0
    samples: int = 1
    sampling: SamplingConfig = SamplingConfig(temperature=0.6, top_p=0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRates:
    """Peak learning rates by what is trained: "1e-5 (QeRL, QLoRA); 5e-6 (LoRA)" (Table 4).

    The rate of full training is not stated in the paper.
    """

    lora_16bit: float
    lora_4bit: float
    full: float

    def of(self, arm: Arm) -> float:
        """Return the peak learning rate of `arm`, its own factor included."""
        if arm.training == "full":
            rate = self.full
        else:
            rate = self.lora_16bit if arm.weight_format == "bf16" else self.lora_4bit
        return rate * arm.learning_rate_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW: "AdamW-8bit" (Table 4); betas, decay, warm-up and clipping are not in the paper.

    `schedule` after the warm-up is `constant` or `cosine` to zero at the last step.
    """

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    learning_rates: LearningRates
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainScale:
    """How large a training run is on one tier of hardware.

    Attributes
    ----------
    checkpoint
        `tiny` (in the package), a folder, or a hub name.
    steps
        Optimiser steps. One rollout batch serves `updates_per_rollout` of them.
    prompts_per_rollout, group_size
        P and G; a rollout has B = P * G rows. Table 4: 128 and 8 (GSM8K), 128 and 16 (BigMath).
    updates_per_rollout
        4 on GSM8K, 1 on BigMath (Table 4); the released scripts use 1.
    micro_batch_rows
        Rows in one forward and backward pass; changes memory, never the gradient.
    compute_dtype
        Dtype of activations; master weights of what is trained are float32 at every tier.
    checkpoint_every
        Steps between resumable checkpoints.
    seeds
        Seeds of a default run.
    """

    checkpoint: str
    data: DataConfig
    steps: int
    prompts_per_rollout: int
    group_size: int
    updates_per_rollout: int = 1
    micro_batch_rows: int = 64
    max_prompt_tokens: int = 256
    rollout: SamplingConfig = SamplingConfig()
    optimizer: OptimizerConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    prompt_template: str = "paper"
    format_reward: float = 0.2
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    checkpoint_every: int = 10
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    def __post_init__(self) -> None:
        for name in (
            "prompts_per_rollout",
            "group_size",
            "updates_per_rollout",
            "micro_batch_rows",
        ):
            value = getattr(self, name)
            require(value >= 1, f"{name} is {value}; it must be 1 or more")
        require(self.steps >= 0, f"steps is {self.steps}; it must not be negative")
        rows = self.prompts_per_rollout * self.group_size
        require(
            rows % self.updates_per_rollout == 0,
            f"a rollout of {rows} rows does not split into {self.updates_per_rollout} updates",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides one run's result: target, tier, procedure, arm, scale and seed."""

    target: str
    target_version: int
    tier: str
    procedure: str
    arm: Arm
    scale: Any
    seed: int

    def resolved(self) -> dict[str, Any]:
        """Return the whole configuration as plain JSON values, sorted by the writer."""
        return dataclasses.asdict(self)

    def digest(self) -> str:
        """Return the SHA-256 hex digest of the resolved configuration, the seed included."""
        return digest_of(self.resolved())


def digest_of(value: Any) -> str:
    """Return the SHA-256 hex digest of a JSON-able value in its canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on every part, by name: `derive_seed(seed, "noise", step)`.

    Random streams are derived by name rather than drawn from one generator, so that switching one
    of them on (added noise, say) leaves all others where they were.
    """
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
