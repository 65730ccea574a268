"""Controls that the paper lacks, as arms: values, one `replace` away from an arm of Table 1.

* `aqn_factorial`: added noise on every format; if AQN helps because NVFP4's rounding is too static,
  it should help there more than on BF16 (the interaction).
* `matched_noise`: BF16 with Gaussian noise on the weights, matched to each format in the KL of its
  logits. Is it noise, or is it quantisation?
* `noise_reach`: the rollout's policy is not the trainer's under noise. Three estimators: as the
  paper's Fig. 2 (trainer clean, no correction), the same noise for both, and truncated importance
  sampling.
* `norms`: the released code also trains the norms' gains; the paper says LoRA alone.
* `answer_reward`: no reward for the format, which the proxy policies know from pre-training.
* `as_published`: the released settings, with their inert noise, and as they would act.
* `noise_in_sft`, in `repro.targets.supervised`: the same noise under supervised fine-tuning.

None is a claim of the paper's but where the source says so; verdicts are read as answers.
"""

from __future__ import annotations

import dataclasses

from repro.spec.arm import RELEASED_BNPO, Arm, NoiseConfig, WeightNoise
from repro.spec.target import Claim, Target
from repro.spec.tier import Tier
from repro.targets import paper_effects, proxy
from repro.targets.claims import difference
from repro.targets.table1 import (
    BF16_LORA,
    METRICS,
    MXFP4_LORA,
    NF4_LORA,
    NVFP4_LORA,
    NVFP4_LORA_AQN,
    TABLE1,
)

_CONTROL = "not in the paper; a control"
_WHY_NOT = "a control at the proxy tier alone"
_FORMATS = (BF16_LORA, NF4_LORA, MXFP4_LORA, NVFP4_LORA)
_TABLE1_ARMS = {arm.name for arm in TABLE1.arms}


def _target(
    name: str, title: str, statement: str, arms: tuple[Arm, ...], claims: tuple[Claim, ...]
) -> Target:
    return Target(
        name=name,
        title=title,
        statement=statement,
        source=_CONTROL,
        arms=arms,
        metrics=METRICS,
        claims=claims,
        scales={Tier.PROXY: proxy.PROXY},
        needs={Tier.PROXY: proxy.NEEDS},
        headline="accuracy",
        shared={arm.name: (TABLE1, arm.name) for arm in arms if arm.name in _TABLE1_ARMS},
        why_not=_WHY_NOT,
    )


def _noisy(arm: Arm) -> Arm:
    return dataclasses.replace(
        arm, name=f"{arm.name}_aqn", label=f"{arm.label} + AQN", noise=NoiseConfig()
    )


_NOISY = {arm.name: _noisy(arm) for arm in _FORMATS[:-1]} | {NVFP4_LORA.name: NVFP4_LORA_AQN}

AQN_FACTORIAL = _target(
    "aqn_factorial",
    "AQN on every format",
    "if added noise helps because four-bit rounding is static, it helps NVFP4 more than BF16",
    (*_FORMATS, *_NOISY.values()),
    (
        *(
            difference(
                f"aqn_helps_{arm.weight_format}",
                f"AQN raises the final accuracy on {arm.weight_format.upper()} weights",
                "Table 1" if arm is NVFP4_LORA else _CONTROL,
                _NOISY[arm.name],
                arm,
                "noise",
                effect=(paper_effects.AQN_GAIN if arm is NVFP4_LORA else paper_effects.OPEN_AQN),
            )
            for arm in _FORMATS
        ),
        *(
            Claim(
                name=f"{arm.weight_format}_gains_more_from_aqn",
                statement=f"AQN helps {arm.weight_format.upper()} more than BF16 (interaction)",
                source=_CONTROL,
                kind="interaction",
                arms=(_NOISY[arm.name].name, arm.name, _NOISY["bf16_lora"].name, "bf16_lora"),
                metric="accuracy",
                factor=("weight_format", "noise", "learning_rate"),
                effect=paper_effects.OPEN_AQN,
            )
            for arm in _FORMATS[1:]
        ),
    ),
)

_MATCHED = {
    arm.name: dataclasses.replace(
        BF16_LORA,
        name=f"bf16_lora_noise_as_{arm.weight_format}",
        label=f"BF16 + Gaussian noise as strong as {arm.weight_format.upper()}, LoRA",
        weight_noise=WeightNoise(matched_to=arm.weight_format),
    )
    for arm in _FORMATS[1:]
}
MATCHED_NOISE = _target(
    "matched_noise",
    "BF16 with Gaussian weight noise as strong as each format's rounding",
    "what quantised weights gain over BF16, weights with plain noise of the same strength gain too",
    (*_FORMATS, *_MATCHED.values()),
    (
        *(
            difference(
                f"noise_as_{arm.weight_format}_grows_faster",
                f"noise as strong as {arm.weight_format.upper()}'s rounding enlarges the area "
                "under the held-out accuracy",
                _CONTROL,
                _MATCHED[arm.name],
                BF16_LORA,
                "weight_noise",
                effect=paper_effects.OPEN_SPEED,
                metric="heldout_area",
            )
            for arm in _FORMATS[1:]
        ),
        *(
            difference(
                f"{arm.weight_format}_beats_its_noise",
                f"{arm.weight_format.upper()} weights end more accurate than BF16 weights with "
                "noise of the same strength",
                _CONTROL,
                arm,
                _MATCHED[arm.name],
                "weight_format",
                "weight_noise",
                "learning_rate",
                effect=paper_effects.OPEN_ACCURACY,
            )
            for arm in _FORMATS[1:]
        ),
    ),
)

_SHARED = dataclasses.replace(
    NVFP4_LORA_AQN,
    name="aqn_shared",
    label="AQN in trainer and rollout",
    noise=NoiseConfig(reach="shared"),
)
_CORRECTED = dataclasses.replace(
    NVFP4_LORA_AQN,
    name="aqn_corrected",
    label="AQN in the rollout, truncated importance sampling",
    # 2 is the usual cap of truncated importance sampling between sampler and trainer.
    loss=dataclasses.replace(NVFP4_LORA_AQN.loss, importance_cap=2.0),
)
_AS_WRITTEN = dataclasses.replace(
    NVFP4_LORA_AQN,
    name="aqn_sampler_ratio",
    label="AQN in the rollout, ratio against the noisy policy (Algorithm 1)",
    loss=dataclasses.replace(NVFP4_LORA_AQN.loss, old_policy="sampler"),
)
NOISE_REACH = _target(
    "noise_reach",
    "Who sees the added noise, and whether the difference is corrected",
    "correcting for the noisy rollout, or sharing the noise, changes what AQN gains",
    (NVFP4_LORA, NVFP4_LORA_AQN, _SHARED, _CORRECTED, _AS_WRITTEN),
    tuple(
        difference(
            f"{arm.name}_beats_uncorrected",
            f"{arm.label}: more accurate than noise in the rollout alone, uncorrected",
            _CONTROL,
            arm,
            NVFP4_LORA_AQN,
            factor,
            effect=paper_effects.OPEN_AQN,
        )
        for arm, factor in ((_SHARED, "noise"), (_CORRECTED, "loss"), (_AS_WRITTEN, "loss"))
    ),
)

_TRAINED_NORMS = tuple(
    dataclasses.replace(
        arm, name=f"{arm.name}_norms", label=f"{arm.label}, norms trained", norms_trained=True
    )
    for arm in (BF16_LORA, NVFP4_LORA, NVFP4_LORA_AQN)
)
NORMS = _target(
    "norms",
    "Norms trained or frozen",
    "training the norms' gains beside LoRA, as the released code does, raises the accuracy",
    (BF16_LORA, NVFP4_LORA, NVFP4_LORA_AQN, *_TRAINED_NORMS),
    tuple(
        difference(
            f"norms_help_{arm.name}",
            f"training the norms raises the final accuracy of {arm.label}",
            _CONTROL,
            trained,
            arm,
            "norms_trained",
            effect=paper_effects.OPEN_ACCURACY,
        )
        for trained, arm in zip(
            _TRAINED_NORMS, (BF16_LORA, NVFP4_LORA, NVFP4_LORA_AQN), strict=True
        )
    ),
)

_ANSWER = {
    arm.name: dataclasses.replace(
        arm,
        name=f"{arm.name}_answer",
        label=f"{arm.label}, no format reward",
        reward="answer",
    )
    for arm in (BF16_LORA, NVFP4_LORA, NVFP4_LORA_AQN)
}
ANSWER_REWARD = _target(
    "answer_reward",
    "No reward for the format",
    "QeRL's advantage does not come from a reward for the format of the answer",
    tuple(_ANSWER.values()),
    (
        difference(
            "qerl_beats_lora",
            "without a format reward, QeRL ends more accurate than 16-bit LoRA",
            _CONTROL,
            _ANSWER["nvfp4_lora_aqn"],
            _ANSWER["bf16_lora"],
            "weight_format",
            "noise",
            "learning_rate",
            effect=paper_effects.OPEN_ACCURACY,
        ),
        difference(
            "nvfp4_grows_faster",
            "without a format reward, NVFP4 LoRA has a larger area under the held-out accuracy "
            "than 16-bit LoRA",
            _CONTROL,
            _ANSWER["nvfp4_lora"],
            _ANSWER["bf16_lora"],
            "weight_format",
            "learning_rate",
            effect=paper_effects.OPEN_SPEED,
            metric="heldout_area",
        ),
    ),
)

# "--ln True", rank and alpha 16, loss type bnpo, sigma 1e-2 to 1e-4 (the released scripts). Their
# group of 2 and one prompt per step are sizes, which stay the tier's.
_PUBLISHED = dataclasses.replace(
    NVFP4_LORA,
    name="as_published",
    label="as published: noise that touches nothing",
    lora_rank=16,
    lora_alpha=16.0,
    norms_trained=True,
    loss=RELEASED_BNPO,
    noise=NoiseConfig(form="as_published", sigma_end=1e-4),
)
_EFFECTIVE = dataclasses.replace(
    _PUBLISHED,
    name="as_released",
    label="as published, were the noise to act",
    noise=NoiseConfig(form="as_released", sigma_end=1e-4),
)
_PUBLISHED_BF16 = dataclasses.replace(
    _PUBLISHED,
    name="as_published_bf16",
    label="as published, BF16",
    weight_format="bf16",
    noise=None,
)
AS_PUBLISHED = _target(
    "as_published",
    "The released settings, as they act and as they were meant",
    "the released code's noise, were it to act, would raise the accuracy",
    (_PUBLISHED_BF16, _PUBLISHED, _EFFECTIVE),
    (
        difference(
            "released_noise_helps",
            "the released noise, acting, ends more accurate than the same code as it is",
            "the released code",
            _EFFECTIVE,
            _PUBLISHED,
            "noise",
            effect=paper_effects.AQN_GAIN,
        ),
        difference(
            "published_beats_bf16",
            "the released NVFP4 settings end more accurate than the same on BF16",
            "the released code; Table 1",
            _PUBLISHED,
            _PUBLISHED_BF16,
            "weight_format",
            "noise",
            "learning_rate",
            effect=paper_effects.NVFP4_OVER_LORA,
        ),
    ),
)

CONTROL_TARGETS = (
    AQN_FACTORIAL,
    MATCHED_NOISE,
    NOISE_REACH,
    NORMS,
    ANSWER_REWARD,
    AS_PUBLISHED,
)
