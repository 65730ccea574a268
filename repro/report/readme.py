"""The table at the top of README: what the paper claims, its value, ours, and a plain verdict.

Claims without measurements are also shown, except those "shown once judged". Their texts are in
`templates/questions.json`. The word for a row follows from the verdicts on certain claims, which
that file names with their target, and on performance targets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from repro.evidence.origins import grouped_by
from repro.evidence.verdicts.verdict import Verdict
from repro.judge.check import Checked
from repro.report.numbers import cell_text, device_heads, quantity, span
from repro.report.systems import RL_STEPS, SMALL_BATCHES, step_spans
from repro.report.systems_rates import comparisons, ratio_span
from repro.report.tables import NOTHING, by_device
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

    The texts `asked` are `text` the claim, `paper` the paper's value, `models` what was run,
    `place` a link to the exact verdicts.
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


def answers(checks: Sequence[Checked], expected: Path) -> list[Answer]:
    """Return the questions with their answers; empty without records above the smoke tier."""
    devices = by_device(one for one in checks if one.selection.tier is not Tier.SMOKE)
    if not devices:
        return []
    questions = PACKAGE / "report" / "templates" / "questions.json"
    found = []
    for name, asked in json.loads(questions.read_text(encoding="utf-8")).items():
        measured: dict[str, str] = {}
        verdicts: dict[str, Sequence[Verdict]] = {}
        for device, head in device_heads(devices).items():
            of_tier = [c for c in devices[device] if c.selection.tier.value == asked["tier"]]
            by_name = {checked.selection.target.name: checked for checked in of_tier}
            measure = partial(_claims, asked) if "claims" in asked else _MEASURED[name]
            said, deciding = measure(by_name, expected)
            if said:
                measured[head], verdicts[head] = said, deciding
        if measured or "shown" not in asked:
            found.append(Answer(asked=asked, measured=measured, verdicts=verdicts))
    return found


def answer_rows(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return a row per claim; a cell has a line per device with measurements."""
    found = answers(checks, expected)
    return rendered("answer.md", answers=found) if found else NOTHING


def answer_lines(found: Sequence[Answer], absent: str = NOT_TESTED) -> dict[str, list[str]]:
    """Return the claims as sentences by their plain verdict, without records by `absent`."""
    ordered = sorted(found, key=lambda item: PLAIN_WORDS.index(item.word.split(",")[0]))
    groups = grouped_by(
        ordered, lambda item: absent if item.word.startswith(NOT_TESTED) else item.word
    )
    return {word: [f"{item.asked['text']}." for item in of] for word, of in groups.items()}


def _beside_folded(
    measured: Measured, checks: Checks, *names: str, batches: Container[int] = (0,)
) -> Measured:
    """Add QeRL over 16-bit LoRA folded in, which decides where it is alone; a step's batch is 0."""
    found = [
        (checked.selection.target.metric(claim.metric), verdict)
        for checked in (checks[name] for name in names if name in checks)
        for claim, verdict in checked.statements()
    ]
    found = [(m, v) for m, v in found if v.effect and m.batch in batches and m.model in _SIZES]
    ratios = span(one.effect for _, one in found if one.effect)
    ends = [size.upper() for size in _SIZES if any(metric.model == size for metric, _ in found)]
    named = f"{ends[0]} to {ends[-1]}" if len(ends) > 2 else " and ".join(ends)
    folded = f"over merged LoRA, {named}: {ratios}" if ratios else ""
    return "; ".join(filter(None, (measured[0], folded))), measured[1] or [one for _, one in found]


def _rollouts(
    names: Sequence[str], batches: Container[int], checks: Checks, expected: Path
) -> Measured:
    """Return QeRL's ratios of the rollouts of targets at some batches."""
    pairs = [
        pair
        for name in names
        if name in checks
        for pair in comparisons(checks[name], expected)
        if pair.place in batches
    ]
    measured = ratio_span(pairs), [item.verdict for item in pairs if item.verdict is not None]
    return _beside_folded(measured, checks, *_FOLDED, batches=batches)


def _steps(checks: Checks, expected: Path) -> Measured:
    steps = [checks[name] for name in RL_STEPS if name in checks]
    verdicts = [item for checked in steps for item in of_kind(checked, Kind.PAPER, Kind.OPEN)]
    measured = step_spans(steps, expected)[1], verdicts
    return _beside_folded(measured, checks, "table3_rl_folded", "step_lengths_folded")


def _memory(checks: Checks, expected: Path) -> Measured:
    for bar, verdict in stated_bars(checks["memory"], expected) if "memory" in checks else []:
        if (bar.arm, bar.metric) == ("nvfp4_lora", checks["memory"].selection.target.headline):
            return f"peak {quantity(verdict.effect or 0.0, verdict.unit)}", [verdict]
    return "", ()


def _claims(asked: Mapping[str, Any], checks: Checks, expected: Path) -> Measured:
    """Return the effects of a question's claims as text, each behind its label, and verdicts."""
    verdicts = checks[asked["target"]].verdicts if asked["target"] in checks else ()
    found = [
        (label, verdict)
        for claim, label in asked["claims"].items()
        for verdict in verdicts
        if verdict.name == claim and verdict.status != "not run"
    ]
    if "shown" in asked and all(verdict.low is None for _, verdict in found):
        return "", ()
    said = ", ".join(f"{label} {effect_text(verdict)}".strip() for label, verdict in found)
    return said, [verdict for _, verdict in found]


def _papers_number(checks: Checks, expected: Path) -> Measured:
    if "table1" not in checks:
        return "", ()
    verdicts = [v for v in checks["table1"].verdicts if v.name == "nvfp4_lora_aqn.accuracy"]
    values = checks["table1"].evidence.values("accuracy").get("nvfp4_lora_aqn", {})
    return cell_text([*values.values()]), verdicts


_SIZES = ("7b", "14b", "32b")  # of merged LoRA in the rows
_FOLDED = ("table6_folded", "table8_folded", "rollout_folded")
_MEASURED: Mapping[str, Callable[[Checks, Path], Measured]] = {
    "small_batches": partial(_rollouts, SMALL_BATCHES, range(1, 9)),
    "large_batches": partial(_rollouts, ("rollout",), (256,)),
    "steps": _steps,
    "memory": _memory,
    "papers_number": _papers_number,
}
