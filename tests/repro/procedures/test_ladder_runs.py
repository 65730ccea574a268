"""Every kind of arm of the ladder, from its target to a record, on the tiny policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from repro.evidence.environment import capture_environment
from repro.evidence.procedure import Measured
from repro.evidence.receipts import refusals
from repro.evidence.record import read_record
from repro.procedures.together import train_together
from repro.run.carry_out import keep
from repro.spec.config import DataConfig, RunConfig, SamplingConfig
from repro.spec.target import Target, plan
from repro.spec.tier import Tier
from repro.targets.ladder import LADDER
from repro.targets.table1 import BF16_LORA

DATA = DataConfig(source="generated", train_problems=8, test_problems=2, development_problems=2)


def small(run: RunConfig) -> RunConfig:
    """Return a run with its own scale's settings but for size, on the tiny policy."""
    scale = run.scale
    sampling = dataclasses.replace(scale.evaluation.sampling, max_new_tokens=8)
    samples = min(scale.evaluation.samples, 2)
    evaluation = dataclasses.replace(
        scale.evaluation,
        every=2,
        samples=samples,
        at=tuple(sorted({min(k, samples) for k in scale.evaluation.at})),
        sampling=sampling,
        token_budget=100,
    )
    size: dict[str, Any] = {"steps": 2, "prompts_per_rollout": 2, "group_size": 2}
    scale = dataclasses.replace(
        scale,
        checkpoint="tiny",
        data=DATA,
        test_sets=(),
        max_prompt_tokens=1280,
        # Of completions that are all cut off, DAPO learns nothing.
        rollout=SamplingConfig(max_new_tokens=48 if run.arm.loss.mask_truncated else 8),
        evaluation=evaluation,
        prompt_template="tiny",
        compute_dtype="float32",
        **size,
    )
    arm = run.arm
    if arm.exploration is not None:
        # Of so few tokens 1.3 may change none.
        arm = dataclasses.replace(
            arm, exploration=dataclasses.replace(arm.exploration, temperature=3.0)
        )
    return dataclasses.replace(run, scale=scale, arm=arm)


def kinds() -> Iterator[tuple[Target, str]]:
    """Yield an arm of each kind: of those alike in which fields differ from BF16 LoRA, the last."""
    collected = {}
    # What is measured before training has a procedure, and a test, of its own.
    for target in (one for one in LADDER if one.procedure == "train"):
        for arm in target.arms:
            differing = {
                item.name: getattr(arm, item.name)
                for item in dataclasses.fields(arm)
                if getattr(arm, item.name) != getattr(BF16_LORA, item.name)
            }
            shape = (differing.get("weight_format"), arm.training, arm.loss.name)
            kind = (*shape, *sorted(differing.keys() - {"name", "label"}))
            collected[kind] = (target, arm.name)
    yield from collected.values()


def test_an_arm_of_each_kind_runs_to_a_record_that_counts(tmp_path: Path) -> None:
    seed = 201
    runs = [small(plan(target, Tier.PROXY, [seed], [arm])[0]) for target, arm in kinds()]
    assert {run.procedure for run in runs} == {"train", "evaluate"}
    started, environment = datetime.now(UTC), capture_environment()
    outcomes = train_together(
        runs,
        device="cpu",
        folder=tmp_path,
        progress=lambda text, values: None,
        should_stop=lambda: False,
        threads=1,
    )
    for run, outcome in zip(runs, outcomes, strict=True):
        assert isinstance(outcome, Measured), (run.arm.name, outcome)
        path = keep(run, outcome, started, tmp_path / run.digest(), environment)
        record = read_record(path)
        assert refusals(record) == [], run.arm.name
        assert record.effects["order"] == seed
        if run.procedure == "train":
            needed = {"take_off_steps", "took_off", "collapsed", "train_area", "kl_to_start"}
            assert needed <= record.metrics.keys(), run.arm.name
