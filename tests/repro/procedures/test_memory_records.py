"""The memory plan against what one NVIDIA H200 was measured to take.

The records lie in `benchmarks/`, not among the expectations: of one seed each, they are not
blessed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from repro.evidence.receipts import refusals
from repro.evidence.record import parse_record
from repro.models.memory_plan import plan_memory
from repro.procedures.step_measure import step_shape
from repro.spec.step import StepPoint, StepScale

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "nvidia_h200"
DEVICE_BYTES = 143_771 << 20


def measured() -> list[tuple[str, StepPoint, dict[str, Any]]]:
    found = []
    for name in ("memory", "memory_budgets"):
        raw = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        for item in raw["records"]:
            record = parse_record(item, name)
            # As they were when the record was made.
            asked = [StepPoint(**point) for point in record.config["scale"]["points"]]
            for point in asked:
                formats = record.effects["points"].get(point.name, {})
                found += [(fmt, point, values) for fmt, values in formats.items()]
    return found


MEASURED = measured()


def test_there_are_sizes_formats_lengths_and_ranks_enough() -> None:
    assert len(MEASURED) >= 12
    assert len({point.model for _, point, _ in MEASURED}) >= 4
    assert {fmt for fmt, _, _ in MEASURED} >= {"bf16", "nvfp4"}
    assert len({point.lora_rank for _, point, _ in MEASURED}) >= 3
    assert len({point.completion_tokens for _, point, _ in MEASURED}) >= 3


@pytest.mark.parametrize(
    ("weight_format", "point", "values"),
    MEASURED,
    ids=[f"{point.name}-{fmt}" for fmt, point, _ in MEASURED],
)
def test_the_plan_is_within_a_twentieth_of_the_measured_peak(
    weight_format: Any, point: StepPoint, values: dict[str, Any]
) -> None:
    scale = StepScale(points=(point,))
    rank = point.lora_rank or 32
    budget = point.budget_bytes or DEVICE_BYTES
    planned = step_shape(point, weight_format, rank, scale, budget)
    assert planned.micro_tokens == values["micro_tokens"]
    assert plan_memory(planned).peak == pytest.approx(values["peak_bytes"], rel=0.05)


def test_a_32b_step_takes_less_than_40_gib_and_fits_a_32_gb_card() -> None:
    peaks = {(fmt, point.name): values["peak_bytes"] for fmt, point, values in MEASURED}
    assert peaks["nvfp4", "32b"] < 40 * 2**30
    assert peaks["nvfp4", "32b_32gb"] < 32e9
    assert peaks["nvfp4", "72b"] < 80e9


@pytest.mark.parametrize("name", ["memory", "memory_budgets"])
def test_the_records_are_evidence(name: str) -> None:
    raw = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    for item in raw["records"]:
        record = parse_record(item, name)
        assert refusals(record) == []
        assert record.effects["linears"].keys() == {record.config["arm"]["weight_format"]}
        for formats in record.effects["points"].values():
            for values in formats.values():
                assert values["moved"] > 0
                assert values["fallbacks"] == []
