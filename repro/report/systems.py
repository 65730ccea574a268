"""The blocks of `docs/systems.md`: measurements of the systems tier and the paper's numbers.

Each block is written from blessed records alone, of the paper's card where there are some. A
picture is linked where it has been drawn, so a page is renewed after its pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from repro.judge.check import Checked
from repro.report.numbers import device_title, quantity, span
from repro.report.systems_rates import RANK, against, comparisons, printed_speedups, ratio_span
from repro.report.systems_tables import rate_table, scaling_table, step_table
from repro.report.tables import (
    NOTHING,
    Line,
    bars_table,
    by_device,
    device_of,
    origin_text,
    side_by_side,
)
from repro.report.tidy import rendered
from repro.report.verdict_words import (
    CLAIMS,
    Kind,
    all_bars,
    counted,
    kind_of,
    of_kind,
    stated_bars,
)
from repro.spec.tier import Tier

# The paper's card; measurements of other cards are in the table that `check --table` writes.
_PAPERS_CARD = "h100"
Writer = Callable[[], list[str]]
Table = Callable[[Checked, Path], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of the page: its question, targets, table, picture, and whether it is unfolded."""

    asks: str
    targets: tuple[str, ...]
    written: Table
    picture: str = ""
    shown: bool = False


def _bars(checked: Checked, expected: Path) -> list[str]:
    return bars_table([checked], expected)


_TABLES = ("table5", "table6", "table7", "table8")
_FOLDED = ("table6_folded", "table8_folded", "rollout_folded")
_RL_STEPS = ("table3_rl", "table3_rl_large", "table3_32b_rl")
_SIZES = ("table3_3b", "table3", "table3_14b", "table3_32b")
BLOCKS = {
    "tables": Block(asks="rollout by batch, Tables 5 to 8", targets=_TABLES, written=rate_table,
                    picture="tables_5_to_8_throughput"),
    "final": Block(asks="rollout at 7B, the final abstract", targets=("final_abstract",),
                   written=rate_table),
    "table9": Block(asks="rollout by LoRA rank, Table 9", targets=("table9",), written=rate_table,
                    picture="table9_ranks"),
    "figure11": Block(asks="rollout by LoRA rank, Fig. 11", targets=("figure11",),
                      written=rate_table, picture="figure11_ranks"),
    "rollout": Block(asks="rollout of up to 256 rows", targets=("rollout",), written=rate_table,
                     picture="rollout_throughput", shown=True),
    "folded": Block(asks="rollout, Tables 6 and 8, up to 256 rows", targets=_FOLDED,
                    written=rate_table),
    "vllm": Block(asks="rollout of up to 256 rows", targets=("rollout_vllm", "rollout_vllm_16bit"),
                  written=rate_table),
    "ranks": Block(asks="rollout with ranks up to 128", targets=("rollout_ranks",),
                   written=rate_table),
    "steps": Block(asks="GRPO step, Table 3", targets=_SIZES, written=step_table,
                   picture="table3_steps"),
    "steps_rl": Block(asks="GRPO step with many completions", targets=_RL_STEPS,
                      written=step_table),
    "steps_folded": Block(asks="GRPO step, 16-bit LoRA folded in", written=step_table,
                          targets=("table3_rl_folded", "step_lengths_folded")),
    "steps_lengths": Block(asks="GRPO step, rows of different lengths", written=step_table,
                           targets=("step_lengths", "step_lengths_32b", "table3_spread")),
    "steps_ranks": Block(asks="GRPO step on several GPUs", written=scaling_table,
                         targets=("scaling", "scaling_4")),
    "steps_arms": Block(asks="GRPO step, other formats and products", targets=("table3_arms",),
                        written=step_table),
    "steps_full": Block(asks="GRPO step, full fine-tuning", targets=("table3_full",),
                        written=step_table),
    "memory": Block(asks="memory of a GRPO step", written=_bars, picture="memory",
                    targets=("memory", "memory_dense", "memory_formats", "memory_budgets")),
}  # fmt: skip
KERNELS = "kernels_roofline"
_OWN_QLORA = "nf4_lora"
_AGAINST = {
    "bf16_lora": "QeRL over 16-bit LoRA",
    "bf16_lora_folded": "QeRL over 16-bit LoRA folded in",
    _OWN_QLORA: "QeRL over QLoRA by this project's kernels",
    "nf4_lora_bitsandbytes": "QeRL over QLoRA by bitsandbytes",
    "nvfp4_lora": "one rank over another",
    "nvfp4_lora_vllm": "QeRL over vLLM's own engine",
    "bf16_lora_vllm": "QeRL over 16-bit LoRA in vLLM",
    "bf16_lora_folded_vllm": "QeRL over 16-bit LoRA folded in, in vLLM",
    "bf16_lora_fp8_vllm": "QeRL over FP8 with LoRA in vLLM",
}


def systems_writers(
    judged: Callable[[], Sequence[Checked]], expected: Path, page: Path
) -> dict[str, Writer]:
    """Return the writer of each block of the page, whose pictures are in `figures/` beside it.

    `judged` gives the checks of all blessed records.
    """

    def checks(block: str) -> list[Checked]:
        targets = BLOCKS[block].targets
        return [item for item in judged() if item.selection.target.name in targets]

    def writer(name: str) -> Writer:
        return lambda: _block(BLOCKS[name], checks(name), expected, page)

    return {
        **{f"systems_{name}": writer(name) for name in BLOCKS},
        "systems_kernels": lambda: _kernels(judged(), page),
        "systems_short": lambda: _short({name: checks(name) for name in BLOCKS}, expected),
        "systems_answer": lambda: _answer([c for name in BLOCKS for c in checks(name)], expected),
    }


def _block(block: Block, checks: Sequence[Checked], expected: Path, page: Path) -> list[str]:
    """Return each target's result and table, the targets not blessed, and the picture.

    Each target is shown on one device: the paper's card where it was measured on it.
    """
    tables, absent, devices = [], [], set()
    for name in block.targets:
        of_target = {device_of(c): c for c in checks if c.selection.target.name == name
                     and c.evidence.count}  # fmt: skip
        if not of_target:
            absent.append(f"`{name}`")
            continue
        device = min(of_target, key=_papers_card_first)
        checked = of_target[device]
        devices.add(device)
        tables.append({
            "title": checked.selection.target.title,
            "device": "" if _PAPERS_CARD in device else device_title(device),
            "measured": ", ".join(filter(None, (
                measured for _, (measured, *_) in _short_lines("", [checked], expected)))),
            "counts": counted([*of_kind(checked, *CLAIMS), *all_bars(checked, expected)]),
            "origin": origin_text(checked),
            "table": "\n".join(block.written(checked, expected)),
        })  # fmt: skip
    pictures = _pictures(page, block.picture, devices)
    return rendered(
        "systems_block.md", tables=tables, absent=absent, pictures=pictures, shown=block.shown
    )


def _kernels(checks: Sequence[Checked], page: Path) -> list[str]:
    """Return the picture of the kernels, whose tables have a page of their own."""
    devices = by_device(item for item in checks if item.selection.target.name == "kernels")
    pictures = _pictures(page, KERNELS, devices)
    if not pictures:
        return NOTHING
    return rendered("systems_block.md", tables=(), absent=(), pictures=pictures, shown=False)


def _pictures(page: Path, name: str, devices: Iterable[str]) -> dict[str, str]:
    """Return the links to the pictures of the paper's card, by their titles."""
    links = {}
    for device in (item for item in sorted(devices) if _PAPERS_CARD in item):
        link = f"figures/{Tier.SYSTEMS.value}_{device}_{name}.svg"
        if name and (page.parent / link).is_file():
            links[f"{name.replace('_', ' ')}, {device_title(device)}"] = link
    return links


def _answer(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return the counts of claims and bars, a sentence per device.

    Claims that a faster QLoRA than the paper's contradicts are named.
    """
    lines = []
    for device, items in by_device(checks).items():
        claims = counted(verdict for item in items for verdict in of_kind(item, Kind.PAPER))
        bars = counted(verdict for item in items for verdict in all_bars(item, expected))
        stated = [pair for item in items for pair in item.statements()]
        wrong = [c for c, v in stated if v.status == "contradicted" and kind_of(v) is Kind.PAPER]
        ours = sum(any(RANK.sub("", arm) == _OWN_QLORA for arm in claim.arms) for claim in wrong)
        aside = f" ({ours} about QLoRA by this project's kernels)" if ours else ""
        lines += [f"**On one {device_title(device)}: claims of the paper {claims}{aside}; bars of "
                  f"this suite, kernels apart, {bars}.**", ""]  # fmt: skip
    return lines[:-1] or NOTHING


def _short(blocks: Mapping[str, Sequence[Checked]], expected: Path) -> list[str]:
    """Return a line for each question: the paper's ratios, ours, and the verdicts."""
    parts: dict[str, list[Line]] = {}
    for name, checks in blocks.items():
        for device, items in by_device(checks).items():
            parts.setdefault(device, []).extend(_short_lines(BLOCKS[name].asks, items, expected))
    heads, own = ["question", "ratio in the paper"], ["measured", "claims, open questions", "bars"]
    written: list[str] = []
    for device in sorted(parts, key=_papers_card_first):
        lines = side_by_side(heads, own, {device: parts[device]})
        if written:
            summary = f"<summary>The same on one {device_title(device)}</summary>"
            lines = ["<details>", summary, "", *lines, "</details>", ""]
        written += lines
    return written[:-1] or NOTHING


def _papers_card_first(device: str) -> tuple[bool, str]:
    return _PAPERS_CARD not in device, device


def _short_lines(asks: str, checks: Sequence[Checked], expected: Path) -> list[Line]:
    stated = [bar.verdict for checked in checks for bar in stated_bars(checked, expected)]
    compared = [item for checked in checks for item in comparisons(checked, expected)]
    if not compared:
        claims = [item for checked in checks for item in of_kind(checked, *CLAIMS)]
        paper, measured = step_spans(checks, expected)
        measured = measured or _headline(checks[0])
        return [((asks, paper), (measured, counted(claims), counted(stated)))]
    lines: list[Line] = []
    for slow, items in against(compared).items():
        verdicts = [item.verdict for item in items if item.verdict is not None]
        claims = [verdict for verdict in verdicts if kind_of(verdict) is not Kind.BAR]
        bars = [verdict for verdict in verdicts if kind_of(verdict) is Kind.BAR]
        common = (f"{asks}: {_AGAINST.get(slow, slow)}", span(item.paper for item in items))
        lines.append((common, (ratio_span(items), counted(claims), counted([*bars, *stated]))))
        # Stated bars are of the arms, not of a pair: they are counted once.
        stated = []
    return lines


def step_spans(checks: Sequence[Checked], expected: Path) -> tuple[str, str]:
    """Return the spans of steps' speed-ups, the paper's and ours; empty for other targets.

    Where no whole step was timed, those of updates.
    """
    for prefix in ("speedup_", "update_ratio_"):
        paper, measured = _ratios(checks, expected, prefix)
        if measured:
            return span(paper), span(measured)
    return "", ""


def _ratios(
    checks: Sequence[Checked], expected: Path, prefix: str
) -> tuple[list[float | None], list[float | None]]:
    """Return QeRL's ratios whose metrics begin with `prefix`: the paper's, and ours."""
    measured: list[float | None] = []
    paper: list[float | None] = []
    for checked in checks:
        target = checked.selection.target
        printed = {
            f"speedup_{model}_b{batch}": value
            for (arm, model, batch), value in printed_speedups(target.paper_file, expected).items()
            if arm == "nvfp4_lora"
        }
        for metric in target.metrics:
            values = checked.evidence.values(metric.name).get("nvfp4_lora")
            if metric.name.startswith(prefix) and values:
                measured.append(median(values.values()))
                paper.append(printed.get(metric.name))
    return paper, measured


def _headline(checked: Checked) -> str:
    """Return the target's own first number, of the arm that it is about: its last."""
    target = checked.selection.target
    if target.headline is None:
        return ""
    metric = target.metric(target.headline)
    of_arm = checked.evidence.values(metric.name).get(target.arms[-1].name, {})
    return f"{metric.title} {quantity(median(of_arm.values()), metric.unit)}" if of_arm else ""
