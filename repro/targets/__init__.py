"""The tables and figures of the paper, in its order. `find` returns one by name.

Nothing here knows a machine: a target says what is compared and how large each tier runs it.
"""

from __future__ import annotations

from repro.spec.arm import unknown
from repro.spec.target import Target
from repro.targets.ablations import (
    FIGURE9,
    FIGURE9_3B,
    FIGURE10,
    FIGURE10_3B,
    FIGURE15,
    FIGURE16,
    FIGURE17,
)
from repro.targets.coder import CODER_TARGETS
from repro.targets.curves import (
    FIGURE4,
    FIGURE4_BIGMATH,
    FIGURE5,
    FIGURE7,
    FIGURE8,
    FIGURE12,
    FIGURE13,
    FIGURE14,
    SIZED_FIGURES,
    TABLE2_32B,
)
from repro.targets.described import FIGURE1, FIGURE2, FIGURE3, FIGURE6, PRETRAIN_TINY, TABLE4
from repro.targets.kernels import KERNELS
from repro.targets.memory import (
    CHECKPOINT_PATH,
    MEMORY,
    MEMORY_BUDGETS,
    MEMORY_DENSE,
    MEMORY_FORMATS,
)
from repro.targets.mini import MINI_TARGETS
from repro.targets.rollout import RANKED, ROLLOUT, SCHEDULING
from repro.targets.speed import FIGURE11, TABLE9, TABLES_5_TO_8
from repro.targets.steps import STEP_TARGETS
from repro.targets.table1 import TABLE1, TABLE1_3B
from repro.targets.table2 import TABLE2, TABLE2_14B

TARGETS: tuple[Target, ...] = (
    TABLE1,
    TABLE1_3B,
    *MINI_TARGETS,
    *CODER_TARGETS,
    TABLE2,
    TABLE2_14B,
    TABLE2_32B,
    *STEP_TARGETS,
    TABLE4,
    *TABLES_5_TO_8,
    TABLE9,
    FIGURE1,
    FIGURE2,
    FIGURE3,
    FIGURE4,
    FIGURE4_BIGMATH,
    FIGURE5,
    FIGURE6,
    FIGURE7,
    FIGURE8,
    FIGURE9,
    FIGURE9_3B,
    FIGURE10,
    FIGURE10_3B,
    FIGURE11,
    FIGURE12,
    FIGURE13,
    FIGURE14,
    FIGURE15,
    FIGURE16,
    FIGURE17,
    *SIZED_FIGURES,
    PRETRAIN_TINY,
    MEMORY,
    MEMORY_DENSE,
    MEMORY_FORMATS,
    MEMORY_BUDGETS,
    CHECKPOINT_PATH,
    KERNELS,
    ROLLOUT,
    SCHEDULING,
    RANKED,
)


def find(name: str) -> Target:
    """Return the target called `name`; dashes may stand for underscores.

    Raises
    ------
    ValueError
        If there is none; the message lists the targets.
    """
    for target in TARGETS:
        if target.name == name.replace("-", "_"):
            return target
    raise ValueError(unknown("target", name, [target.name for target in TARGETS]))


def runs_of(target: Target) -> Target:
    """Return the target whose runs `target` reads: itself, or the one it names."""
    return target if target.records_of is None else find(target.records_of)
