"""The tables of `docs/systems.md`, from blessed records: questions, rollouts, GRPO steps.

Every cell that a claim or bar is about, with its interval, is on the page of claims and in the
tables that `check --table` writes; here are the ratios that most people ask for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

from repro.evidence.origins import grouped_by
from repro.evidence.verdicts.verdict import ONE_PROCESS, Verdict
from repro.judge.check import Checked
from repro.report.numbers import device_heads, device_title, span
from repro.report.systems_rates import comparisons, measured_rates, printed_speedup, ratio_span
from repro.report.tables import NOTHING, by_device, of_targets, table
from repro.report.verdict_words import CLAIMS, Kind, all_bars, counted, kind_of, notes_on, of_kind
from repro.spec.claim import Metric
from repro.spec.shapes import SHAPES
from repro.targets.kernel_speed import KERNELS, SCALE, name_of
from repro.targets.speed import unranked

Writer = Callable[[], list[str]]
SMALL_BATCHES = ("table5", "table6", "table7", "table8")
RL_STEPS = ("table3_rl", "table3_rl_large", "table3_32b_rl")
# Questions of the first table, each with the targets that answer it.
QUESTIONS = {
    "rollout, batch 1 to 8 (Tables 5 to 8)": SMALL_BATCHES,
    "rollout by LoRA rank (Table 9)": ("table9",),
    "rollout by LoRA rank (Fig. 11)": ("figure11",),
    "rollout, batch 1 to 256": ("rollout",),
    "rollout, this engine and vLLM's": ("rollout_vllm", "rollout_vllm_16bit", "rollout_vllm_fp8"),
    "rollout, merged baseline": ("table6_folded", "table8_folded", "rollout_folded"),
    "rollout, the final abstract": ("final_abstract",),
    "step, merged baseline": ("table3_rl_folded", "step_lengths_folded"),
    "GRPO step (Table 3)": ("table3_3b", "table3", "table3_14b", "table3_32b"),
    "GRPO step, 128 or 256 completions": RL_STEPS,
    "GRPO step, completions of different lengths": (
        "step_lengths",
        "step_lengths_32b",
        "table3_spread",
    ),
}
_RATES = (*SMALL_BATCHES, "rollout")
_STEPS = [name for question, names in QUESTIONS.items() if "GRPO" in question for name in names]
_COMPARED = {"bf16_lora": "16-bit LoRA", "nvfp4_lora": "QeRL"}
_OWN_QLORA = "nf4_lora"
_AGAINST = {
    "bf16_lora": "16-bit LoRA",
    "bf16_lora_folded": "16-bit LoRA folded in",
    "bf16_lora_vllm": "16-bit LoRA, vLLM",
    "bf16_lora_folded_vllm": "16-bit LoRA folded in, vLLM",
    "bf16_lora_fp8_vllm": "FP8 with LoRA, vLLM",
    _OWN_QLORA: "QLoRA, our kernels",
    "nf4_lora_bitsandbytes": "QLoRA, bitsandbytes",
    "nvfp4_lora_vllm": "NVFP4 LoRA, vLLM",
}
# The paper's card comes first.
_PAPERS_CARD = "h100"


def systems_writers(judged: Callable[[], Sequence[Checked]], expected: Path) -> dict[str, Writer]:
    """Return the writer of each block of the page; `judged` gives all checks of records."""

    def of(*names: str) -> list[Checked]:
        found = of_targets(judged(), *names)
        return sorted(found, key=lambda one: _PAPERS_CARD not in one.evidence.device)

    every = [name for names in QUESTIONS.values() for name in names]
    return {
        "systems_answer": lambda: _answer(of(*every), expected),
        "systems_short": lambda: _questions(of(*every), expected),
        "systems_rates": lambda: _rates(of(*_RATES)),
        "systems_steps": lambda: _steps(of(*_STEPS), expected),
        "kernels": lambda: _kernels(of(KERNELS.name)),
    }


def _answer(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return a sentence per device: how many claims hold, and how many targets are missed."""
    lines = []
    for device, items in by_device(checks).items():
        claims = _counted_once([v for item in items for v in of_kind(item, Kind.PAPER)])
        bars = [verdict for item in items for verdict in all_bars(item, expected)]
        met = sum(verdict.status == "reproduced" for verdict in bars)
        wrong = [
            [unranked(item.selection.target.arm(arm)) for arm in claim.arms]
            for item in items
            for claim, v in item.statements()
            if v.status == "contradicted" and kind_of(v) is Kind.PAPER
        ]
        ours = sum(_OWN_QLORA in arms for arms in wrong)
        which = "Those that fail" if ours == len(wrong) else f"{ours} of those that fail"
        aside = f" {which} compare QeRL with QLoRA on our own, faster kernels." if ours else ""
        lines += [
            f"**On one {device_title(device)}, of the paper's speed claims {claims}.**{aside}"
            f" {met} of {len(bars)} performance targets of our own are met.",
            "",
        ]
    return lines[:-1] or NOTHING


def _questions(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return a row per question and slower arm: the paper's ratios, ours, the plain verdicts."""
    devices = device_heads(by_device(checks))
    cells: dict[tuple[str, str], dict[str, tuple[str, str, str]]] = {}
    for question, names in QUESTIONS.items():
        of_question = [c for c in checks if c.selection.target.name in names]
        for device, items in by_device(of_question).items():
            for slow, cell in _ratios_of(items, expected).items():
                cells.setdefault((question, slow), {})[device] = cell
    if not cells:
        return NOTHING
    rows = []
    for (question, slow), own in cells.items():
        shown = [": ".join(filter(None, own.get(device, ())[1:])) for device in devices]
        rows.append([question, _AGAINST.get(slow, slow), next(iter(own.values()))[0], *shown])
    unanswered = [question for question in QUESTIONS if question not in {q for q, _ in cells}]
    rows += [[question, "", "", *["not run"] * len(devices)] for question in unanswered]
    return table(["question", "compared with", "paper", *devices.values()], rows)


def _ratios_of(items: Sequence[Checked], expected: Path) -> dict[str, tuple[str, str, str]]:
    """Return the paper's span, ours and the counted verdicts, by the slower arm."""
    compared = [pair for item in items for pair in comparisons(item, expected)]
    if not compared:
        paper, measured = step_spans(items, expected)
        stated = [v for item in items for v in of_kind(item, *CLAIMS)]
        claims = _counted_once(stated)
        if any(item.selection.target.name.endswith("_folded") for item in items):
            return {"bf16_lora_folded": ("", span(v.effect for v in stated), claims)}
        return {"bf16_lora": (paper, measured, claims)} if measured else {}
    cells = {}
    for slow, pairs in grouped_by(compared, lambda pair: pair.slow).items():
        verdicts = [pair.verdict for pair in pairs if pair.verdict is not None]
        claims = _counted_once([one for one in verdicts if kind_of(one) is not Kind.BAR])
        paper = span(pair.paper for pair in pairs)
        cells[slow] = (paper, ratio_span(pairs), claims)
    return cells


def _counted_once(verdicts: Sequence[Verdict]) -> str:
    """Return the counts with the marks behind them, but for one process, which the page names."""
    plain = counted(dataclasses.replace(verdict, marks={}) for verdict in verdicts)
    return f"{plain}{notes_on(verdicts, but=ONE_PROCESS)}"


def _rates(checks: Sequence[Checked]) -> list[str]:
    """Return tokens per second by model and batch: 16-bit LoRA and QeRL on each device."""
    rates: dict[tuple[str, int], dict[tuple[str, str], str]] = {}
    for checked in checks:
        for model, batch, arm, values in measured_rates(checked):
            own = rates.setdefault((model, batch), {})
            # A table of the paper's comes before the target of larger batches.
            own.setdefault((checked.evidence.device, arm), f"{fmean(values.values()):,.0f}")
    devices = device_heads(by_device(checks))
    rows = [
        [
            model.upper(),
            f"{batch}",
            *(
                rates[model, batch].get((device, arm), "")
                for device in devices
                for arm in _COMPARED
            ),
        ]
        for model, batch in sorted(rates, key=lambda cell: ([*SHAPES].index(cell[0]), cell[1]))
    ]
    heads = [f"{title}, {label}" for title in devices.values() for label in _COMPARED.values()]
    return table(["model", "batch", *heads], rows) or NOTHING


def _steps(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return seconds and peak memory of steps on the paper's card, and the speed-up."""
    rows = []
    first = {c.selection.target.name: c for c in reversed(checks)}
    for checked in (first[name] for name in _STEPS if name in first):
        for metric, measured, paper in _speedups(checked, expected):
            at, every = (metric.model, metric.point), checked.selection.target.metrics
            beside = {one.quantity: one for one in every if (one.model, one.point) == at}
            rows.append(
                [
                    f"{metric.model.upper()}, {metric.point}",
                    *(_middle(checked, beside["step_seconds"], arm) for arm in _COMPARED),
                    f"{measured:.2f}x",
                    "" if paper is None else f"{paper:g}x",
                    *(_middle(checked, beside["peak_bytes"], arm) for arm in _COMPARED),
                ]
            )
    heads = ["step", "16-bit LoRA", "QeRL", "speed-up", "paper", "peak, 16-bit LoRA", "peak, QeRL"]
    return table(heads, rows) or NOTHING


def _kernels(checks: Sequence[Checked]) -> list[str]:
    """Return the speed of NVFP4's linear layers over bfloat16's, by model, device and rows."""
    rows = []
    for block in SCALE.blocks:
        for device, (checked, *_) in by_device(checks).items():
            found = checked.evidence.values
            cells = [found(name_of("ratio", block, count)).get("nvfp4", {}) for count in SCALE.rows]
            means = [f"{fmean(values.values()):.2f}" if values else "" for values in cells]
            rows.append([f"{block.upper()}, {device_heads([device])[device]}", *means])
    return table(["rows of x", *map(str, SCALE.rows)], rows) or NOTHING


def _middle(checked: Checked, metric: Metric, arm: str) -> str:
    values = checked.evidence.values(metric.name).get(arm)
    if not values:
        return ""
    middle = median(values.values())
    if metric.unit == "bytes":
        return f"{middle / 1e9:.1f} GB"
    return f"{middle:.1f} s" if middle >= 10 else f"{middle:.2f} s"


def step_spans(checks: Iterable[Checked], expected: Path) -> tuple[str, str]:
    """Return the spans of QeRL's speed-ups of a step, the paper's and ours; empty without any."""
    found = [one for checked in checks for one in _speedups(checked, expected)]
    return span(paper for _, _, paper in found), span(measured for _, measured, _ in found)


def _speedups(checked: Checked, expected: Path) -> Iterator[tuple[Metric, float, float | None]]:
    """Yield each metric of QeRL's speed-up of a step with its value and the paper's, or None."""
    target = checked.selection.target
    for metric in (metric for metric in target.metrics if metric.quantity == "speedup"):
        if ratios := checked.evidence.values(metric.name).get("nvfp4_lora"):
            paper = printed_speedup(metric, "nvfp4_lora", target.paper_file, expected)
            yield metric, median(ratios.values()), paper
