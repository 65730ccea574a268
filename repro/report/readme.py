"""README's face: six questions, each with the paper's value, ours, and the verdict.

All six are always there: a number that nobody has measured is an answer, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from repro.evidence import printed
from repro.evidence.paper import paper_cells
from repro.evidence.verdicts.verdict import Verdict
from repro.judge.check import Checked
from repro.report.doses import doses, treatment
from repro.report.numbers import bar_text, cell_text, device_heads, quantity, span
from repro.report.systems import BLOCKS, step_spans
from repro.report.systems_rates import comparisons, printed_rates, ratio_span
from repro.report.tables import NOTHING, device_of, table
from repro.report.verdicts import CLAIMS, counted, labelled, of_kind, stated_bars
from repro.spec.tier import Tier
from repro.targets import find
from repro.targets.table1 import BF16_LORA, NVFP4_LORA, NVFP4_LORA_AQN, TABLE1

# The checks of one device at one tier, by target.
Checks = Mapping[str, Checked]
_QERL, _MODEL = "nvfp4_lora_aqn", "7B"


def answer_rows(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return the six rows; a cell has a line for each device that has measured it."""
    devices: dict[str, dict[Tier, dict[str, Checked]]] = {}
    for checked in checks:
        tier = checked.selection.tier
        if checked.evidence.count and tier is not Tier.SMOKE:
            tiers = devices.setdefault(device_of(checked), {})
            tiers.setdefault(tier, {})[checked.selection.target.name] = checked
    if not devices:
        return NOTHING
    names = device_heads(devices)
    rows = []
    for tier, question, row in _ROWS:
        paper, _, absent = row({}, expected)
        said = {name: row(devices[device].get(tier, {}), expected)
                for device, name in names.items()}  # fmt: skip
        measured = {name: cells[1] for name, cells in said.items() if cells[1]}
        verdicts = {name: said[name][2] for name in measured} or {"": absent}
        one = verdicts.values() if len(set(verdicts.values())) == 1 else ()
        verdict = next(iter(one), _per_device(verdicts))
        rows.append([question, paper, tier.value, _per_device(measured), verdict])
    return table(["question", "paper", "tier", "measured", "verdict"], rows)[:-1]


def _per_device(said: Mapping[str, str]) -> str:
    return "<br>".join(f"{name}: {text}" for name, text in said.items())


# What a row says: the paper's value, what was measured, and the verdict.
Cells = tuple[str, str, str]
_NOT_RUN = "not run"
_NOT_TESTED = "not tested on a real model yet ([small policies](docs/proxy_study.md))"


def _small_batches(checks: Checks, expected: Path) -> Cells:
    pairs = [
        item
        for name in BLOCKS["tables"].targets
        if name in checks
        for item in comparisons(checks[name], expected)
    ]
    verdicts = [item.verdict for item in pairs if item.verdict is not None]
    measured = ratio_span(pairs)
    return _papers_ratios(expected), measured, counted(verdicts) or _NOT_RUN


def _papers_ratios(expected: Path) -> str:
    ratios = []
    for name in BLOCKS["tables"].targets:
        rates = printed_rates(find(name), expected)
        ratios += [
            rate / rates[model, BF16_LORA.name, batch]
            for (model, arm, batch), rate in rates.items()
            if arm == NVFP4_LORA.name
        ]
    return span(ratios)


def _large_batches(checks: Checks, expected: Path) -> Cells:
    pairs = comparisons(checks["rollout"], expected) if "rollout" in checks else []
    pairs = [item for item in pairs if 128 <= item.place <= 256]
    verdicts = [item.verdict for item in pairs if item.verdict is not None]
    steps = [checks[name] for name in BLOCKS["steps_rl"].targets if name in checks]
    for checked in steps:
        whole = checked.selection.target.headline
        verdicts += of_kind(checked, *CLAIMS)
        verdicts += [bar.verdict for bar in stated_bars(checked, expected) if bar.key[1] == whole]
    rollout, step = ratio_span(pairs), step_spans(steps, expected)[1] if steps else ""
    measured = f"rollout {rollout or _NOT_RUN}, step {step or _NOT_RUN}" if rollout or step else ""
    return "batches end at 8", measured, counted(verdicts) or _NOT_RUN


def _memory(checks: Checks, expected: Path) -> Cells:
    measured, verdict = "", _NOT_RUN
    for bar in stated_bars(checks["memory"], expected) if "memory" in checks else []:
        if bar.key == (NVFP4_LORA.name, checks["memory"].selection.target.headline):
            measured = f"peak {quantity(bar.verdict.effect or 0.0, bar.unit)}"
            verdict = f"{labelled(bar.verdict)} ({bar_text(bar.expectation, bar.unit)})"
    return "fits (sections 1, 4.3)", measured, verdict


def _entropy(checks: Checks, expected: Path) -> Cells:
    arms = (NVFP4_LORA.name, BF16_LORA.name)
    values = next(iter(printed.differences(expected, "dose_coder_0_5b", [arms]).values()))
    measured, verdict = _on_checkpoints(checks, {"": "nvfp4_more_entropy_finished"})
    measured_at = checks.get("dose_coder_0_5b")
    if measured_at is not None and measured:
        rise = doses(measured_at)[NVFP4_LORA.name].rise
        measured += f" (0.5B; treatment {treatment(rise, expected)})"
    return f"{values[arms]:+.2g} nats (NVFP4)", measured, verdict


def _accuracy(checks: Checks, expected: Path) -> Cells:
    named = {
        "QeRL": ("qerl_beats_lora", (NVFP4_LORA_AQN.name, BF16_LORA.name)),
        "AQN": ("aqn_helps", (NVFP4_LORA_AQN.name, NVFP4_LORA.name)),
    }
    arms = [pair for _, pair in named.values()]
    by_place = printed.differences(expected, TABLE1.name, arms)
    values = next(of for place, of in by_place.items() if place.words == _MODEL)
    paper = ", ".join(f"{word} {values[pair]:+.3g}" for word, (_, pair) in named.items())
    claims = {word: claim for word, (claim, _) in named.items()}
    return f"{paper} points ({_MODEL})", *_on_checkpoints(checks, claims)


def _on_checkpoints(checks: Checks, claims: Mapping[str, str]) -> tuple[str, str]:
    """Return the effects of claims on published checkpoints, and their verdicts counted.

    Parameters
    ----------
    claims
        The claims' names, by what their effects are called.
    """
    measured, verdicts = [], []
    for checked in checks.values():
        by_name = {verdict.name: verdict for verdict in checked.verdicts}
        for word, name in claims.items():
            if name in by_name and by_name[name].status != "not run":
                verdicts.append(by_name[name])
                effect = f"{_effect(by_name[name])} {by_name[name].unit}"
                measured.append(f"{word} {effect}".strip())
    return ", ".join(measured), counted(verdicts) or _NOT_TESTED


def _effect(verdict: Verdict) -> str:
    if verdict.effect is None:
        return "?"
    if verdict.low is None or verdict.high is None:
        return f"{verdict.effect:+.2g}"
    return f"{verdict.effect:+.2g} ({verdict.low:+.2g} to {verdict.high:+.2g})"


def _papers_number(checks: Checks, expected: Path) -> Cells:
    (cell,) = (
        cell
        for cell in paper_cells(expected, TABLE1.paper_file)
        if (cell.arm, cell.column, cell.quantity) == (_QERL, _MODEL, "accuracy")
    )
    paper = f"{cell.value:g} %"
    if TABLE1.name not in checks:
        return paper, "", f"{_NOT_RUN}: needs checkpoint and GPU"
    checked = checks[TABLE1.name]
    verdicts = [item for item in checked.verdicts if item.name == f"{_QERL}.accuracy"]
    values = checked.evidence.values("accuracy").get(_QERL, {})
    return paper, cell_text([*values.values()]), counted(verdicts)


_ROWS: tuple[tuple[Tier, str, Callable[[Checks, Path], Cells]], ...] = (
    (
        Tier.SYSTEMS,
        "[Rollout](docs/systems.md#rollout-by-batch-tables-5-to-8), QeRL over 16-bit LoRA, at "
        "batches up to 8",
        _small_batches,
    ),
    (
        Tier.SYSTEMS,
        "[Rollout](docs/systems.md#rollout-at-the-batches-of-reinforcement-learning) and "
        "[step](docs/systems.md#a-grpo-step-table-3), the same, at 128 to 256 completions",
        _large_batches,
    ),
    (
        Tier.SYSTEMS,
        "[32B on one 80 GB card](docs/systems.md#memory), memory of a GRPO step",
        _memory,
    ),
    (
        Tier.MINI,
        "[Entropy](docs/learning.md), 4-bit weights over BF16, early in training",
        _entropy,
    ),
    (
        Tier.MINI,
        "[Accuracy](docs/learning.md), gain of QeRL over LoRA, and by AQN",
        _accuracy,
    ),
    (Tier.PAPER, "[90.8 %](docs/claims.md) of QeRL on GSM8K, 7B", _papers_number),
)
