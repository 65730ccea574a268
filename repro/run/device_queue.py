"""In which order planned runs are carried out.

The queue hands runs, longest first, to one worker process per device, which sees only its own
device (`CUDA_VISIBLE_DEVICES`). Length is counted, not estimated: training steps times rows per
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from repro.evidence.record import run_folder
from repro.run.carry_out import carried_together
from repro.run.worker import Task
from repro.spec.config import RunConfig, TrainScale
from repro.spec.step_scale import StepScale

RETRIES = 1


def tasks_of(pending: Sequence[RunConfig], runs: Path) -> list[Task]:
    """Return the tasks of runs without a record, longest first."""
    return [
        Task(run=group[0], folder=run_folder(group[0], runs), runs=runs, also=group[1:])
        for group in carried_together(sorted(pending, key=_place))
    ]


def _place(run: RunConfig) -> tuple[bool, int]:
    """Return what runs are ordered by: others' baselines first, then the longest."""
    scale, arm = run.scale, run.arm
    is_baseline = isinstance(scale, StepScale) and arm.weight_format == scale.baseline
    return not (is_baseline and arm.training == "lora"), -rows_of(run)


def rows_of(run: RunConfig) -> int:
    """Return the rows that a run trains on, over all its steps; 0 where it trains on none."""
    if run.procedure == "evaluate" or not isinstance(run.scale, TrainScale):
        return 0
    rows: int = run.scale.steps * run.scale.prompts_per_rollout * run.scale.group_size
    return rows
