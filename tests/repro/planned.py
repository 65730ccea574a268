"""Targets with an analysis plan, small and made up: a table, what shares its runs, what reads them.

`study` has the arms and claims of Table 1, `study_rewards` those of Figure 4 on its runs;
`study_schedules` and `study_rates` are Figures 9 and 17, which share an arm with `study` each.
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
from repro.spec.config import DataConfig, EvaluationConfig
from repro.spec.target import Target
from repro.spec.tier import Tier
from repro.targets import find
from repro.targets.table1 import BF16_LORA, NVFP4_LORA_AQN, SMOKE

FIRST, SECOND = [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]  # of the seeds of `study`

SCALE = dataclasses.replace(
    SMOKE,
    data=DataConfig(
        source="generated", train_problems=100, development_problems=50, test_problems=200
    ),
    steps=24,
    evaluation=EvaluationConfig(every=6, token_budget=10_000),
    seeds=(*FIRST, *SECOND),
)
_FEWER = dataclasses.replace(SCALE, seeds=tuple(FIRST))

STUDY = dataclasses.replace(
    find("table1"), name="study", scales={Tier.MINI: SCALE}, needs={}, paper_file=""
)
REWARDS = dataclasses.replace(
    find("figure4"), name="study_rewards", records_of=STUDY, paper_file=""
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
PLANNED = (STUDY, REWARDS, SCHEDULES, RATES)

_LATE_IMPORTS = (
    "figures.__main__",
    "repro.judge.blessed",
    "repro.judge.blessing",
    "repro.report.regression",
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
