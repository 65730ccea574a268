"""Loss over supervised fine-tuning, by arm: whether noise on the weights hinders it.

Arms with added noise are read under each step's own noise, as they are trained; what the trained
policy has learned, read without noise, is in the picture of paired differences.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from figures.curves import CurveRow, curve_rows, draw_curves
from repro.evidence.record import Record

NAME = "loss_curves"
PROCEDURE = "finetune"


def supervised(records: Sequence[Record]) -> bool:
    """Return whether what trained in the records did so on worked solutions."""
    return any(record.procedure == PROCEDURE for record in records)


def rows(records: Sequence[Record]) -> list[CurveRow]:
    """Return the mean loss per token of the solutions, in nats, per arm and step.

    The loss of reinforcement learning has no meaning as a number, so there is no row of it.
    """
    return curve_rows([record for record in records if record.procedure == PROCEDURE], "loss")


def draw(rows: Sequence[CurveRow], where: str = "") -> Figure:
    """Return the figure; `where` is said behind its title."""
    return draw_curves(
        rows,
        title=f"Training loss under supervised fine-tuning{where}",
        ylabel="mean loss per token of the solutions, nats",
        note="arms with AQN: under each step's own noise",
    )
