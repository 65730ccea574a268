"""Points that do not fit: which the plan says, and what one that runs out of memory costs."""

import dataclasses

import bitsandbytes  # noqa: F401 - peft imports it late: under a pretended device that fails
import pytest
import torch

from repro.evidence.record import read_record
from repro.measure import rollout_cells, throughput
from repro.measure.rollout_plan import cell_of, not_fitting, planned_bytes
from repro.run.carry_out import carry_out
from repro.spec.throughput_scale import ThroughputPoint, ThroughputScale
from repro.spec.tier import GIB, Tier
from repro.targets.rollout_speed import ROLLOUT
from repro.targets.table1 import BF16_LORA, NVFP4_LORA
from tests.repro.measure.test_throughput_repeats import loaded, runs_of
from tests.repro.small_runs import context_of

__all__ = ["loaded"]  # a fixture

POINT = ThroughputPoint(name="p", shape="a", prompt_tokens=8, new_tokens=4, batches=(1, 2, 3))
OTHER = dataclasses.replace(POINT, name="q", shape="b", batches=(1,))
SCALE = ThroughputScale(points=(POINT, OTHER))
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has")
NEEDS = "needs 160.0 of 140.0 GiB by the allocator, at least"
ROLLOUT_SCALE = ROLLOUT.scales[Tier.SYSTEMS]
# Free and total of an H100 80 GB and an H200, as CUDA states them.
H100, H200 = round(79.2 * GIB), round(139.8 * GIB)


@pytest.fixture
def exhausts(monkeypatch):
    """Return what lets memory run out where a rollout's number of rows and tokens say so."""

    def install(when):
        whole, full = rollout_cells.timed, []

        def info(*device):
            # Full when asked where memory ran out, and free again afterwards.
            return (0 if full and full.pop() else 139 * GIB), 140 * GIB

        def timed(engine, prompts, new_tokens, **how):
            if when(len(prompts), new_tokens):
                full.append(True)
                raise NO_MEMORY
            return whole(engine, prompts, new_tokens, **how)

        monkeypatch.setattr(torch.cuda, "mem_get_info", info)
        monkeypatch.setattr(rollout_cells, "timed", timed)

    return install


def test_a_batch_that_runs_out_of_memory_leaves_the_others_standing(loaded, exhausts, tmp_path):
    exhausts(lambda rows, tokens: rows == 2)
    for measured in throughput.measure_seeds(runs_of(SCALE, 2), context_of(tmp_path)):
        assert measured.facts["not_run"] == {"p_2": NEEDS}
        for cell in ("p_1", "p_3", "q_1"):
            assert (measured.metrics[f"tokens_per_second_{cell}"].value or 0) > 0
        assert "host_share_p" in measured.metrics
        assert not any(name.endswith("_p_2") for name in measured.metrics)
    assert loaded == ["a", "b"]


def test_a_batch_that_runs_out_in_a_later_seed_keeps_none_of_its_times(loaded, exhausts, tmp_path):
    whole_rollouts = iter(range(9))
    # The start has one of four tokens, too; then two seeds', of which the second has no room.
    exhausts(lambda rows, tokens: rows == 3 and tokens == 4 and next(whole_rollouts) == 2)
    results = throughput.measure_seeds(runs_of(SCALE, 3), context_of(tmp_path))
    assert next(whole_rollouts) == 3
    assert all(measured.facts["not_run"] == {"p_3": NEEDS} for measured in results)
    assert not any("tokens_per_second_p_3" in measured.metrics for measured in results)


def test_an_engine_that_does_not_fit_is_tried_smaller(loaded, monkeypatch, tmp_path):
    slots: list[int] = []
    engine = throughput.Engine

    def build(policy, config):
        slots.append(config.slots)
        if config.slots > 1:
            raise NO_MEMORY
        return engine(policy, config)

    monkeypatch.setattr(throughput, "Engine", build)
    results = throughput.measure_seeds(runs_of(SCALE, 1), context_of(tmp_path))
    assert slots == [3, 2, 1, 1]
    assert list(results[0].facts["not_run"]) == ["p_3", "p_2"]
    assert "tokens_per_second_p_1" in results[0].metrics


def test_the_engine_has_room_for_all_rows_at_full_length(loaded):
    policy = throughput._policy(runs_of(SCALE, 1)[0], "a")
    point = dataclasses.replace(POINT, prompt_tokens=30, new_tokens=40)
    engine = throughput._engine(point, 3, policy, "own")
    assert engine.pool.capacity == 3 * 3


def test_a_batch_that_the_plan_excludes_is_not_tried(loaded, exhausts, monkeypatch, tmp_path):
    said = "needs 95.5 of 79.2 GiB by the plan"
    totals: list[int] = []

    def plan(scale, arm, total_bytes):
        totals.append(total_bytes)
        return {"p_3": said, "q_1": said}

    monkeypatch.setattr(throughput, "not_fitting", plan)
    exhausts(lambda rows, tokens: rows == 3)
    results = throughput.measure_seeds(runs_of(SCALE, 1), context_of(tmp_path))
    assert totals == [140 * GIB]
    assert loaded == ["a"]
    # A point without a batch that fits is named as a whole, for what else it would have had.
    assert results[0].facts["not_run"] == {"p_3": said, "q_1": said, "q": said}
    assert "tokens_per_second_p_2" in results[0].metrics


def test_weights_that_do_not_fit_cost_their_own_shape(loaded, monkeypatch, tmp_path):
    load = throughput._policy

    def policy(run, shape):
        if shape == "a":
            raise NO_MEMORY
        return load(run, shape)

    monkeypatch.setattr(throughput, "_policy", policy)
    results = throughput.measure_seeds(runs_of(SCALE, 1), context_of(tmp_path))
    assert set(results[0].facts["not_run"]) == {"p_1", "p_2", "p_3", "p"}
    assert "tokens_per_second_q_1" in results[0].metrics


def test_retries_are_counted_under_the_clock_and_not_at_the_start(loaded, monkeypatch, tmp_path):
    count = 0
    whole = rollout_cells.timed

    def timed(engine, prompts, new_tokens, **how):
        nonlocal count
        # The start's rollouts come first, with prompts cut short or for the first token alone.
        count += 10 if len(prompts[0]) < 8 or "first_seed" not in how else 1
        return whole(engine, prompts, new_tokens, **how)

    monkeypatch.setattr(rollout_cells, "timed", timed)
    monkeypatch.setattr(rollout_cells, "retries", lambda: count)
    results = throughput.measure_seeds(runs_of(SCALE, 2), context_of(tmp_path))
    # Two seeds' rollouts, and the prefill that is timed for both.
    assert "retried 12 times" in results[0].facts["not_run"]["q_1"]
    assert "tokens_per_second_q_1" not in results[0].metrics


def test_an_arm_of_which_nothing_fits_has_failed_and_says_why(loaded, monkeypatch, tmp_path):
    said = "needs 95.5 of 79.2 GiB by the plan"
    cells = dict.fromkeys(("p_1", "p_2", "p_3", "q_1"), said)
    monkeypatch.setattr(throughput, "not_fitting", lambda scale, arm, total: cells)
    monkeypatch.setattr("repro.run.carry_out.capture_environment", dict)
    (path,) = carry_out(runs_of(SCALE, 1), tmp_path, context_of(tmp_path / "work"))
    record = read_record(path)
    assert not record.ok
    assert f"p_1 {said}" in record.outcome["reason"]
    assert loaded == []


def test_on_80_gb_only_256_rows_of_32b_in_16_bits_do_not_fit():
    left_out = not_fitting(ROLLOUT_SCALE, BF16_LORA, H100)
    assert list(left_out) == ["32b_256"]
    assert "95.5 of 79.2 GiB" in left_out["32b_256"]
    assert not_fitting(ROLLOUT_SCALE, NVFP4_LORA, H100) == {}


def test_on_141_gb_everything_that_was_recorded_there_fits():
    for arm in ROLLOUT.arms:
        assert not_fitting(ROLLOUT_SCALE, arm, H200) == {}


def test_each_row_has_a_cache_of_its_own():
    point = dataclasses.replace(ROLLOUT_SCALE.points[0], prompt_tokens=33, new_tokens=32)
    grown = planned_bytes(point, 40, NVFP4_LORA) - planned_bytes(point, 39, NVFP4_LORA)
    three_blocks = 4 * 28 * 512 * 32 * 3
    assert three_blocks < grown < 3 * three_blocks
    assert cell_of(point, 40) == "7b_40"
