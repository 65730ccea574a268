"""The pictures of the systems tier: which targets each one draws, and what stands around it.

A picture may take several targets (Tables 5 to 8 are one model each); a target without records
takes no part, and a picture without rows is not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from figures import protocol
from figures.timings import memory, steps, throughput
from figures.timings.rates import Bars, rate_rows
from repro.evidence.paper import PaperCell
from repro.evidence.record import Record
from repro.targets import TARGETS


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything that a picture may be drawn from.

    Attributes
    ----------
    bars
        (arm, metric) to this suite's own bar, of the picture's targets.
    """

    records: Sequence[Record]
    cells: Sequence[PaperCell]
    bars: Bars


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture: its name in files, its targets, its title, and what draws it."""

    name: str
    targets: tuple[str, ...]
    title: str
    draw: Callable[[Inputs, str], Figure | None]


def _throughput(inputs: Inputs, title: str) -> Figure | None:
    rates = rate_rows(inputs.records, inputs.cells, inputs.bars)
    if not rates:
        return None
    gains = throughput.gains(inputs.records, rates, _margins(inputs.records))
    note = f"{_rollout_note(inputs.records)}; {protocol.adapter(inputs.records)}"
    return throughput.draw(rates, gains, title, note)


def _ranks(inputs: Inputs, title: str) -> Figure | None:
    rows = rate_rows(inputs.records, inputs.cells, by_rank=True)
    return throughput.draw_ranks(rows, title, _rollout_note(inputs.records)) if rows else None


def _steps(inputs: Inputs, title: str) -> Figure | None:
    rows = steps.rows(inputs.records, inputs.cells)
    if not rows:
        return None
    timed = f"{min(row.n for row in rows)} timed steps after a warm-up"
    if all(row.n == 1 for row in rows):
        timed = "1 step timed after a warm-up"
    first = f"{protocol.origin(inputs.records)}; {timed}; x: 16-bit LoRA's time over the arm's"
    note = f"{first}\n{protocol.steps(inputs.records)}; {protocol.adapter(inputs.records)}"
    return steps.draw(rows, title, note)


def _memory(inputs: Inputs, title: str) -> Figure | None:
    rows = memory.rows(inputs.records, inputs.bars)
    if not rows:
        return None
    first = f"{protocol.origin(inputs.records)}; most reserved by the allocator, and its context"
    return memory.draw(rows, title, f"{first}\ncompletions x new tokens each; random weights")


PICTURES = (
    Picture(name="rollout_throughput", targets=("rollout",), draw=_throughput,
            title="Rollout throughput by batch, adapter on"),
    Picture(name="tables_5_to_8_throughput", targets=("table5", "table6", "table7", "table8"),
            title="Rollout throughput by batch (Tables 5 to 8)", draw=_throughput),
    Picture(name="table9_ranks", targets=("table9",), draw=_ranks,
            title="Rollout throughput by LoRA rank (Table 9)"),
    Picture(name="figure11_ranks", targets=("figure11",), draw=_ranks,
            title="Rollout throughput by LoRA rank against QLoRA (Fig. 11)"),
    Picture(name="rollout_ranks", targets=("rollout_ranks",), draw=_ranks,
            title="Rollout throughput by LoRA rank"),
    Picture(name="table3_steps", draw=_steps,
            targets=("table3_3b", "table3", "table3_14b", "table3_32b"),
            title="Time of a GRPO step (Table 3)"),
    Picture(name="rl_steps", targets=("table3_rl", "table3_rl_large", "table3_32b_rl"), draw=_steps,
            title="Time of a GRPO step with many completions"),
    Picture(name="arms_steps", targets=("table3_arms",), draw=_steps,
            title="Time of a GRPO step, other formats and products"),
    Picture(name="full_steps", targets=("table3_full",), draw=_steps,
            title="Time of a GRPO step of full fine-tuning"),
    Picture(name="memory", draw=_memory,
            targets=("memory", "memory_dense", "memory_formats", "memory_budgets"),
            title="Device memory of a GRPO step, planned and measured"),
)  # fmt: skip


def _rollout_note(records: Sequence[Record]) -> str:
    first = f"{protocol.origin(records)}; mean and 95 % t interval"
    return f"{first}\n{protocol.rollouts(records)}"


def _margins(records: Sequence[Record]) -> Mapping[tuple[str, str], float]:
    """Return the least ratio over 16-bit LoRA that is claimed, by arm and metric."""
    names = {record.target for record in records}
    return {
        (claim.arms[0], claim.metric): claim.bound
        for target in TARGETS
        if target.name in names
        for claim in target.claims
        if claim.log and claim.arms[1] == throughput.BASE
    }  # fmt: skip
