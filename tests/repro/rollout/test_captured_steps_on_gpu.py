"""Noise, faults and bytes under captured steps: needs a GPU with room for the 7B shape."""

from __future__ import annotations

import pytest
import torch

from repro.measure.rollout_faults import check_faults, check_noise
from repro.models.policy import Policy
from repro.models.shapes import random_policy
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.spec.config import SamplingConfig

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


def test_a_cache_that_is_given_back_leaves_its_memory_and_comes_back_with_its_steps(
    policy: Policy,
) -> None:
    prompts = [[11, 12, 13, 14], [21, 22, 23]]
    sampling = SamplingConfig(max_new_tokens=40)

    def engine(*, keeps: bool) -> Engine:
        return Engine(
            policy,
            EngineConfig(slots=8, max_positions=4096, max_new_tokens=40, ignore_end=True,
                         keeps_cache=keeps),
        )  # fmt: skip

    keeping, giving = engine(keeps=True), engine(keeps=False)
    try:
        cache = giving.forward.blocks[0].cache.keys
        held = torch.cuda.memory_allocated()
        for seeds in (list(range(8)), list(range(8, 16))):
            usual, batch = (
                one.sample(prompts, sampling, group_size=4, seeds=seeds)
                for one in (keeping, giving)
            )
            assert batch == usual
            # 28 blocks' keys and values.
            given_back = held - torch.cuda.memory_allocated()
            assert given_back > 0.9 * 2 * 28 * cache.nbytes
    finally:
        keeping.close()
        giving.close()
