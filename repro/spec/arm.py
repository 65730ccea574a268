"""What the paper varies: weight format, what is trained, added noise, loss and reward.

Everything is frozen; a variant is a `dataclasses.replace` away, so that the difference between two
arms is the experiment. Places in the paper (arXiv 2510.11696v1) stand beside each constant; where
it is silent, that is said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, get_args

from repro.spec.checks import Bound, Checked, Positive, check_fields, require
from repro.spec.settings import OMIT_AT_DEFAULT

# The names of `kernels.formats.FORMATS`, without the torch that it needs.
FourBitFormat = Literal["nf4", "mxfp4", "nvfp4"]
WeightFormat = Literal["bf16", FourBitFormat]
Training = Literal["none", "lora", "full"]
NoiseSchedule = Literal["exponential", "linear", "cosine", "logarithmic"]
RewardKind = Literal["task", "random", "format", "finished"]
Aggregation = Literal["sequence_mean", "token_mean", "token_mean_local", "constant"]
RolloutAdapter = Literal["apart", "folded"]
OptimizerName = Literal["adamw", "adamw_8bit"]

FOUR_BIT_FORMATS: tuple[FourBitFormat, ...] = get_args(FourBitFormat)
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)


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
    sigma_start: Annotated[float, Bound(above=0, most=1)] = 1e-2
    sigma_end: Annotated[float, Bound(above=0, most=1)] = 5e-4
    num_stages: Annotated[int, Bound(least=3)] = 10
    form: Literal["as_described", "as_released", "as_published"] = "as_described"
    reach: Literal["rollout", "shared"] = "rollout"

    def __post_init__(self) -> None:
        check_fields(self, "noise.")
        require(
            self.sigma_end <= self.sigma_start,
            f"noise sigma falls from {self.sigma_start} to {self.sigma_end}; "
            "it needs sigma_end <= sigma_start",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction(Checked):
    """A user's own reward in place of the task's, with the digest of its module's file."""

    module: str
    function: str
    source_sha256: str

    WHERE = "reward_function."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedRounding(Checked):
    """A multiple of a format's rounding error on 16-bit weights: W + factor (Q(W) - W).

    Not in the paper: a small policy's entropy moves by 2 % where the paper's moves by 23 %, and a
    multiple of the error reaches the paper's dose.
    """

    format: FourBitFormat
    factor: Annotated[float, Bound(above=0, most=100)] = 1.0

    WHERE = "rounding."


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
    beta
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
        Most rollout batches drawn per step while replacing groups whose accuracy is all 0 or all 1
        (under another reward than `task`: whose rewards are all equal); 0 is off.
    """

    name: str = "grpo"
    scale_by_std: bool = True
    advantage_epsilon: Annotated[float, Bound(least=0, most=1)] = 1e-4
    aggregation: Aggregation = "sequence_mean"
    ratio: Literal["token", "sequence"] = "token"
    clip_low: Annotated[float, Bound(above=0, below=1)] = 0.2
    clip_high: Positive = 0.28
    beta: Annotated[float, Bound(least=0, most=100)] = 0.0
    old_policy: Literal["trainer", "sampler"] = "trainer"
    importance_cap: Annotated[float, Bound(least=1)] | None = None
    mask_truncated: bool = False
    overlong_buffer: Annotated[float, Bound(least=0, below=1)] = 0.0
    dynamic_sampling: Annotated[int, Bound(least=0, most=1000)] = 0

    RETIRED: ClassVar = {"dual_clip": None, "kl_estimator": "k3"}

    def __post_init__(self) -> None:
        check_fields(self, "loss.")
        require(
            self.importance_cap is None or self.old_policy != "sampler",
            f"loss.importance_cap is {self.importance_cap}; it acts between the trainer's old "
            "log-probabilities and the sampler's, which loss.old_policy 'sampler' makes the same: "
            "it must be None there",
        )


GRPO = LossConfig()
DAPO = LossConfig(
    name="dapo",
    aggregation="token_mean",
    mask_truncated=True,
    overlong_buffer=0.2,
    dynamic_sampling=3,
)
# arXiv 2507.18071, section 5.1: "left and right clipping ranges ... 3e-4 and 4e-4".
GSPO = LossConfig(name="gspo", ratio="sequence", clip_low=3e-4, clip_high=4e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One row of a table: what the paper compares.

    Attributes
    ----------
    name
        Stable identifier, used in paths and expectations (`nvfp4_lora_aqn`).
    lora_rank, lora_alpha
        "r = 32" (section 4.1); alpha is not stated in the paper, the released code has alpha = r.
    norms_trained
        The paper trains LoRA alone; the released code also trains both block norms.
    learning_rate_factor
        Multiplies the scale's learning rate (Fig. 16, Fig. 17).
    reward
        `task`: right answer plus the scale's format reward. `finished`: right answer alone, if the
        completion ended by itself. `random` and `format`: controls.
    reward_function
        A user's own reward instead of `task`; in no target.
    rounding
        A multiple of a format's rounding error on BF16 weights; a dose.
    temperature_factor
        Multiplies the scale's temperature of training: the policy itself is warmer, in rollouts and
        in every log-probability that the loss takes, so its tokens are on-policy. Entropy without a
        rounding's damage; a dose, not in the paper.
    rollout_adapter
        `apart`: the sampler multiplies by the adapter beside the base, as in the paper. `folded`:
        the adapter is added into the 16-bit base for a rollout, and the base restored after it;
        what the sum rounds away makes the sampler another policy than the trainer's.
    """

    name: str
    label: str
    weight_format: WeightFormat = "bf16"
    training: Training = "lora"
    lora_rank: Annotated[int, Bound(least=1, most=4096)] = 32
    lora_alpha: Annotated[float, Bound(least=0.01, most=1e6)] = 32.0
    norms_trained: bool = False
    noise: NoiseConfig | None = None
    loss: LossConfig = GRPO
    reward: RewardKind = "task"
    learning_rate_factor: Positive = 1.0
    reward_function: RewardFunction | None = field(default=None, metadata=OMIT_AT_DEFAULT)
    rounding: PlantedRounding | None = field(default=None, metadata=OMIT_AT_DEFAULT)
    temperature_factor: Positive = field(default=1.0, metadata=OMIT_AT_DEFAULT)
    rollout_adapter: RolloutAdapter = field(default="apart", metadata=OMIT_AT_DEFAULT)

    def __post_init__(self) -> None:
        check_fields(self, f"arm {self.name}: ")
        require(self.name.isidentifier(), f"arm name {self.name!r} must be a Python identifier")
        require(
            self.reward_function is None or self.reward == "task",
            f"arm {self.name}: reward is {self.reward}; a function stands in for task alone",
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
        require(
            self.rounding is None or self.weight_format == "bf16",
            f"arm {self.name}: a planted rounding goes with bf16 weights, not {self.weight_format}",
        )
        require(
            self.temperature_factor == 1 or self.training != "none",
            f"arm {self.name}: an untrained arm has no rollouts; temperature_factor must be 1, not "
            f"{self.temperature_factor}",
        )
        require(
            self.rollout_adapter == "apart"
            or (self.training, self.weight_format) == ("lora", "bf16"),
            f"arm {self.name}: rollout_adapter is folded, with training {self.training} of "
            f"{self.weight_format} weights; it needs lora of bf16",
        )
