"""Pictures of the systems tier: rows from blessed records by plain arithmetic, marks as stated."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from statistics import fmean

import pytest
from scipy import stats

from figures import protocol
from figures.__main__ import main, save, systems_figures
from figures.timings import memory, operations, steps, throughput
from figures.timings.rates import plain, rate_rows
from figures.timings.systems import PICTURES
from repro.evidence.paper import paper_cells
from repro.evidence.record import Record
from repro.evidence.store import blessed_records, stored_path, write_stored
from repro.evidence.verdicts.expectation import load_bars
from repro.spec.tier import Tier
from repro.targets import find

ROOT = Path(__file__).resolve().parent.parent.parent
EXPECTED = ROOT / "expected"
DEVICE = "nvidia_h200"


def records_of(*names: str) -> list[Record]:
    return [
        record for name in names for record in blessed_records(EXPECTED, Tier.SYSTEMS, name, DEVICE)
    ]


def values(records: list[Record], arm: str, metric: str) -> list[float]:
    """Return one value a seed, in the order of the seeds."""
    by_seed = {r.seed: r.value(metric) for r in records if r.arm == arm}
    return [value for _, value in sorted(by_seed.items()) if value is not None]


def test_rates_are_means_with_t_intervals_beside_the_papers_cells() -> None:
    records = records_of("table6")
    rows = rate_rows(records, paper_cells(EXPECTED, "table6"))
    assert [(row.arm, row.place) for row in rows] == [
        (arm, batch) for arm in ("bf16_lora", "nvfp4_lora") for batch in (1, 2, 4, 8)
    ]
    data = values(records, "nvfp4_lora", "tokens_per_second_7b_8")
    assert rows[-1].mean == pytest.approx(fmean(data))
    low, high = stats.t.interval(0.95, 4, fmean(data), stats.sem(data))
    assert (rows[-1].low, rows[-1].high) == (pytest.approx(low), pytest.approx(high))
    assert [row.paper for row in rows] == [None, 115.4, None, 1641.1, None, 151.6, None, 2091.8]


def test_gains_are_paired_by_seed_and_carry_what_is_claimed() -> None:
    records = records_of("rollout")
    rates = rate_rows(records)
    margins = {("nvfp4_lora", "tokens_per_second_7b_8"): 2.0}
    gains = throughput.gains(records, rates, margins)
    assert {row.arm for row in gains} == {"nvfp4_lora"}
    (gain,) = [row for row in gains if (row.model, row.place) == ("7b", 8)]
    slow, fast = (
        values(records, arm, "tokens_per_second_7b_8") for arm in ("bf16_lora", "nvfp4_lora")
    )
    ratios = [b / a for a, b in zip(slow, fast, strict=True)]
    assert gain.mean == pytest.approx(math.exp(fmean(map(math.log, ratios))))
    assert gain.must == 2.0
    assert gain.low is not None
    assert gain.high is not None
    assert gain.low < gain.mean < gain.high
    assert [row.must for row in gains if row.place == 1] == [None, None, None]


def test_must_and_goal_are_those_stated() -> None:
    stated = load_bars(EXPECTED, "systems", "rollout", DEVICE)
    bars = {(item.arm, item.metric): item for item in stated}
    rows = rate_rows(records_of("rollout"), (), bars)
    for row in rows:
        bar = bars.get((row.arm, f"tokens_per_second_{row.model}_{row.place}"))
        assert (row.must, row.goal) == ((bar.accept[0], bar.goal) if bar else (None, None))
    assert any(row.goal is not None for row in rows)


def test_rows_by_rank_join_the_ranks_of_one_format() -> None:
    assert plain("nf4_lora_r16_bitsandbytes") == "nf4_lora_bitsandbytes"
    assert plain("nvfp4_lora_r128") == "nvfp4_lora"
    rows = rate_rows(records_of("figure11"), paper_cells(EXPECTED, "figure11"), by_rank=True)
    lines = {(row.model, row.arm): [] for row in rows}
    for row in rows:
        lines[row.model, row.arm].append((row.place, row.paper))
    assert lines["14b", "nf4_lora"] == [(16, 45.1), (32, 44.2), (64, 42.8)]
    assert lines["32b", "nf4_lora_bitsandbytes"] == [(16, None), (32, None), (64, None)]
    axes = throughput.draw_ranks(rows, "title", "note").axes
    assert [part.get_title(loc="left") for part in axes] == ["Qwen2.5-14B", "Qwen2.5-32B"]
    assert all(part.get_ylim()[0] == 0 for part in axes)


def test_a_steps_phases_fill_its_time_and_the_papers_ratio_stands_beside() -> None:
    records = records_of("table3")
    rows = steps.rows(records, paper_cells(EXPECTED, "table3"))
    for row in rows:
        assert sum(row.phases.values()) == pytest.approx(row.seconds, rel=0.02)
        assert set(row.phases) == set(steps.PHASES)
    fast = {row.batch: row for row in rows if row.arm == "nvfp4_lora"}
    assert {batch: row.paper for batch, row in fast.items()} == {
        "batch 2": 1.5,
        "batch 4": 1.4,
        "batch 8": 1.2,
    }
    (speedup,) = values(records, "nvfp4_lora", "speedup_7b_b8")
    assert fast["batch 8"].speedup == pytest.approx(speedup, rel=1e-5)
    texts = [text.get_text() for text in steps.draw(rows, "title", "note").axes[0].texts]
    assert sum("paper: 1.2 x" in text for text in texts) == 1
    assert all(" s" in text for text in texts)


def test_memory_shows_measured_peak_plan_and_limits() -> None:
    names = ("memory", "memory_budgets")
    records = records_of(*names)
    stated = [item for name in names for item in load_bars(EXPECTED, "systems", name)]
    rows = memory.rows(records, {(item.arm, item.metric): item for item in stated})
    (small,) = [row for row in rows if row.point.endswith("4 rows at once") and row.size == 32]
    assert (small.budget, small.most) == (32.0, 32.0)
    (record,) = [r for r in records if r.target == "memory_budgets"]
    assert small.measured * 1e9 == pytest.approx(record.value("peak_bytes_32b_32gb"))
    assert small.planned is not None
    assert small.planned * 1e9 == pytest.approx(record.value("predicted_bytes_32b_32gb"))
    assert [row.size for row in rows] == sorted((row.size for row in rows), reverse=True)
    figure = memory.draw(rows, "title", "note")
    widths = [bar.get_path().get_extents(bar.get_patch_transform()).width
              for bar in figure.axes[0].patches]  # fmt: skip
    assert widths == pytest.approx([row.measured for row in rows])


def test_a_note_names_seeds_device_commit_and_protocol() -> None:
    records = records_of("rollout")
    commit = records[0].commit[:7]
    assert protocol.origin(records) == f"5 seeds per arm on one NVIDIA H200, commit {commit}"
    assert protocol.origin(records[:9]).startswith("4 to 5 seeds per arm (fewest: NVFP4 LoRA)")
    assert protocol.rollouts(records) == (
        "256 (192 at 14B, 32B) new tokens per row after 256 of the prompt, timed whole; "
        "random weights"
    )
    assert "windows of decode steps" in protocol.rollouts(records_of("table5"))
    assert protocol.adapter(records) == "LoRA of rank 32"


def test_every_target_of_a_picture_exists_and_is_drawn_once() -> None:
    names = [name for picture in PICTURES for name in picture.targets]
    assert len(names) == len(set(names))
    assert [find(name).name for name in names] == names


def test_a_picture_takes_only_its_own_targets_and_none_without_records() -> None:
    records = {("systems", "table5"): records_of("table5"), ("smoke", "rollout"): []}
    ((name, figure),) = systems_figures(records, EXPECTED, DEVICE)
    assert name == "tables_5_to_8_throughput"
    assert [part.get_title(loc="left") for part in figure.axes] == ["Qwen2.5-3B", ""]


def test_operations_are_those_of_the_kernels_alone(tmp_path: Path) -> None:
    bars: operations.Bounds = {("nvfp4_lora", "host_share_7b"): (None, 30.0)}
    assert operations.rows(records_of("rollout"), bars) == []
    blessed = ["--blessed", "--expected", str(EXPECTED), "--tier", "systems", "--kinds", "svg"]
    assert main([*blessed, "--target", "rollout", "--out", str(tmp_path)]) == 0
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert f"systems_{DEVICE}_rollout_throughput.svg" in drawn
    assert all(name.endswith("_rollout_throughput.svg") for name in drawn)


def test_two_devices_are_drawn_apart_and_named(tmp_path: Path) -> None:
    for device in ("nvidia_h100", "nvidia_h200"):
        gpu = {"gpu": [{"name": device.replace("_", " ").upper()}]}
        records = [
            dataclasses.replace(record, environment=record.environment | gpu)
            for record in records_of("rollout_ranks")
        ]
        path = stored_path(tmp_path / "expected", "systems", "rollout_ranks", device)
        write_stored(path, ["tokens_per_second_7b_1"], records)
    line = ["--blessed", "--kinds", "svg", "--expected", str(tmp_path / "expected")]
    assert main([*line, "--out", str(tmp_path / "out")]) == 0
    drawn = {path.stem: path.read_text() for path in (tmp_path / "out").iterdir()}
    names = {device: f"systems_{device}_rollout_ranks" for device in ("nvidia_h100", "nvidia_h200")}
    assert drawn.keys() == set(names.values())
    assert "5 seeds per arm on one NVIDIA H100" in drawn[names["nvidia_h100"]]


def test_a_layout_that_differs_in_its_last_digits_gives_the_same_file(tmp_path: Path) -> None:
    records = records_of("table9")
    texts = []
    for shift in (0.0, 1e-14):
        figure = throughput.draw_ranks(rate_rows(records, by_rank=True), "A title", "a note")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for part in figure.axes:
            x, y, width, height = part.get_position().bounds
            part.set_position((x, y + shift, width, height))
        (path,) = save(figure, tmp_path / f"{shift}", "ranks", ["svg"])
        texts.append(path.read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
