"""Targets with an analysis plan, small and made up: a table, what shares its runs, what reads them.

They stand at the mini tier, on the tiny policy, and are known to the suite while `registered` is
entered. `study` has the arms and claims of Table 1, `study_rewards` those of Figure 4 on its runs;
`study_schedules` and `study_rates` are Figures 9 and 17, `study_factorial` asks for an interaction:
they share arms with `study`. `study_sweep` has the three rates of a sweep.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import repro.targets
from repro.run import analysis_plan
from repro.spec.arm import NoiseConfig
from repro.spec.claim import Claim, Effect
from repro.spec.config import (
    DataConfig,
    EvaluationConfig,
    LearningRates,
    OptimizerConfig,
    SamplingConfig,
    TrainScale,
)
from repro.spec.target import Target
from repro.spec.tier import Tier
from repro.targets import find
from repro.targets.mini import FACTORS, at_rate
from repro.targets.table1 import BF16_LORA, NVFP4_LORA, NVFP4_LORA_AQN, TRAINED

FIRST, SECOND = [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]  # of the seeds of `study`

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
    scales={Tier.MINI: dataclasses.replace(SCALE, seeds=(100, 101))},
    headline="heldout_last",
)
PLANNED = (STUDY, REWARDS, SCHEDULES, RATES, FACTORIAL, SWEEP)

_LATE_IMPORTS = (
    "figures.__main__",
    "repro.judge.blessed",
    "repro.judge.blessing",
    "repro.regression.regression_commands",
    "repro.report.console",
    "repro.run.listing",
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
