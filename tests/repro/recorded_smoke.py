"""For tests of what a record must show: real records of the smoke tier, small, made once.

Table 1's QeRL arm and its untrained BF16 arm, two seeds each, with every measurement there is.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from repro.run.carry_out import carry_out
from repro.run.select import Selection
from repro.spec.target import Target, plan
from repro.spec.tier import Tier
from repro.spec.variants import with_steps
from repro.targets import find
from tests.repro.small_runs import context_of

ARMS = ("nvfp4_lora_aqn", "bf16")
STEPS = 6


def small_table1() -> Target:
    """Return Table 1 with a smoke scale that trains for some seconds."""
    target = with_steps(find("table1"), STEPS)
    scale = target.scales[Tier.SMOKE]
    data = dataclasses.replace(scale.data, test_problems=24)
    evaluation = dataclasses.replace(
        scale.evaluation, samples=3, at=(1, 2), token_budget=3000, threshold=20.0
    )
    scale = dataclasses.replace(scale, data=data, prompts_per_rollout=4, evaluation=evaluation)
    return dataclasses.replace(target, scales=dict(target.scales) | {Tier.SMOKE: scale})


SMALL = small_table1()
SELECTION = Selection(target=SMALL, tier=Tier.SMOKE)


def record_smoke(folder: Path) -> Path:
    """Carry out the runs and leave their records in `folder`; return it."""
    for run in plan(SMALL, Tier.SMOKE, 2, ARMS):
        carry_out([run], folder, context_of(folder.parent / "working" / run.digest()[:12]))
    return folder


def place(runs: Path, arm: str = ARMS[0], seed: int = 1, target: str = SMALL.name) -> Path:
    """Return where the record of an arm and seed lies."""
    return runs / "smoke" / target / arm / f"seed-{seed}.json"
