"""What is said of a dose: the rise over draws, the paper's size, equal temperature and damage."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repro.evidence.verdicts.statistics import Interval
from repro.report.doses import dose_rows, doses, paper_rises, treatment, untrained_rows
from repro.report.tables import NOTHING
from repro.spec.tier import Tier
from repro.targets import find

EXPECTED = Path(__file__).resolve().parents[3] / "expected"
TARGET = find("dose_coder_0_5b")
DRAWS = range(6)
# Arm: entropy of its own finished completions, accuracy.
MEASURED = {
    "bf16_lora": (0.36, 14.0),
    "bf16_t90": (0.30, 16.0),
    "bf16_t110": (0.44, 12.0),
    "bf16_t120": (0.54, 8.0),
    "nvfp4_lora": (0.44, 10.0),
    "nvfp4_half": (0.38, 13.5),
    "nvfp4_x2": (0.75, 4.0),
}


def checked(measured: dict[str, tuple[float, float]] = MEASURED) -> Any:
    def values(metric: str) -> dict[str, dict[int, float]]:
        place = {"entropy_finished": 0, "accuracy_lenient": 1}.get(metric)
        return {
            arm: {
                draw: of[place] + 0.001 * (draw - 2.5) * (arm != "bf16_lora")
                if place is not None
                else 1.0
                for draw in DRAWS
            }
            for arm, of in measured.items()
        }

    evidence = SimpleNamespace(values=values, count=len(measured) * len(DRAWS))
    return SimpleNamespace(evidence=evidence, selection=SimpleNamespace(target=TARGET))


def test_the_rise_is_over_draws_and_damage_is_at_equal_entropy() -> None:
    found = doses(checked())
    assert "bf16_lora" not in found
    nvfp4 = found["nvfp4_lora"]
    assert nvfp4.rise.value == pytest.approx(0.08)
    assert nvfp4.rise.low is not None
    assert nvfp4.rise.low < 0.08
    # BF16 has this entropy at 1.1, where 12 % are right: 2 points are lost beyond exploring.
    assert nvfp4.temperature == pytest.approx(1.1, abs=0.01)
    assert nvfp4.damage is not None
    assert nvfp4.damage.value == pytest.approx(2.0, abs=0.1)
    assert found["nvfp4_half"].temperature == pytest.approx(1.025, abs=0.01)
    assert found["nvfp4_x2"].temperature is None
    assert found["nvfp4_x2"].damage is None


def test_a_treatment_is_delivered_by_its_whole_interval() -> None:
    assert paper_rises(EXPECTED)["nvfp4_lora"] == pytest.approx(0.055)
    for low, high, word in (
        (0.03, 0.09, "delivered"),
        (-0.001, 0.02, "not delivered"),
        (0.01, 0.09, "unclear"),
    ):
        rise = Interval(value=(low + high) / 2, low=low, high=high, n=6)
        assert treatment(rise, EXPECTED) == word
    assert treatment(Interval(value=0.1, low=None, high=None, n=1), EXPECTED) == "unclear"


def test_the_table_has_a_row_per_arm_and_the_verdict_beside_plain_formats_alone() -> None:
    lines = dose_rows([checked()], EXPECTED, TARGET.name)
    rows = [line for line in lines if line.startswith("|")][2:]
    assert len(rows) == len(MEASURED)
    by_label = {row.split(" | ")[0].strip("| "): row for row in rows}
    assert "delivered" in by_label[TARGET.arm("nvfp4_lora").label]
    assert "delivered" not in by_label[TARGET.arm("nvfp4_half").label]
    assert "above 1.2" in by_label[TARGET.arm("nvfp4_x2").label]
    assert dose_rows([], EXPECTED, TARGET.name) == NOTHING


def test_untrained_rows_lose_what_the_paper_prints_beside_them() -> None:
    accuracy = {"bf16": 20.0, "nvfp4": 16.0}

    def values(metric: str) -> dict[str, dict[int, float]]:
        of = accuracy if metric == "accuracy_lenient" else dict.fromkeys(accuracy, 12.0)
        return {arm: {draw: value + draw % 2 for draw in DRAWS} for arm, value in of.items()}

    estimate = SimpleNamespace(low=14.0, high=18.0)
    record = SimpleNamespace(metrics={"accuracy_lenient": estimate})
    evidence = SimpleNamespace(
        values=values, count=12, records={arm: dict.fromkeys(DRAWS, record) for arm in accuracy}
    )
    target = find("untrained_coder_0_5b")
    selection = SimpleNamespace(target=target, tier=Tier.MINI)
    check: Any = SimpleNamespace(evidence=evidence, selection=selection)
    lines = untrained_rows([check], EXPECTED, target.name)
    (nvfp4,) = [line for line in lines if line.startswith(f"| {target.arm('nvfp4').label} ")]
    assert nvfp4.split(" | ")[1:4] == ["boxed", "16.5 % ± 2.0", "+4.0 (+4.0 to +4.0)"]
    assert "73.4 %" in nvfp4
    assert untrained_rows([check], EXPECTED, "another") == NOTHING
