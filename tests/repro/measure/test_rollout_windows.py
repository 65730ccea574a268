"""A rollout's time from windows of its steps, on a small shape with a made-up or a host clock."""

import dataclasses

import pytest
import torch

from repro.measure import rollout_cells, throughput
from repro.measure.rollout_cells import Cell, Repeat
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.rollout.step_timing import fill_cache, fill_rows, time_steps
from repro.spec.throughput_scale import ThroughputPoint, ThroughputScale
from tests.repro.measure.test_throughput_repeats import loaded, runs_of, small_policy
from tests.repro.small_runs import context_of

__all__ = ["loaded"]  # a fixture

POINT = ThroughputPoint(
    name="7b", shape="a", prompt_tokens=8, new_tokens=64, batches=(1, 2), windows=3, window_steps=5
)
PAPER = ThroughputPoint(name="7b", shape="qwen2.5-7b", new_tokens=2048, windows=4)


def engine_for(point=POINT):
    return Engine(
        small_policy(),
        EngineConfig(
            slots=max(point.batches),
            max_positions=point.prompt_tokens + point.new_tokens,
            max_new_tokens=point.new_tokens,
            ignore_end=True,
        ),
    )


def test_a_step_time_that_grows_in_proportion_to_the_position_is_summed_as_it_is(monkeypatch):
    def at(position):
        return 2e-3 + 3e-7 * position

    def measured(engine, width, position, count):
        return sum(at(position + 1 + i) for i in range(count - 1)) / (count - 1)

    monkeypatch.setattr(rollout_cells, "time_steps", measured)
    monkeypatch.setattr(rollout_cells, "timed", lambda *a, **k: 0.05)
    point = dataclasses.replace(PAPER, name="a", shape="a", batches=(2,))
    repeat = Repeat(seed=3)
    engine = engine_for(dataclasses.replace(POINT, batches=(2,)))
    seconds = Cell(point, 2, engine, repeat, [[1] * 256, [2] * 256]).time_windows()
    whole = 0.05 + sum(at(256 + step) for step in range(2047))
    assert seconds == pytest.approx(whole, rel=1e-4)
    rate = repeat.metrics["tokens_per_second_a_2"]
    assert rate.value == pytest.approx(2 * 2048 / seconds)
    assert "not rolled out whole" in rate.method
    assert rate.n == 64
    # The receipt counts what was timed, not what was estimated.
    assert repeat.seconds == pytest.approx(0.05 + 64 * at(256 + 1023), rel=1e-3)


def test_a_whole_rollout_shows_what_the_windows_gain(monkeypatch):
    monkeypatch.setattr(rollout_cells, "timed", lambda *a, **k: 2.06)
    repeat = Repeat(seed=0)
    Cell(POINT, 2, engine_for(), repeat, [[1] * 8] * 2).compare_with_whole(2.0)
    assert repeat.metrics["window_gain_7b_2"].value == pytest.approx(3.0)
    assert repeat.metrics["tokens_per_second_whole_7b_2"].value == pytest.approx(128 / 2.06)


def test_a_scale_with_windows_gives_every_seed_its_cells(loaded, tmp_path):
    scale = ThroughputScale(points=(POINT,), whole=(("nvfp4_lora", "7b", 2),))
    results = throughput.measure_seeds(runs_of(scale), context_of(tmp_path))
    for measured in results:
        for batch in (1, 2):
            assert (measured.metrics[f"tokens_per_second_7b_{batch}"].value or 0) > 0
            assert (measured.metrics[f"step_seconds_7b_{batch}"].value or 0) > 0
    rates = {measured.metrics["tokens_per_second_7b_1"].value for measured in results}
    assert len(rates) == 3
    compared = ["window_gain_7b_2" in measured.metrics for measured in results]
    assert compared == [True, False, False]
    assert not any("window_gain_7b_1" in measured.metrics for measured in results)


@pytest.mark.usefixtures("host_clock")
def test_timed_steps_run_from_the_position_they_are_given(monkeypatch):
    engine = engine_for()
    seen: list[list[int]] = []
    run_step = engine.steps

    def noting(width, sampling):
        seen.append(engine.state.positions[:width].tolist())
        run_step(width, sampling)

    monkeypatch.setattr(engine, "steps", noting)
    fill_cache(engine, 0)
    fill_rows(engine, 2, 0)
    assert time_steps(engine, 2, 20, 4) > 0
    assert seen == [[20, 20], [21, 21], [22, 22], [23, 23]]
    assert engine.pool.free == engine.pool.capacity
    assert bool((engine.state.positions == -1).all())


@pytest.mark.usefixtures("host_clock")
def test_rows_that_stop_within_timed_steps_are_named():
    engine = engine_for()
    fill_cache(engine, 0)
    engine.forward.blocks[0].cache.values[1] = torch.nan  # row 0's first block
    with pytest.raises(FloatingPointError, match=r"rows \[0\] .*4 timed"):
        time_steps(engine, 2, 20, 4)
    fill_cache(engine, 0)
    assert time_steps(engine, 2, 20, 4) > 0


@pytest.mark.usefixtures("host_clock")
def test_rows_that_would_share_blocks_are_refused():
    with pytest.raises(ValueError, match=r"3 rows at position 60 .*9 blocks"):
        time_steps(engine_for(), 3, 60, 4)


def test_the_filled_cache_holds_no_zeros_and_depends_on_the_seed():
    engine = engine_for()
    fill_cache(engine, 0)
    first = [block.cache.keys.clone() for block in engine.forward.blocks]
    for block in engine.forward.blocks:
        for cache in (block.cache.keys, block.cache.values):
            assert bool(torch.isfinite(cache).all())
            assert float((cache == 0).float().mean()) < 1e-3
            assert float(cache.std()) == pytest.approx(1, abs=0.05)
    fill_cache(engine, 1)
    assert not torch.equal(first[0], engine.forward.blocks[0].cache.keys)
    fill_rows(engine, 2, 0)
    assert int(engine.state.tokens.max()) < 512
    assert len(set(engine.state.uniforms[:2].flatten().tolist())) > 100
