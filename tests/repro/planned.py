"""Targets with an analysis plan, small and made up: a table, what shares its runs, what reads them.

They stand at the mini tier, on the tiny policy, and are known to the suite while `registered` is
entered. `study` has the arms and claims of Table 1, `study_rewards` those of Figure 4 on its runs;
`study_schedules` and `study_rates` are Figures 9 and 17, `study_factorial` asks for an interaction:
they share arms with `study`. `study_sweep` has the three rates of a sweep, `study_harm` claims a
harm in two metrics; `study_doses` measures doses before training.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import repro.targets
from repro.run import analysis_plan
from repro.spec.arm import Arm, NoiseConfig, PlantedRounding, WeightNoise
from repro.spec.config import (
    DataConfig,
    EvaluationConfig,
    LearningRates,
    OptimizerConfig,
    SamplingConfig,
    TrainScale,
)
from repro.spec.effect import Effect
from repro.spec.target import Claim, Metric, Target
from repro.spec.tier import Tier
from repro.targets import find
from repro.targets.paper_effects import OPEN_SHARE
from repro.targets.swept_rates import FACTORS, at_rate
from repro.targets.table1 import BF16_LORA, MXFP4_LORA, NVFP4_LORA, NVFP4_LORA_AQN, TRAINED
from repro.targets.table_rows import above, metric

FIRST, SECOND = [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]  # of the seeds of `study`
TUNING = (100, 101)

SCALE = TrainScale(
    checkpoint="tiny",
    data=DataConfig(
        source="generated", train_problems=100, development_problems=50, test_problems=200
    ),
    steps=24,
    prompts_per_rollout=8,
    group_size=8,
    max_prompt_tokens=1280,
    rollout=SamplingConfig(temperature=1.0, max_new_tokens=64),
    optimizer=OptimizerConfig(
        learning_rates=LearningRates(lora_16bit=1e-3, lora_4bit=1e-3, full=1e-4), warmup_steps=3
    ),
    evaluation=EvaluationConfig(every=6, token_budget=10_000),
    prompt_template="tiny",
    seeds=(*FIRST, *SECOND),
)
_FEWER = dataclasses.replace(SCALE, seeds=tuple(FIRST))

STUDY = dataclasses.replace(
    find("table1"), name="study", scales={Tier.MINI: SCALE}, needs={}, paper_file=""
)
REWARDS = dataclasses.replace(
    find("figure4"), name="study_rewards", records_of=STUDY.name, paper_file=""
)
SCHEDULES = dataclasses.replace(
    find("figure9"),
    name="study_schedules",
    scales={Tier.MINI: _FEWER},
    shared={"aqn_exponential": (STUDY, NVFP4_LORA_AQN.name)},
    paper_file="",
)
RATES = dataclasses.replace(
    find("figure17"),
    name="study_rates",
    scales={Tier.MINI: _FEWER},
    shared={"lora_5e6": (STUDY, BF16_LORA.name)},
    paper_file="",
)
_NOISY = dataclasses.replace(
    BF16_LORA, name="bf16_lora_aqn", label="BF16 LoRA + AQN", noise=NoiseConfig()
)
_PAIRS = (NVFP4_LORA_AQN, NVFP4_LORA, _NOISY, BF16_LORA)
FACTORIAL = Target(
    name="study_factorial",
    title="AQN on two formats",
    statement="added noise helps NVFP4 more than BF16",
    source="not in the paper",
    arms=_PAIRS,
    metrics=STUDY.metrics,
    scales={Tier.MINI: _FEWER},
    headline="accuracy",
    shared={arm.name: (STUDY, arm.name) for arm in _PAIRS if arm is not _NOISY},
    claims=(
        Claim(
            name="nvfp4_gains_more_from_aqn",
            statement="AQN helps NVFP4 more than BF16 (interaction)",
            source="not in the paper",
            contrast=dict(zip((arm.name for arm in _PAIRS), (1, -1, -1, 1), strict=True)),
            metric="accuracy",
            factor=("weight_format", "noise", "learning_rate"),
            effect=Effect(smallest=0.015, measure="of gain", because="a tenth of the paper's"),
        ),
    ),
)
SWEEP = Target(
    name="study_sweep",
    title="The learning rates of `study`",
    statement="of three rates, each format and way of training gets the one that serves it best",
    source="not in the paper",
    arms=tuple(at_rate(arm, name) for arm in TRAINED for name in FACTORS),
    metrics=STUDY.metrics,
    scales={Tier.MINI: dataclasses.replace(SCALE, seeds=TUNING)},
    headline="heldout_last",
)


def _again(name: str, label: str, **fields: Any) -> Arm:
    return Arm(name=f"{name}_harm", label=f"{label}, LoRA, again", **fields)


_SHARED_NOISE = NoiseConfig(reach="shared")
_HARMED = (
    _again("bf16", "BF16"),
    _again("bf16_aqn", "BF16 + AQN", noise=_SHARED_NOISE),
    _again("nvfp4", "NVFP4", weight_format="nvfp4"),
    _again("nvfp4_aqn", "NVFP4 + AQN", weight_format="nvfp4", noise=_SHARED_NOISE),
)


def _harm(harmed: Arm, other: Arm, source: str, *factor: str) -> Iterator[Claim]:
    """Yield the claims that an arm ends less accurate than another, and with a higher entropy."""
    for by, high, low in (("accuracy", other, harmed), ("entropy_last", harmed, other)):
        yield above(
            f"{harmed.name}_{by}", f"{harmed.label} ends worse than {other.label} in {by}",
            source, high, low, " ".join(factor), OPEN_SHARE, by, headroom=False,
        )  # fmt: skip


HARM = Target(
    name="study_harm",
    title="A harm in two metrics",
    statement="noise harms what is trained",
    source="section 1",
    arms=_HARMED,
    metrics=STUDY.metrics,
    scales={Tier.MINI: _FEWER},
    headline="accuracy",
    claims=(
        *_harm(_HARMED[2], _HARMED[0], "section 1", "weight_format", "learning_rate"),
        *_harm(_HARMED[1], _HARMED[0], "not in the paper", "noise"),
        *_harm(_HARMED[3], _HARMED[2], "not in the paper", "noise"),
    ),
)
_MULTIPLES = tuple(
    dataclasses.replace(
        BF16_LORA,
        name=f"nvfp4_x{factor}",
        label=f"{factor} times NVFP4's rounding",
        rounding=PlantedRounding(format="nvfp4", factor=float(factor)),
    )
    for factor in (2, 4)
)
DOSES = Target(
    name="study_doses",
    title="How large each dose is before training",
    statement="the KL from BF16 grows with the error of the weights",
    source="not in the paper",
    procedure="dose",
    arms=(
        BF16_LORA,
        MXFP4_LORA,
        NVFP4_LORA,
        NVFP4_LORA_AQN,
        *_MULTIPLES,
        dataclasses.replace(
            NVFP4_LORA_AQN,
            name="aqn_03",
            label="NVFP4 + AQN from 0.3",
            noise=NoiseConfig(sigma_start=0.3, sigma_end=0.015),
        ),
        dataclasses.replace(
            BF16_LORA,
            name="noise_as_nvfp4",
            label="BF16 + noise as NVFP4",
            weight_noise=WeightNoise(matched_to="nvfp4"),
        ),
    ),
    metrics=(
        Metric(name="kl_completions", unit="nats", title="KL from BF16", better="neither"),
        metric("entropy_own", "nats", "entropy, own samples", "neither"),
        metric("entropy_forced", "nats", "entropy, same tokens", "neither"),
        Metric(name="accuracy_sampled_start", unit="percent", title="accuracy", better="higher"),
    ),
    scales={
        Tier.MINI: dataclasses.replace(
            SCALE, evaluation=EvaluationConfig(), permuted=True, seeds=(200, 201)
        )
    },
    headline="kl_completions",
)
# Its runs train many at once; it is no target that the suite knows.
TOGETHER = dataclasses.replace(STUDY, scales={Tier.MINI: dataclasses.replace(SCALE, together=True)})
PLANNED = (STUDY, REWARDS, SCHEDULES, RATES, FACTORIAL, SWEEP, HARM, DOSES)

_LATE_IMPORTS = (
    "figures.__main__",
    "repro.judge.blessed",
    "repro.judge.blessing",
    "repro.regression.command",
    "repro.report.console",
    "repro.report.listing",
    "repro.report.page_blocks",
    "repro.report.run_report",
)


@contextmanager
def registered(*targets: Target) -> Iterator[None]:
    """Let the suite know these targets, beside or in place of those of the same names."""
    # What is imported later would keep them.
    for name in _LATE_IMPORTS:
        importlib.import_module(name)
    own = repro.targets.TARGETS
    known = tuple({target.name: target for target in (*own, *targets)}.values())
    with mock.patch.object(repro.targets, "TARGETS", known):
        patches = [
            mock.patch.object(module, "TARGETS", known)
            for module in list(sys.modules.values())
            if getattr(module, "TARGETS", None) is own
        ]
        for patch in patches:
            patch.start()
        _forget()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()
            _forget()


def _forget() -> None:
    for cached in (analysis_plan.plan_digest, analysis_plan._readers):
        cached.cache_clear()
