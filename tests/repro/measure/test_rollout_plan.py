"""Which points of a rollout the plan says do not fit, and how near the plan is."""

from __future__ import annotations

import dataclasses

import pytest

from repro.measure.rollout_plan import cell_of, not_fitting, planned_bytes
from repro.spec.arm import Arm
from repro.spec.tier import GIB, Tier
from repro.targets.rollout_speed import POINTS, ROLLOUT
from repro.targets.table1 import BF16_LORA, NVFP4_LORA

SCALE = ROLLOUT.scales[Tier.SYSTEMS]
# Free and total of an H100 80 GB and an H200, as CUDA states them.
H100, H200 = round(79.2 * GIB), round(139.8 * GIB)


def test_on_80_gb_only_256_rows_of_32b_in_16_bits_do_not_fit() -> None:
    left_out = not_fitting(SCALE, BF16_LORA, H100)
    assert list(left_out) == ["32b_256"]
    assert left_out["32b_256"] == "needs 95.5 of 79.2 GiB by the plan"
    assert not_fitting(SCALE, NVFP4_LORA, H100) == {}


def test_on_141_gb_everything_that_was_recorded_there_fits() -> None:
    for arm in ROLLOUT.arms:
        assert not_fitting(SCALE, arm, H200) == {}


@pytest.mark.parametrize("arm", [BF16_LORA, NVFP4_LORA], ids=lambda arm: arm.name)
def test_the_plan_is_above_what_must_be_there_by_a_tenth_at_most(arm: Arm) -> None:
    # 32B: weights, both embeddings, keys and values of 256 rows of 448 tokens.
    projections = 64 * (2 * 5120 * 5120 + 2 * 1024 * 5120 + 3 * 5120 * 27648)
    bits = 16 if arm is BF16_LORA else 4.5
    cache = 256 * 448 * 4 * 64 * 1024
    least = projections * bits / 8 + 4 * 152064 * 5120 + cache
    planned = planned_bytes(POINTS[2], 256, arm)
    # What else there is: masters and image of the adapter, prefill, logits, context.
    rest = 6 * 64 * 32 * 131072 + 16384 * 2 * (4 * 5120 + 2 * 5120 + 4 * 1024 + 3 * 27648)
    assert least < planned
    assert planned < 1.1 * (least + rest)


def test_each_row_has_a_cache_of_its_own() -> None:
    point = dataclasses.replace(POINTS[0], prompt_tokens=33, new_tokens=32)
    grown = planned_bytes(point, 40, NVFP4_LORA) - planned_bytes(point, 39, NVFP4_LORA)
    three_blocks = 4 * 28 * 512 * 32 * 3
    assert three_blocks < grown < 3 * three_blocks
    assert cell_of(point, 40) == "7b_40"
