"""Figures: rows from records by plain arithmetic, and pictures that show those rows."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from figures import accuracy
from figures.__main__ import main, places
from figures.curves import ENTROPY, REWARD, curve_rows, smooth
from figures.layout import spread
from figures.palette import order, short
from figures.timings import operations, roofline
from repro.evidence.paper import PaperCell
from repro.evidence.record import Estimate, Record, record_of
from repro.evidence.store import RunsFolder, blessed_records
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find

ROOT = Path(__file__).resolve().parent.parent.parent
EXPECTED = ROOT / "expected"
STEPS = 12


def made_up(arms: Sequence[str], seeds: int) -> list[Record]:
    """Return records with random series; nothing here was measured."""
    rng = np.random.default_rng(7)
    records = []
    for run in plan(find("table1"), Tier.SMOKE, seeds, list(arms)):
        trained = run.arm.training != "none"
        series = {
            "accuracy": list(rng.uniform(0, 1, STEPS)),
            "entropy": list(rng.uniform(0.1, 0.4, STEPS)),
        }
        metrics = {
            "accuracy": Estimate(value=float(rng.uniform(40, 95)), unit="percent"),
            "accuracy_forced_working": Estimate(value=92.0, unit="percent"),
        }
        records.append(
            record_of(
                run,
                metrics=metrics,
                series=series if trained else {},
                environment={},
                started=datetime.now(UTC),
            )
        )
    return records


ARMS = ("bf16", "nvfp4_lora", "bf16_full", "bf16_lora", "bf16_lora_random_reward")


def test_a_curve_is_the_mean_over_seeds_of_smoothed_series() -> None:
    records = made_up(["nvfp4_lora"], 4)
    rows = curve_rows(records, "accuracy", window=1)
    data = np.array([record.series["accuracy"] for record in records], dtype=float)
    assert [row.place for row in rows] == list(range(1, STEPS + 1))
    np.testing.assert_allclose([row.mean for row in rows], data.mean(0))
    low, high = stats.t.interval(0.95, 3, data.mean(0), stats.sem(data))
    np.testing.assert_allclose([row.low for row in rows], low)
    np.testing.assert_allclose([row.high for row in rows], high)


def test_smoothing_is_centred_and_shorter_at_the_ends() -> None:
    assert smooth([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]
    assert smooth([1.0, None, 5.0], 3) == [1.0, 3.0, 5.0]


def test_arms_without_the_series_and_failed_runs_are_left_out() -> None:
    rows = REWARD.rows(made_up(ARMS, 2))
    assert {row.arm for row in rows} == set(ARMS) - {"bf16"}


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_one_seed_or_two_have_a_line_and_no_band(seeds: int) -> None:
    rows = ENTROPY.rows(made_up(["bf16_lora"], seeds))
    assert {row.n for row in rows} == {seeds}
    figure = ENTROPY.draw(rows)
    assert len(figure.axes) == 1
    assert bool(figure.axes[0].collections) == (seeds == 3)


def test_controls_have_a_panel_of_their_own() -> None:
    figure = REWARD.draw(REWARD.rows(made_up(ARMS, 3)))
    paper, controls = figure.axes
    assert [len(axes.lines) for axes in (paper, controls)] == [3, 1]
    assert len(paper.collections) == 3
    shown = [row.mean for row in curve_rows(made_up(["nvfp4_lora"], 3), "accuracy")]
    assert any(len(line.get_ydata()) == len(shown) for line in paper.lines)
    labels = {text.get_text() for text in paper.texts}
    assert labels == {"BF16 full", "BF16 LoRA", "NVFP4 LoRA"}


@pytest.mark.usefixtures("planned_targets")
def test_shared_arms_are_drawn_at_the_seeds_of_a_targets_own(tmp_path: Path) -> None:
    name = "study_schedules"
    for target, arm, seeds in (("study", "nvfp4_lora_aqn", 10), (name, "aqn_linear", [5, 6])):
        for run in plan(find(target), Tier.MINI, seeds, [arm]):
            now = datetime.now(UTC)
            record_of(run, metrics={}, environment={}, started=now).write(tmp_path)
    drawn_at = sorted((arm, e.name) for e, arm in places(RunsFolder(tmp_path), "mini", name))
    arms = ("aqn_exponential", "aqn_linear")
    assert drawn_at == [(arm, f"seed-{seed}.json") for arm in arms for seed in (5, 6)]
    assert len(places(RunsFolder(tmp_path), "mini", "study")) == 10


def test_the_accuracy_rows_carry_interval_seeds_and_the_papers_values() -> None:
    records = made_up(ARMS, 5)
    cell = PaperCell(
        id="x",
        row="NVFP4, LoRA",
        column="7B",
        quantity="accuracy",
        value=88.5,
        unit="percent",
        confidence="exact",
        place="Table 1",
        arm="nvfp4_lora",
    )
    rows = {row.arm: row for row in accuracy.rows(records, [cell])}
    values = [r.value("accuracy") for r in records if r.arm == "nvfp4_lora"]
    assert rows["nvfp4_lora"].seeds == tuple(values)
    assert rows["nvfp4_lora"].mean == pytest.approx(np.mean(values))
    assert rows["nvfp4_lora"].paper == {"7B": 88.5}
    assert rows["bf16"].paper == {}
    measured, printed = accuracy.draw(list(rows.values())).axes
    assert [label.get_text() for label in measured.get_yticklabels()] == [
        short(arm) for arm in order(ARMS)
    ]
    assert [float(line.get_xdata()[0]) for line in printed.lines] == [88.5]


def accuracy_rows(*means: float) -> list[accuracy.AccuracyRow]:
    """Return a row of three seeds, a point apart, about each mean in percent."""
    return [
        accuracy.AccuracyRow(
            arm=arm, n=3, mean=mean, low=mean - 3, high=mean + 3, seeds=(mean - 1, mean, mean + 1),
            ceiling=None, rate=None, paper={},
        )
        for arm, mean in zip(ARMS, means, strict=False)
    ]  # fmt: skip


def test_accuracies_that_all_lie_high_get_an_axis_of_their_own_and_say_so() -> None:
    (axes,) = accuracy.draw(accuracy_rows(96.0, 97.0)).axes
    assert axes.get_xlim() == (80, 100)
    assert axes.get_xlabel() == "accuracy, percent (the axis begins at 80)"
    (axes,) = accuracy.draw(accuracy_rows(25.0, 97.0)).axes
    assert axes.get_xlim() == (0, 100)
    assert axes.get_xlabel() == "accuracy, percent"


@pytest.mark.parametrize(
    ("changes", "begin"),
    [({}, 80), ({"low": None}, 90), ({"low": 0.0}, 0), ({"ceiling": 74.0}, 0)],
)
def test_the_axis_begins_below_all_that_is_drawn(changes: dict[str, Any], begin: int) -> None:
    (row,) = accuracy_rows(96.0)
    assert accuracy.first_percent([dataclasses.replace(row, **changes)]) == begin


def test_the_sweep_is_drawn_only_when_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("learning_rates_0_5b", "table1_0_5b"):
        for run in plan(find(name), Tier.MINI, 2):
            ends = {"accuracy": Estimate(value=90.0 + run.seed % 5, unit="percent")}
            record_of(run, metrics=ends, environment={}, started=datetime.now(UTC)).write(tmp_path)
    line = ["--records", str(tmp_path), "--out", str(tmp_path / "drawn"), "--kinds", "svg"]
    assert main(line) == 0
    names = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert "mini_table1_0_5b_accuracy.svg" in names
    assert not any("learning_rates" in name for name in names)
    assert main([*line, "--target", "learning_rates_0_5b"]) == 0
    assert (tmp_path / "drawn" / "mini_learning_rates_0_5b_accuracy.svg").is_file()
    capsys.readouterr()


def test_labels_are_spread_apart_in_order() -> None:
    placed = spread([0.50, 0.51, 0.52, 0.90], 0.05)
    assert all(b - a >= 0.05 - 1e-9 for a, b in itertools.pairwise(placed))
    assert sum(placed[:3]) / 3 == pytest.approx(0.51)
    assert placed[3] == 0.90
    assert spread([], 0.1) == []


def test_the_command_draws_png_and_svg_and_the_same_bytes_again(tmp_path: Path) -> None:
    for record in made_up(ARMS, 2):
        record.write(tmp_path / "runs")
    line = ["--records", str(tmp_path / "runs"), "--expected", str(ROOT / "expected"), "--out"]
    assert main([*line, str(tmp_path / "a")]) == 0
    assert main([*line, str(tmp_path / "b")]) == 0
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    figures = ("accuracy", "entropy_curves", "paired_differences", "reward_curves")
    pictures = ["figure5_paired_differences", *(f"table1_{name}" for name in figures)]
    assert names == [f"smoke_{name}.{kind}" for name in pictures for kind in ("png", "svg")]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_nothing_to_draw_is_said_and_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--records", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "no records to draw" in capsys.readouterr().err
    line = ["--blessed", "--tier", "systems", "--expected", str(tmp_path), "--out", str(tmp_path)]
    assert main(line) == 1
    assert "no blessed records to draw of the systems tier" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--blessed --tier sytems", "there is no tier 'sytems' (did you mean systems?)"),
        ("--kinds gif", "--kinds gif: needs png, svg or png,svg"),
        ("--teir smoke", "there is no argument --teir (did you mean --tier?)"),
    ],
)
def test_a_bad_command_line_is_a_sentence(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert words in capsys.readouterr().err


def test_an_unreadable_record_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for record in made_up(["bf16_lora"], 2):
        path = record.write(tmp_path)
    path.write_text("{")
    assert main(["--records", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert str(path) in capsys.readouterr().err


def test_the_roofline_goes_from_few_rows_to_many_and_lies_above_the_floor() -> None:
    rows = roofline.rows(blessed_records(EXPECTED, Tier.SYSTEMS, "kernels", "nvidia_h200"))
    lines: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        lines.setdefault((row.arm, row.block), []).append(row.rows)
    assert set(lines) == {
        (arm, block) for arm in ("nf4", "mxfp4", "nvfp4") for block in ("7b", "32b")
    }
    for counts in lines.values():
        assert counts == sorted(counts)
        assert len(counts) == 11
    assert all(row.microseconds > row.floor for row in rows)
    axes = roofline.draw(rows).axes
    assert [len(part.lines) for part in axes] == [5, 5, 5, 5]


def test_operations_stand_against_their_bars_in_the_order_of_their_sizes() -> None:
    names = ("quantize_share_nf4", "portable_ratio_nvfp4_64", "portable_ratio_nvfp4_1024")
    bounds: operations.Bounds = {("operations", name): (0.8, None) for name in names}
    rows = operations.rows(
        blessed_records(EXPECTED, Tier.SYSTEMS, "kernels", "nvidia_h200"), bounds
    )
    assert len(rows) == 3
    labels = [row.label for row in rows]
    few, many = (labels.index(f"portable layer over BF16's, NVFP4 M = {m}") for m in (64, 1024))
    assert few < many
    (nf4,) = [row for row in rows if row.label == "quantize, NF4"]
    assert nf4.low <= nf4.mean <= nf4.high < 0.8 == nf4.least
    assert {row.panel for row in rows} == {"share", "ratio"}
    assert len(operations.draw(rows).axes) == 2


def test_drawing_needs_no_torch_and_no_backend_of_a_notebook() -> None:
    code = "import sys, figures.__main__; assert 'torch' not in sys.modules"
    notebook = os.environ | {"MPLBACKEND": "module://not_installed.backend_inline"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=notebook)
