"""Prices of runs that nobody has timed: scaled from measured steps, or none."""

import dataclasses

import pytest

from repro.run.places import expected_folder
from repro.run.priced import blessed_steps, price, shortest_answer
from repro.spec.config import DataConfig
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find

H100 = "nvidia_h100_80gb_hbm3"


@pytest.fixture(scope="module")
def steps():
    return blessed_steps(expected_folder(None))


def run_of(arm, target="table1"):
    (run,) = plan(find(target), Tier.PAPER, 1, [arm])
    return run


def test_a_price_is_a_measured_step_by_rows_tokens_and_rollouts(steps):
    found = price(run_of("nvfp4_lora"), steps, H100)
    (seconds,) = (
        record.value("step_seconds_7b_spread")
        for record in steps
        if record.target == "step_lengths"
        and record.arm == "nvfp4_lora"
        and record.environment["gpu"][0]["name"] == "NVIDIA H100 80GB HBM3"
    )
    # 600 steps of four updates a rollout, each of 1024 rows where 128 were timed.
    assert found.seconds == pytest.approx(150 * 8 * seconds)
    assert H100 in found.basis
    assert not found.at_most


def test_steps_of_this_card_and_with_the_run_s_noise_come_first(steps):
    on_h200 = price(run_of("nvfp4_lora"), steps, "nvidia_h200")
    elsewhere = price(run_of("nvfp4_lora"), steps, None)
    noisy = price(run_of("nvfp4_lora_aqn"), steps, None)
    assert ("nvidia_h200" in on_h200.basis, H100 in elsewhere.basis) == (True, True)
    assert noisy.seconds > elsewhere.seconds


def test_what_nothing_like_it_was_timed_for_has_no_price(steps):
    run = run_of("bf16_lora")
    of_others = DataConfig(source="bigmath", levels=(3,))
    other_set = dataclasses.replace(run, scale=dataclasses.replace(run.scale, data=of_others))
    assert price(other_set, steps, H100) is None
    assert price(run_of("bf16"), steps, H100) is None
    assert price(run_of("bf16_full"), steps, H100) is None  # 3B alone was timed


@pytest.mark.parametrize(
    ("target", "arm"),
    [("table1", "nf4_lora"), ("table1", "mxfp4_lora"), ("table1_3b", "bf16_full")],
)
def test_a_step_of_equal_lengths_of_the_same_shape_gives_an_upper_limit(steps, target, arm):
    found = price(run_of(arm, target), steps, None)
    assert found.at_most
    assert found.basis.startswith("at most, of equal lengths: a step of 8 rows of 2048 tokens")
    (timed,) = (
        next(value.value for name, value in record.metrics.items() if "step_seconds" in name)
        for record in steps
        if record.target in ("table3_arms", "table3_full") and record.arm == arm
    )
    assert found.seconds == pytest.approx(150 * 1024 / 8 * 300 / 2048 * timed)


def test_the_shortest_answer_needs_both_arms_of_the_headline(steps):
    prices = {arm: price(run_of(arm), steps, H100) for arm in ("bf16_lora", "nvfp4_lora_aqn")}
    known = {arm: one for arm, one in prices.items() if one is not None}
    expected = expected_folder(None)
    assert "table1_coder_0_5b" in shortest_answer(known, expected, range(5))
    assert shortest_answer({"bf16_lora": known["bf16_lora"]}, expected, range(5)) is None
