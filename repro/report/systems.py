"""The blocks of `docs/systems.md`: what the systems tier measured, beside the paper's numbers.

Each block is written from blessed records alone, a part a device. A picture is linked where it has
been drawn, so a page is renewed after its pictures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from repro.check import Checked
from repro.evidence.paper import paper_cells
from repro.report.numbers import origin_text, quantity, stated_bars
from repro.report.systems_rates import against, comparisons, span
from repro.report.systems_tables import bar_table, rate_table, step_table, table, update_table
from repro.spec.tier import Tier

Writer = Callable[[], list[str]]
Table = Callable[[Checked, Path], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of the page: what it asks, of which targets, with which table and picture."""

    asks: str
    targets: tuple[str, ...]
    written: Table
    picture: str = ""


_TABLES = ("table5", "table6", "table7", "table8")
_SIZES = ("table3", "table3_14b", "table3_sizes")
BLOCKS = {
    "tables": Block(asks="rollout by batch, Tables 5 to 8", targets=_TABLES, written=rate_table,
                    picture="tables_5_to_8_throughput"),
    "table9": Block(asks="rollout by LoRA rank, Table 9", targets=("table9",), written=rate_table,
                    picture="table9_ranks"),
    "figure11": Block(asks="rollout by LoRA rank, Fig. 11", targets=("figure11",),
                      written=rate_table, picture="figure11_ranks"),
    "rollout": Block(asks="rollout of up to 256 rows", targets=("rollout",), written=rate_table,
                     picture="rollout_throughput"),
    "ranks": Block(asks="rollout with ranks up to 128", targets=("rollout_ranks",),
                   written=rate_table, picture="rollout_ranks"),
    "scheduling": Block(asks="sharing, scheduling, parity, noise, faults",
                        targets=("rollout_scheduling",), written=bar_table),
    "steps": Block(asks="GRPO step, Table 3", targets=_SIZES, written=step_table,
                   picture="table3_steps"),
    "steps_rl": Block(asks="GRPO step with many completions", written=step_table,
                      targets=("table3_rl", "table3_rl_large"), picture="rl_steps"),
    "steps_arms": Block(asks="GRPO step, other formats and products", targets=("table3_arms",),
                        written=step_table, picture="arms_steps"),
    "steps_full": Block(asks="GRPO step, full fine-tuning", targets=("table3_full",),
                        written=step_table, picture="full_steps"),
    "steps_updates": Block(asks="update alone: forward, backward, optimiser", written=update_table,
                           targets=("table3_updates", "table3_kept")),
    "memory": Block(asks="memory of a GRPO step", written=bar_table, picture="memory",
                    targets=("memory", "memory_dense", "memory_formats", "memory_budgets")),
    "checkpoint": Block(asks="a checkpoint's way: written, quantised, loaded, stepped",
                        targets=("checkpoint_path",), written=bar_table),
}  # fmt: skip
_AGAINST = {
    "bf16_lora": "QeRL over 16-bit LoRA",
    "nf4_lora": "QeRL over QLoRA by this project's kernels",
    "nf4_lora_bitsandbytes": "QeRL over QLoRA by bitsandbytes",
    "nvfp4_lora": "one rank over another",
}


def systems_writers(
    judged: Callable[[], Sequence[Checked]], expected: Path, page: Path
) -> dict[str, Writer]:
    """Return what writes each block of the page, by its name there.

    Parameters
    ----------
    judged
        Gives the checks of all blessed records.
    page
        Where the page lies: its pictures are in `figures/` beside it.
    """

    def checks(block: str) -> list[Checked]:
        return [
            checked
            for checked in judged()
            if checked.selection.target.name in BLOCKS[block].targets and checked.evidence.count
        ]

    def writer(name: str) -> Writer:
        return lambda: _block(BLOCKS[name], checks(name), expected, page)

    def short() -> list[str]:
        return _short({name: checks(name) for name in BLOCKS}, expected)

    return {f"systems_{name}": writer(name) for name in BLOCKS} | {"systems_short": short}


def _block(block: Block, checks: Sequence[Checked], expected: Path, page: Path) -> list[str]:
    """Return title, origin and table of each check, what is not blessed, and the picture."""
    lines = []
    for checked in checks:
        lines += [f"**{checked.selection.target.title}.** {origin_text(checked)}", ""]
        lines += block.written(checked, expected)
    known = {checked.selection.target.name for checked in checks}
    left = [f"`{name}`" for name in block.targets if name not in known]
    if left:
        lines += [f"No records are blessed yet of {', '.join(left)}.", ""]
    lines += _picture(page, block.picture)
    return lines[:-1] if lines[-1] == "" else lines


def _picture(page: Path, name: str) -> list[str]:
    link = f"figures/{Tier.SYSTEMS.value}_{name}.svg"
    drawn = bool(name) and (page.parent / link).is_file()
    return [f"![{name.replace('_', ' ')}]({link})"] if drawn else []


def _short(groups: Mapping[str, Sequence[Checked]], expected: Path) -> list[str]:
    """Return a line for each question: the paper's ratios, ours, and the verdicts."""
    rows = []
    for name, checks in groups.items():
        bars = [verdict for checked in checks for _, verdict in stated_bars(checked, expected)]
        held = _counted(verdict.status for verdict in bars)
        asks = BLOCKS[name].asks
        found = [item for checked in checks for item in comparisons(checked, expected)]
        for slow, items in against(found).items():
            told = _counted(item.verdict.status for item in items if item.verdict is not None)
            spans = [span(item.paper for item in items), span(item.ratio.value for item in items)]
            rows.append([f"{asks}: {_AGAINST.get(slow, slow)}", *spans, told, held])
            # The bars are of the arms, not of a pair: they are counted once.
            held = ""
        if checks and not found:
            printed, measured = _step_spans(checks, expected)
            measured = measured or "; ".join(_headline(checked) for checked in checks)
            rows.append([asks, printed, measured, _claims(checks), held])
    heads = ["question", "ratio in the paper", "measured", "claims", "this suite's bars"]
    return table(heads, rows)[:-1] if rows else ["No records are blessed yet."]


def _step_spans(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return the spans of steps' speed-ups, the paper's and ours; empty for other targets.

    Where no whole step was timed, those of updates.
    """
    printed, measured = _ratios(checks, expected, "speedup_")
    if not measured:
        printed, measured = _ratios(checks, expected, "update_ratio_")
    return [span(printed), span(measured)]


def _ratios(
    checks: Sequence[Checked], expected: Path, prefix: str
) -> tuple[list[float | None], list[float | None]]:
    """Return QeRL's ratios whose metrics begin with `prefix`: the paper's, and ours."""
    measured: list[float | None] = []
    printed: list[float | None] = []
    for checked in checks:
        target = checked.selection.target
        cells = {
            f"speedup_{cell.column.lower()}_{cell.quantity.removeprefix('speedup_batch_')}": cell
            for cell in paper_cells(expected, target.paper_file)
            if cell.arm == "nvfp4_lora" and cell.quantity.startswith("speedup_batch_")
        }
        for metric in target.metrics:
            if metric.name.startswith(prefix):
                values = checked.evidence.values(metric.name).get("nvfp4_lora", {})
                measured += [median(values.values())] if values else []
                cell = cells.get(metric.name.replace("_b", "_"))
                printed += [cell.value] if values and cell is not None else []
    return printed, measured


def _headline(checked: Checked) -> str:
    """Return the target's own first number, of the arm that it is about: its last."""
    target = checked.selection.target
    if target.headline is None:
        return ""
    metric = target.metric(target.headline)
    of_arm = checked.evidence.values(metric.name).get(target.arms[-1].name, {})
    return f"{metric.title} {quantity(median(of_arm.values()), metric.unit)}" if of_arm else ""


def _claims(checks: Sequence[Checked]) -> str:
    return _counted(
        verdict.status
        for checked in checks
        for verdict in checked.verdicts
        if verdict.about in ("claim", "mechanism")
    )


def _counted(statuses: Iterable[str]) -> str:
    counts = Counter(statuses)
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
