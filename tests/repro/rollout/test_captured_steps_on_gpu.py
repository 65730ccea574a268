"""Noise, faults and bytes under captured steps: needs a GPU with room for the 7B shape."""

from __future__ import annotations

import pytest
import torch

from repro.measure.rollout_faults import check_faults, check_noise
from repro.models.policy import Policy
from repro.models.shapes import random_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("policy_7b"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none"),
]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return random_policy(
        "qwen2.5-7b", weight_format="nvfp4", lora_rank=32, seed=0, device="cuda"
    )  # fmt: skip


def test_noise_is_live_and_leaves_no_bit_behind(policy: Policy) -> None:
    (metrics,) = check_noise(policy, [0])
    assert metrics["repeat_rows_changed"].value == 0
    assert metrics["noise_off_rows_changed"].value == 0
    assert metrics["noise_rows_changed"].value == 100


def test_faults_end_as_they_should_and_keep_no_byte(policy: Policy) -> None:
    (metrics,) = check_faults(policy, [0])
    assert metrics["faults_as_they_should"].value == 100, metrics["faults_as_they_should"].method
    assert metrics["faults_rows_changed"].value == 0
    assert metrics["faults_bytes_kept"].value == 0
