"""The table at the top of README: questions with the paper's value, ours, and a one-word verdict.

Questions without measurements are also shown. Their texts are in `templates/questions.json`. The
word for a question follows from the verdicts on certain claims and bars, and the sentence above
the table repeats the words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from repro.evidence.verdicts.verdict import Verdict
from repro.judge.check import Checked
from repro.report.doses import treatment_given
from repro.report.numbers import cell_text, device_heads, quantity, span
from repro.report.systems import BLOCKS, step_spans
from repro.report.systems_rates import RatePair, comparisons, ratio_span
from repro.report.tables import NOTHING, device_of
from repro.report.tidy import effect_text, rendered
from repro.report.verdict_words import (
    MIXED,
    NOT_TESTED,
    PLAIN,
    PLAIN_WORDS,
    UNDECIDED,
    Kind,
    marks_of,
    of_kind,
    stated_bars,
)
from repro.run.places import PACKAGE
from repro.spec.tier import Tier

# The checks of one device at one tier, by target.
Checks = Mapping[str, Checked]
# The measured values as text, and the verdicts that decide the question.
Measured = tuple[str, Sequence[Verdict]]


def short_word(verdicts: Sequence[Verdict]) -> str:
    """Return the word for several verdicts, with each mark that any of them carries.

    Statements that were not run do not count, unless none was run.
    """
    run = [item for item in verdicts if item.status != "not run"]
    sides = {PLAIN[item.status] for item in run}
    if not sides:
        return NOT_TESTED
    shown = sides - {UNDECIDED}
    word = MIXED if len(shown) > 1 else UNDECIDED if UNDECIDED in sides else next(iter(shown))
    return ", ".join([word, *marks_of(run)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A question with its measured values and deciding verdicts by device.

    Attributes
    ----------
    asked
        Its texts: `text` for the row, `subject` for the sentence, `paper` the paper's value,
        `run_with` the models and kernels, `place` a link to the exact verdicts.
    """

    asked: Mapping[str, str]
    measured: Mapping[str, str]
    verdicts: Mapping[str, Sequence[Verdict]]

    @property
    def words(self) -> dict[str, str]:
        """The verdict's word by device; a single unnamed one without measurements."""
        return {name: short_word(of) for name, of in self.verdicts.items()} or {"": NOT_TESTED}

    @property
    def word(self) -> str:
        """The word over all devices."""
        return short_word([item for of_device in self.verdicts.values() for item in of_device])

    @property
    def said(self) -> str:
        """The subject, with the first device's measured ratios and the word's marks, if any."""
        first = next(iter(self.measured.values()), "").partition("; ")[0]
        notes = [first] * first.endswith(" x") + self.word.split(", ")[1:]
        return f"{self.asked['subject']} ({', '.join(notes)})" if notes else self.asked["subject"]


def answers(checks: Sequence[Checked], expected: Path) -> list[Answer]:
    """Return the questions with their answers; empty without records above the smoke tier."""
    devices: dict[str, dict[str, dict[str, Checked]]] = {}
    for checked in checks:
        tier = checked.selection.tier
        if checked.evidence.count and tier is not Tier.SMOKE:
            tiers = devices.setdefault(device_of(checked), {})
            tiers.setdefault(tier.value, {})[checked.selection.target.name] = checked
    if not devices:
        return []
    questions = PACKAGE / "report" / "templates" / "questions.json"
    found = []
    for name, asked in json.loads(questions.read_text(encoding="utf-8")).items():
        of_devices = {
            head: _MEASURED[name](devices[device].get(asked["tier"], {}), expected)
            for device, head in device_heads(devices).items()
        }
        known = {head: of for head, of in of_devices.items() if of[0]}
        measured = {head: said for head, (said, _) in known.items()}
        verdicts = {head: verdicts for head, (_, verdicts) in known.items()}
        found.append(Answer(asked=asked, measured=measured, verdicts=verdicts))
    return found


def answer_rows(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return the sentence and the rows; a cell has a line per device with measurements."""
    found = answers(checks, expected)
    if not found:
        return NOTHING
    return rendered("answer.md", answers=found, sentence=answer_sentence(found))


def answer_sentence(found: Sequence[Answer], absent: str = NOT_TESTED) -> str:
    """Return the answers in one sentence, questions without records by the words `absent`."""
    parts = []
    for word in PLAIN_WORDS:
        subjects = [item.said for item in found if item.word.split(",")[0] == word]
        if subjects:
            listed = " and ".join(filter(None, (", ".join(subjects[:-1]), subjects[-1])))
            parts.append(f"{absent if word == NOT_TESTED else word}: {listed}")
    sentence = "; ".join(parts)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def _compared(pairs: Sequence[RatePair]) -> Measured:
    return ratio_span(pairs), [item.verdict for item in pairs if item.verdict is not None]


def _beside_folded(measured: Measured, checks: Checks, *names: str, ending: str = "") -> Measured:
    """Add QeRL over 16-bit LoRA folded in, which decides nothing, by verdicts of such a name."""
    found = [one for name in names if name in checks for one in of_kind(checks[name], Kind.OPEN)]
    ratios = span(one.effect for one in found if one.name.endswith(ending))
    said, verdicts = measured
    return said and f"{said}; folded in: {ratios or 'not run'}", verdicts


def _small_batches(checks: Checks, expected: Path) -> Measured:
    tables = [checks[name] for name in BLOCKS["tables"].targets if name in checks]
    pairs = [pair for checked in tables for pair in comparisons(checked, expected)]
    return _beside_folded(_compared(pairs), checks, "table6_folded", "table8_folded")


def _large_batches(checks: Checks, expected: Path) -> Measured:
    pairs = comparisons(checks["rollout"], expected) if "rollout" in checks else []
    measured = _compared([pair for pair in pairs if pair.place == 256])
    return _beside_folded(measured, checks, "rollout_folded", ending="_256")


def _steps(checks: Checks, expected: Path) -> Measured:
    steps = [checks[name] for name in BLOCKS["steps_rl"].targets if name in checks]
    verdicts = [item for checked in steps for item in of_kind(checked, Kind.PAPER, Kind.OPEN)]
    measured = step_spans(steps, expected)[1], verdicts
    return _beside_folded(measured, checks, "table3_rl_folded")


def _memory(checks: Checks, expected: Path) -> Measured:
    for bar in stated_bars(checks["memory"], expected) if "memory" in checks else []:
        if bar.key == ("nvfp4_lora", checks["memory"].selection.target.headline):
            return f"peak {quantity(bar.verdict.effect or 0.0, bar.unit)}", [bar.verdict]
    return "", ()


def _entropy(checks: Checks, expected: Path) -> Measured:
    # Not the 1.5B: of its file NVFP4 is additional rounding.
    decisive = {name: one for name, one in checks.items() if name == "dose_coder_0_5b"}
    said, verdicts = _on_checkpoints(decisive, {"": "nvfp4_more_entropy_finished"})
    return said and f"{said}; treatment {treatment_given(checks.values(), expected)}", verdicts


def _worth(checks: Checks, expected: Path) -> Measured:
    claims = {"speed": "sooner", "end": "ends_higher"}
    given = {f"equal starts: {word}": f"{name}_given_start" for word, name in claims.items()}
    return _on_checkpoints(checks, claims | given)


def _trained(claims: Mapping[str, str], checks: Checks, expected: Path) -> Measured:
    said, verdicts = _on_checkpoints(checks, claims)
    return said and f"{said}; treatment {treatment_given(checks.values(), expected)}", verdicts


def _on_checkpoints(checks: Checks, claims: Mapping[str, str]) -> Measured:
    """Return the effects of claims, each with a label, as text, and their verdicts."""
    found = [
        (word, verdict)
        for checked in checks.values()
        for word, name in claims.items()
        for verdict in checked.verdicts
        if verdict.name == name and verdict.status != "not run"
    ]
    said = ", ".join(f"{word} {effect_text(verdict)}".strip() for word, verdict in found)
    return said, [verdict for _, verdict in found]


def _papers_number(checks: Checks, expected: Path) -> Measured:
    if "table1" not in checks:
        return "", ()
    verdicts = [v for v in checks["table1"].verdicts if v.name == "nvfp4_lora_aqn.accuracy"]
    values = checks["table1"].evidence.values("accuracy").get("nvfp4_lora_aqn", {})
    return cell_text([*values.values()]), verdicts


_MEASURED: Mapping[str, Callable[[Checks, Path], Measured]] = {
    "small_batches": _small_batches,
    "large_batches": _large_batches,
    "steps": _steps,
    "memory": _memory,
    "entropy": _entropy,
    "worth": _worth,
    "sooner": partial(_trained, {"NVFP4": "nvfp4_sooner", "QeRL": "qerl_sooner"}),
    "accuracy": partial(_trained, {"QeRL": "qerl_beats_lora", "AQN": "aqn_helps"}),
    "papers_number": _papers_number,
}
