"""README's face: seven questions, each with the paper's value, ours, and the verdict in a word.

All are always there: a number that nobody has measured is an answer, too. A row names the
statements that decide it; its word is theirs, and the sentence above the rows says the words again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from repro.evidence import printed
from repro.evidence.paper import paper_cells
from repro.evidence.verdicts.verdict import Verdict
from repro.judge.check import Checked
from repro.report.doses import doses, treatment
from repro.report.numbers import cell_text, device_heads, quantity, signed, span
from repro.report.systems import BLOCKS, step_spans
from repro.report.systems_rates import Comparison, comparisons, printed_rates, ratio_span
from repro.report.tables import NOTHING, device_of, table
from repro.report.verdicts import Kind, of_kind, stated_bars
from repro.spec.tier import Tier
from repro.targets import find
from repro.targets.table1 import BF16_LORA, NVFP4_LORA, NVFP4_LORA_AQN, TABLE1

# The checks of one device at one tier, by target.
Checks = Mapping[str, Checked]
_QERL, _MODEL = "nvfp4_lora_aqn", "7B"
HOLDS, DOES_NOT, MIXED, UNDECIDED, NOT_TESTED = WORDS = (
    "holds",
    "does not",
    "mixed",
    "undecided",
    "not tested",
)


def short_word(verdicts: Sequence[Verdict]) -> str:
    """Return the word of statements that decide a question together, *post hoc* with it.

    Those that were not run are left out, unless none was.
    """
    run = [item for item in verdicts if item.status != "not run"]
    sides = {_SIDES.get(item.status, UNDECIDED) for item in run}
    if not sides:
        return NOT_TESTED
    shown = sides - {UNDECIDED}
    word = MIXED if len(shown) > 1 else UNDECIDED if UNDECIDED in sides else next(iter(shown))
    return f"{word}, post hoc" if any(item.post_hoc for item in run) else word


_SIDES = {
    "reproduced": HOLDS,
    "below a tenth": MIXED,
    "contradicted": DOES_NOT,
    "excluded": DOES_NOT,
    "no difference": DOES_NOT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """What a row says: the paper's value, what was measured, the statements that decide it."""

    paper: str
    measured: str = ""
    verdicts: Sequence[Verdict] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A row of README before anything is measured.

    Attributes
    ----------
    text, subject
        In the row and in the sentence.
    run_with
        The model and whose kernels multiplied.
    place
        Where the exact verdicts stand: a page and its heading.
    cells
        What fills the row, from the checks of one device.
    """

    tier: Tier
    text: str
    subject: str
    run_with: str
    place: str
    cells: Callable[[Checks, Path], Cells]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A question with the paper's value and, by device, what was measured and what decides."""

    asked: Question
    paper: str
    measured: Mapping[str, str]
    verdicts: Mapping[str, Sequence[Verdict]]

    @property
    def words(self) -> dict[str, str]:
        """The verdict's word by device; one without a name where none has measured it."""
        return {name: short_word(of) for name, of in self.verdicts.items()} or {"": NOT_TESTED}

    @property
    def word(self) -> str:
        """The word over all devices."""
        return short_word([item for of_device in self.verdicts.values() for item in of_device])

    @property
    def said(self) -> str:
        """The subject, with the ratios on the first device where ratios were measured."""
        first = next(iter(self.measured.values()), "")
        subject = self.asked.subject
        return f"{subject} ({first})" if first.endswith(" x") else subject


def answers(checks: Sequence[Checked], expected: Path) -> list[Answer]:
    """Return the questions with what was measured; empty without records above the smoke tier."""
    devices: dict[str, dict[Tier, dict[str, Checked]]] = {}
    for checked in checks:
        tier = checked.selection.tier
        if checked.evidence.count and tier is not Tier.SMOKE:
            tiers = devices.setdefault(device_of(checked), {})
            tiers.setdefault(tier, {})[checked.selection.target.name] = checked
    if not devices:
        return []
    names = device_heads(devices)
    found = []
    for asked in _QUESTIONS:
        said = {name: asked.cells(devices[device].get(asked.tier, {}), expected)
                for device, name in names.items()}  # fmt: skip
        measured = {name: cells.measured for name, cells in said.items() if cells.measured}
        verdicts = {name: said[name].verdicts for name in measured}
        paper = asked.cells({}, expected).paper
        found.append(Answer(asked=asked, paper=paper, measured=measured, verdicts=verdicts))
    return found


def answer_rows(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return the sentence and the rows; a cell has a line for each device that has measured it."""
    found = answers(checks, expected)
    if not found:
        return NOTHING
    rows = []
    for item in found:
        linked = {name: f"[{word}]({item.asked.place})" for name, word in item.words.items()}
        alike = len(set(linked.values())) == 1
        verdict = next(iter(linked.values())) if alike else _per_device(linked)
        asked, measured = item.asked, _per_device(item.measured)
        rows.append([asked.text, item.paper, asked.run_with, measured, verdict])
    heads = ["question", "paper", "run with", "measured", "verdict"]
    return [f"**{answer_sentence(found)}**", "", *table(heads, rows)[:-1]]


def answer_sentence(found: Sequence[Answer], absent: str = NOT_TESTED) -> str:
    """Return the answers in one sentence: what holds, what does not, what nobody knows yet.

    Parameters
    ----------
    absent
        How to say that a question has no records.
    """
    parts = []
    for word in WORDS:
        subjects = [item.said for item in found if item.word.split(",")[0] == word]
        if subjects:
            parts.append(f"{absent if word == NOT_TESTED else word}: {_listed(subjects)}")
    sentence = "; ".join(parts)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def _listed(subjects: Sequence[str]) -> str:
    *first, last = subjects
    return f"{', '.join(first)} and {last}" if first else last


def _per_device(said: Mapping[str, str]) -> str:
    return "<br>".join(f"{name}: {text}" for name, text in said.items())


def _decided(pairs: Sequence[Comparison]) -> list[Verdict]:
    return [item.verdict for item in pairs if item.verdict is not None]


def _small_batches(checks: Checks, expected: Path) -> Cells:
    pairs = [
        item
        for name in BLOCKS["tables"].targets
        if name in checks
        for item in comparisons(checks[name], expected)
    ]
    paper, measured = _papers_ratios(expected), ratio_span(pairs)
    return Cells(paper=paper, measured=measured, verdicts=_decided(pairs))


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
    pairs = [item for item in pairs if item.place == _LARGE]
    return Cells(paper="ends at 8", measured=ratio_span(pairs), verdicts=_decided(pairs))


def _steps(checks: Checks, expected: Path) -> Cells:
    steps = [checks[name] for name in BLOCKS["steps_rl"].targets if name in checks]
    verdicts = [item for checked in steps for item in of_kind(checked, Kind.PAPER, Kind.OPEN)]
    measured = step_spans(steps, expected)[1] if steps else ""
    return Cells(paper="ends at 8", measured=measured, verdicts=verdicts)


def _memory(checks: Checks, expected: Path) -> Cells:
    for bar in stated_bars(checks["memory"], expected) if "memory" in checks else []:
        if bar.key == (NVFP4_LORA.name, checks["memory"].selection.target.headline):
            measured = f"peak {quantity(bar.verdict.effect or 0.0, bar.unit)}"
            return Cells(paper="fits", measured=measured, verdicts=[bar.verdict])
    return Cells(paper="fits")


def _entropy(checks: Checks, expected: Path) -> Cells:
    arms = (NVFP4_LORA.name, BF16_LORA.name)
    values = next(iter(printed.differences(expected, "dose_coder_0_5b", [arms]).values()))
    cells = _on_checkpoints(
        f"{values[arms]:+.2g} nats (7B)", checks, {"": "nvfp4_more_entropy_finished"}
    )
    measured_at = checks.get("dose_coder_0_5b")
    if measured_at is None or not cells.measured:
        return cells
    given = treatment(doses(measured_at)[NVFP4_LORA.name].rise, expected)
    measured = f"{cells.measured}; treatment {given}"
    return Cells(paper=cells.paper, measured=measured, verdicts=cells.verdicts)


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
    return _on_checkpoints(f"{paper} points ({_MODEL})", checks, claims)


def _on_checkpoints(paper: str, checks: Checks, claims: Mapping[str, str]) -> Cells:
    """Return the effects of claims on published checkpoints, and their verdicts.

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
                measured.append(f"{word} {_effect(by_name[name])}".strip())
    return Cells(paper=paper, measured=", ".join(measured), verdicts=verdicts)


def _effect(verdict: Verdict) -> str:
    if verdict.effect is None:
        return f"? {verdict.unit}"
    return f"{signed(verdict.effect, verdict.low, verdict.high, '.2g')} {verdict.unit}"


def _papers_number(checks: Checks, expected: Path) -> Cells:
    (cell,) = (
        cell
        for cell in paper_cells(expected, TABLE1.paper_file)
        if (cell.arm, cell.column, cell.quantity) == (_QERL, _MODEL, "accuracy")
    )
    paper = f"{cell.value:g} %"
    if TABLE1.name not in checks:
        return Cells(paper=paper)
    checked = checks[TABLE1.name]
    verdicts = [item for item in checked.verdicts if item.name == f"{_QERL}.accuracy"]
    values = checked.evidence.values("accuracy").get(_QERL, {})
    return Cells(paper=paper, measured=cell_text([*values.values()]), verdicts=verdicts)


# Rollouts at the batches of reinforcement learning: the largest that was planned.
_LARGE = 256
_OWN = "own kernels"
_QUESTIONS = (
    Question(
        tier=Tier.SYSTEMS,
        text="Rollout over 16-bit LoRA, batches up to 8",
        subject="rollouts faster than 16-bit LoRA's at batches up to 8",
        run_with=f"3B to 32B shapes, {_OWN}",
        place="docs/systems.md#rollout-by-batch-tables-5-to-8",
        cells=_small_batches,
    ),
    Question(
        tier=Tier.SYSTEMS,
        text=f"The same, batch {_LARGE}",
        subject=f"faster rollouts at batch {_LARGE}",
        run_with=f"7B to 32B shapes, {_OWN}",
        place="docs/systems.md#rollout-at-the-batches-of-reinforcement-learning",
        cells=_large_batches,
    ),
    Question(
        tier=Tier.SYSTEMS,
        text="GRPO step, 128 or 256 completions",
        subject="faster training steps",
        run_with=f"7B, 32B shapes, {_OWN}",
        place="docs/systems.md#a-grpo-step-table-3",
        cells=_steps,
    ),
    Question(
        tier=Tier.SYSTEMS,
        text="32B on one 80 GB card",
        subject="32B on one 80 GB card",
        run_with=f"32B shape, {_OWN}",
        place="docs/systems.md#memory",
        cells=_memory,
    ),
    Question(
        tier=Tier.MINI,
        text="Entropy over BF16 before training",
        subject="higher entropy",
        run_with=f"Coder 0.5B, {_OWN}",
        place="docs/learning.md#is-the-treatment-given",
        cells=_entropy,
    ),
    Question(
        tier=Tier.MINI,
        text="Accuracy over LoRA; gain by AQN",
        subject="higher accuracy (both on a 0.5B model)",
        run_with=f"Coder 0.5B, {_OWN}",
        place="docs/learning.md#does-it-help-to-learn",
        cells=_accuracy,
    ),
    Question(
        tier=Tier.PAPER,
        text="GSM8K, 7B",
        subject="90.8 % on GSM8K at 7B",
        run_with="needs checkpoint",
        place="docs/paper_tier.md",
        cells=_papers_number,
    ),
)
