"""The tables and figures of the paper, in its order. `find` returns one by name.

Nothing here knows a machine: a target says what is compared and how large each tier runs it.
"""

from __future__ import annotations

from repro.spec.checks import unknown
from repro.spec.target import Target
from repro.targets import (
    ablations,
    described,
    kernel_speed,
    memory,
    mini,
    rollout_speed,
    speed,
    steps,
    table1,
    table2,
    training_curves,
)
from repro.targets.coder import first_round, second_round

TARGETS: tuple[Target, ...] = (
    table1.TABLE1,
    table1.TABLE1_3B,
    *mini.MINI_TARGETS,
    *first_round.CODER_TARGETS,
    *second_round.CODER_LEARNING,
    table2.TABLE2,
    table2.TABLE2_14B,
    training_curves.TABLE2_32B,
    *steps.STEP_TARGETS,
    described.TABLE4,
    *speed.TABLES_5_TO_8,
    *speed.TABLES_FOLDED,
    speed.FINAL_ABSTRACT,
    speed.TABLE9,
    described.FIGURE1,
    described.FIGURE2,
    described.FIGURE3,
    training_curves.FIGURE4,
    training_curves.FIGURE4_BIGMATH,
    training_curves.FIGURE5,
    described.FIGURE6,
    training_curves.FIGURE7,
    training_curves.FIGURE8,
    ablations.FIGURE9,
    ablations.FIGURE9_3B,
    ablations.FIGURE10,
    ablations.FIGURE10_3B,
    speed.FIGURE11,
    training_curves.FIGURE12,
    training_curves.FIGURE13,
    training_curves.FIGURE14,
    ablations.FIGURE15,
    ablations.FIGURE16,
    ablations.FIGURE17,
    *training_curves.SIZED_FIGURES,
    described.PRETRAIN_TINY,
    *memory.MEMORY_TARGETS,
    kernel_speed.KERNELS,
    *rollout_speed.ROLLOUT_TARGETS,
)


def find(name: str) -> Target:
    """Return a target by name, dashes for underscores or not; `ValueError` names the nearest."""
    for target in TARGETS:
        if target.name == name.replace("-", "_"):
            return target
    nearest = unknown("target", [target.name for target in TARGETS], name)
    raise ValueError(f"{nearest} (`python -m repro list --all` shows all)")
