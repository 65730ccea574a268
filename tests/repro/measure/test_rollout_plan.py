"""Which points of a rollout the plan says do not fit, and how near the plan is."""

import dataclasses

from repro.measure.rollout_plan import cell_of, not_fitting, planned_bytes
from repro.spec.tier import GIB, Tier
from repro.targets.rollout_speed import POINTS, ROLLOUT
from repro.targets.table1 import BF16_LORA, NVFP4_LORA

SCALE = ROLLOUT.scales[Tier.SYSTEMS]
# Free and total of an H100 80 GB and an H200, as CUDA states them.
H100, H200 = round(79.2 * GIB), round(139.8 * GIB)


def test_on_80_gb_only_256_rows_of_32b_in_16_bits_do_not_fit():
    left_out = not_fitting(SCALE, BF16_LORA, H100)
    assert list(left_out) == ["32b_256"]
    assert "95.5 of 79.2 GiB" in left_out["32b_256"]
    assert not_fitting(SCALE, NVFP4_LORA, H100) == {}


def test_on_141_gb_everything_that_was_recorded_there_fits():
    for arm in ROLLOUT.arms:
        assert not_fitting(SCALE, arm, H200) == {}


def test_each_row_has_a_cache_of_its_own():
    point = dataclasses.replace(POINTS[0], prompt_tokens=33, new_tokens=32)
    grown = planned_bytes(point, 40, NVFP4_LORA) - planned_bytes(point, 39, NVFP4_LORA)
    three_blocks = 4 * 28 * 512 * 32 * 3
    assert three_blocks < grown < 3 * three_blocks
    assert cell_of(point, 40) == "7b_40"
