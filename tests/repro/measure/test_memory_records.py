"""The memory plan against what steps were measured to take, by the blessed records.

The plan is of LoRA by this project's kernels. A step that fell back for want of memory has met its
budget, not its plan, and is left out; so is one whose allocator could fragment, by up to a third.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from repro.evidence.receipts import violations
from repro.evidence.store import read_stored
from repro.measure.step_measure import step_shape
from repro.models.memory_plan import plan_memory
from repro.spec.arm import WEIGHT_FORMATS
from repro.spec.step_scale import StepPoint, StepScale
from repro.targets.steps import NVFP4

EXPECTED = Path(__file__).resolve().parents[3] / "expected"
# Points of memory alone are warmed up since; earlier peaks lack the optimiser's moments.
WARMED_UP = "2026-11-29T12:28"


@dataclasses.dataclass(frozen=True)
class Peak:
    """What one step took, and where that is written."""

    source: str
    finished: str
    device_bytes: int
    weight_format: Any
    rank: int
    point: StepPoint
    optimizer: Any
    values: dict[str, Any]


def records():
    for path in sorted((EXPECTED / "records" / "systems").rglob("*.csv")):
        for record in read_stored(path):
            settings = record.environment["variables"].get("PYTORCH_CUDA_ALLOC_CONF", "")
            if record.procedure == "step_time" and "expandable_segments:True" in settings:
                yield f"{path.parent.name}/{path.stem}", record


def measured():
    peaks = {}
    for source, record in records():
        device_bytes = int(record.environment["gpu"][0]["memory.total"].split()[0]) << 20
        rank = record.config["arm"]["lora_rank"]
        for asked in record.config["scale"]["points"]:
            # As they were when the record was made.
            point = StepPoint.recorded(asked)
            for way, values in record.facts["points"].get(point.name, {}).items():
                gave_up = values["fallbacks"] or values.get("slot_fallbacks")
                if way in WEIGHT_FORMATS and not gave_up:
                    optimizer = record.config["scale"].get("optimizer", "adamw")
                    rank_here = point.lora_rank or rank
                    where, when = source, record.finished
                    peak = Peak(where, when, device_bytes, way, rank_here, point, optimizer, values)
                    # A baseline stands in the records of every arm that it was compared with.
                    peaks[source, way, point.name] = peak
    return list(peaks.values())


MEASURED = measured()


def test_there_are_sizes_formats_lengths_and_ranks_enough():
    assert len(MEASURED) >= 12
    assert len({peak.point.model for peak in MEASURED}) >= 4
    assert {peak.weight_format for peak in MEASURED} >= {"bf16", "nvfp4"}
    assert len({peak.rank for peak in MEASURED}) >= 3
    assert len({peak.point.completion_tokens for peak in MEASURED}) >= 3


def cases():
    held = pytest.mark.xfail(reason="the allocator holds 0.5 GB more than asked", strict=True)
    for peak in MEASURED:
        name = f"{peak.source}-{peak.point.name}-{peak.weight_format}"
        low = name.endswith("_portable/memory_cards-7b_16x8_12gb-nvfp4")
        yield pytest.param(peak, id=name, marks=[held] if low else [])


@pytest.mark.parametrize("peak", cases())
def test_the_plan_is_within_a_twentieth_of_the_measured_peak(peak):
    scale = StepScale(points=(peak.point,), optimizer=peak.optimizer)
    budget = peak.point.budget_bytes or peak.device_bytes
    if "kept_blocks" not in peak.values:
        pytest.skip("measured when every block was computed again; made anew by `regress`")
    share = dataclasses.replace(peak.point, prompts=peak.point.prompts // peak.point.ranks)
    arm = dataclasses.replace(NVFP4, weight_format=peak.weight_format, lora_rank=peak.rank)
    planned = step_shape(share, arm, scale, budget)
    if peak.values["micro_tokens"] < share.prompt_tokens + share.long_tokens:
        pytest.skip("planned when no row beyond twice the mean was expected")
    assert planned.micro_tokens == peak.values["micro_tokens"]
    assert planned.kept_blocks == peak.values["kept_blocks"]
    if peak.point.lengths != "full":
        # Planned for rows of twice the mean, of which few are as long: the peak may be far below.
        assert peak.values["peak_bytes"] <= 1.05 * plan_memory(planned).peak
        return
    plan, cold = plan_memory(planned), peak.point.memory_only and peak.finished < WARMED_UP
    least = plan.peak - cold * plan.update["optimiser"]
    assert 0.95 * least <= peak.values["peak_bytes"] <= 1.05 * plan.peak


def test_a_32b_step_takes_less_than_40_gib_and_fits_a_32_gb_card():
    peaks: dict[str, list[int]] = {}
    for peak in MEASURED:
        if peak.weight_format == "nvfp4":
            peaks.setdefault(peak.point.name, []).append(peak.values["peak_bytes"])
    assert max(peaks["32b_b8"]) < 40 * 2**30
    assert max(peaks["32b_32gb"]) < 32e9
    assert max(peaks["72b"]) < 80e9


def test_the_records_are_evidence():
    for _, record in records():
        assert violations(record) == []
        assert record.facts["linears"].keys() == {record.config["arm"]["weight_format"]}
        for ways in record.facts["points"].values():
            for values in ways.values():
                assert values["moved"] > 0
