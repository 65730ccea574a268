"""README's face: six questions, each with the paper's value, ours, and the verdict.

A row is written for each device that has records of it; the row of the paper's own number is
written for every device, for a number that nobody has measured is an answer, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from repro.check import Checked
from repro.evidence import printed
from repro.evidence.paper import paper_cells
from repro.evidence.verdict import Verdict
from repro.report.learning import papers_differences
from repro.report.numbers import bar_text, cell_text, quantity, span
from repro.report.systems import BLOCKS, step_spans
from repro.report.systems_rates import comparisons
from repro.report.tables import NOTHING, Line, device_of, side_by_side
from repro.report.verdicts import CLAIMS, EXCLUDED, beside, counted, of_kind, stated_bars, word
from repro.spec.tier import Tier
from repro.targets.table1 import TABLE1

# The checks of one device at one tier, by target.
Checks = Mapping[str, Checked]
_QERL, _MODEL = "nvfp4_lora_aqn", "7B"


def answer_rows(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return the six rows, the columns of each device side by side."""
    devices: dict[str, dict[Tier, dict[str, Checked]]] = {}
    for checked in checks:
        tier = checked.selection.tier
        if checked.evidence.count and tier is not Tier.SMOKE:
            tiers = devices.setdefault(device_of(checked), {})
            tiers.setdefault(tier, {})[checked.selection.target.name] = checked
    parts = {
        device: [
            Line(common=(question, paper, tier.value), own=(measured, verdict))
            for tier, question, row in _ROWS
            for paper, measured, verdict in row(tiers.get(tier, {}), expected)
        ]
        for device, tiers in devices.items()
    }
    heads = ["question", "paper", "tier"]
    return side_by_side(heads, ["measured", "verdict"], parts, named=True)[:-1] or NOTHING


# What a row says: the paper's value, what was measured, and the verdict; none without records.
Cells = Iterable[tuple[str, str, str]]


def _small_batches(checks: Checks, expected: Path) -> Cells:
    tables = [checks[name] for name in BLOCKS["tables"].targets if name in checks]
    pairs = [item for checked in tables for item in comparisons(checked, expected)]
    if pairs:
        verdicts = [item.verdict for item in pairs if item.verdict is not None]
        measured = span(item.ratio.value for item in pairs)
        yield span(item.paper for item in pairs), measured, counted(verdicts)


def _large_batches(checks: Checks, expected: Path) -> Cells:
    if {"rollout", "table3_rl"} <= checks.keys():
        pairs = [p for p in comparisons(checks["rollout"], expected) if 128 <= p.place <= 256]
        verdicts = [item.verdict for item in pairs if item.verdict is not None]
        step = checks["table3_rl"]
        verdicts += of_kind(step, *CLAIMS)
        whole = step.selection.target.headline
        verdicts += [bar.verdict for bar in stated_bars(step, expected) if bar.key[1] == whole]
        ratio = step_spans([step], expected)[1]
        measured = f"rollout {span(item.ratio.value for item in pairs)}, step {ratio}"
        yield "batches end at 8", measured, counted(verdicts)


def _memory(checks: Checks, expected: Path) -> Cells:
    if "memory" in checks:
        bars = {bar.key: bar for bar in stated_bars(checks["memory"], expected)}
        bar = bars["nvfp4_lora", checks["memory"].selection.target.headline or ""]
        bound = bar_text(bar.expectation, bar.unit)
        measured = f"peak {quantity(bar.verdict.effect or 0.0, bar.unit)}"
        yield "fits (sections 1, 4.3)", measured, f"{word(bar.verdict)} ({bound})"


def _entropy(checks: Checks, expected: Path) -> Cells:
    if "figure5" in checks:
        arms = ("nvfp4", "bf16")
        values = next(iter(printed.differences(expected, "entropy_start", [arms]).values()))
        verdicts = of_kind(checks["figure5"], *CLAIMS)
        effects = [verdict.effect for verdict in verdicts if verdict.effect is not None]
        measured = f"{min(effects):+.2g} to {max(effects):+.2g} nats ({len(effects)} formats)"
        yield f"{values[arms]:+.2g} nats (NVFP4)", measured, counted(verdicts)


def _accuracy(checks: Checks, expected: Path) -> Cells:
    if TABLE1.name not in checks:
        return
    by_name = {item.name: item for item in checks[TABLE1.name].verdicts}
    claims = {claim.name: claim for claim in TABLE1.claims}
    paper, measured, verdicts, excluded = [], [], [], []
    for factor, name in (("AQN", "aqn_helps"), ("NVFP4", "nvfp4_beats_lora")):
        size = papers_differences(TABLE1.name, claims[name], expected)[_MODEL]
        verdicts.append(by_name[name])
        paper.append(f"{factor} {size:+g}")
        measured.append(f"{factor} {_effect(by_name[name])}")
        excluded += [beside(by_name[name], size)]
    words = [counted(verdicts), *([f"both {EXCLUDED}"] if all(excluded) else [])]
    yield f"{', '.join(paper)} points ({_MODEL})", f"{', '.join(measured)} points", ", ".join(words)


def _effect(verdict: Verdict) -> str:
    if verdict.effect is None or verdict.low is None or verdict.high is None:
        return "?"
    return f"{verdict.effect:+.2f} ({verdict.low:+.2f} to {verdict.high:+.2f})"


def _papers_number(checks: Checks, expected: Path) -> Cells:
    (cell,) = (
        cell
        for cell in paper_cells(expected, TABLE1.paper_file)
        if (cell.arm, cell.column, cell.quantity) == (_QERL, _MODEL, "accuracy")
    )
    checked = checks.get(TABLE1.name)
    values = checked.evidence.values("accuracy").get(_QERL, {}) if checked else {}
    if checked is None or not values:
        yield f"{cell.value:g} %", "", "not run: needs checkpoint and GPU"
    else:
        (verdict,) = (item for item in checked.verdicts if item.name == f"{_QERL}.accuracy")
        yield f"{cell.value:g} %", cell_text([*values.values()]), word(verdict)


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
        Tier.PROXY,
        "[Entropy](docs/findings.md), 4-bit weights over BF16, early in training",
        _entropy,
    ),
    (
        Tier.PROXY,
        "[Accuracy](docs/findings.md), gain by AQN and by the NVFP4 format",
        _accuracy,
    ),
    (Tier.PAPER, "[90.8 %](docs/claims.md) of QeRL on GSM8K, 7B", _papers_number),
)
