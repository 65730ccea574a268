"""The runs that targets of the ladder need together, and their minutes by the plan's own model."""

from __future__ import annotations

from pathlib import Path

from repro.run.device_queue import ensemble_tasks
from repro.run.ensemble_cost import ensemble_seconds, likely_groups
from repro.spec.config import RunConfig
from repro.spec.target import Target, plan
from repro.spec.tier import Tier


def runs_of(*targets: Target) -> list[RunConfig]:
    """Return the runs that targets need, one of each."""
    return list({run.digest(): run for t in targets for run in plan(t, Tier.PROXY)}.values())


def gpu_minutes(runs: list[RunConfig], targets: tuple[Target, ...]) -> float:
    """Return the minutes of one GPU by the plan's own model."""
    costs = {run.scale.checkpoint: targets[0].costs[Tier.PROXY].together for run in runs}
    (together,) = {cost for cost in costs.values() if cost is not None}
    tasks = ensemble_tasks(
        runs,
        Path(),
        devices=1,
        costs=dict.fromkeys(costs, together),
        grouping=lambda some, _: likely_groups(some, together.runs_together),
    )
    seconds = [ensemble_seconds(task.every, together) for task in tasks]
    return (together.begin_seconds + sum(seconds)) / 60
