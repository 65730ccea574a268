"""Paired differences: rows are those of the verdicts, and the picture shows them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox
from scipy import stats

from figures import contrasts
from figures.__main__ import load, main, paired_figure, verdicts_of
from figures.palette import colour
from repro.evidence import printed
from repro.evidence.record import Estimate, Record, record_of
from repro.evidence.store import blessed_sources
from repro.evidence.verdicts.claim_verdicts import judge
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import TARGETS, find
from tests.repro.planned import PLANNED

ROOT = Path(__file__).resolve().parent.parent.parent
EXPECTED = ROOT / "expected"
Overlap = Callable[[Bbox, Bbox], bool]
KNOWN = {target.name: target for target in (*TARGETS, *PLANNED)}
DRAWN = [
    name
    for name, target in KNOWN.items()
    if target.procedure in contrasts.PROCEDURES
    and Tier.MINI in target.scales
    and any(contrasts._parts(claim) for claim in target.claims)
]
pytestmark = pytest.mark.usefixtures("planned_targets")


@functools.cache
def made_up(name: str, seeds: int = 5, *, without: tuple[str, ...] = ()) -> Sequence[Record]:
    """Return records of a target's arms, shared ones included; nothing here was measured.

    Made once: copy them to change their series.
    """
    rng = np.random.default_rng(11)
    target = KNOWN[name]
    records = []
    for arm in target.arms:
        home, recorded = target.home(arm.name)
        for run in plan(home, Tier.MINI, seeds, [recorded]):
            metrics = {}
            for metric in target.metrics:
                if metric.name not in without:
                    value = float(rng.uniform(40, 90) if metric.unit == "percent" else rng.random())
                    metrics[metric.name] = Estimate(value=value, unit=metric.unit)
            record = record_of(
                run, metrics=metrics, series={}, environment={}, started=datetime.now(UTC)
            )
            records.append(replace(record, arm=arm.name))
    return tuple(records)


def cells_of(name: str, records: Sequence[Record]) -> list[contrasts.Cell]:
    return contrasts.cells(records, find(name), Tier.MINI)


def picture(name: str, records: Sequence[Record]) -> Figure:
    figure = paired_figure(records, EXPECTED, "mini", name, f"; {name}, mini tier")
    assert figure is not None
    return figure


def by_seed(records: Sequence[Record], metric: str) -> dict[str, dict[int, float]]:
    """Return {arm: {seed: value}} in the shape that verdicts are made of."""
    values: dict[str, dict[int, float]] = {}
    for record in records:
        values.setdefault(record.arm, {})[record.seed] = record.value(metric) or 0.0
    return values


@pytest.mark.parametrize("name", DRAWN)
def test_every_claim_has_a_cell_with_the_effect_and_interval_of_its_verdict_alone(
    name: str,
) -> None:
    target = find(name)
    plain: dict[str, Any] = {"headroom": False, "confounded": "", "draws": None, "test": "t"}
    stated = [
        claim
        for claim in target.claims
        if not claim.mechanism and any(part.is_sided for part in contrasts._parts(claim))
    ]
    records = made_up(name)
    cells = cells_of(name, records)
    metrics = {metric.name: metric for metric in target.metrics}
    values = {metric: by_seed(records, metric) for metric in metrics}
    for claim in (replace(claim, **plain) for claim in stated):
        (verdict,) = judge([claim], metrics, values, {}, {})
        (cell,) = [
            cell
            for cell in cells
            if cell.claimed
            and cell.column.metric == claim.metric
            and cell.arms in (claim.arms, claim.arms[::-1])
        ]
        assert cell.claimed == (1 if cell.arms == claim.arms else -1)
        low, high = sorted((cell.claimed * (cell.low or 0), cell.claimed * (cell.high or 0)))
        assert (verdict.effect, verdict.low, verdict.high) == pytest.approx(
            (cell.claimed * cell.mean, low, high)
        )
        assert (len(cell.pairs), cell.column.unit) == (verdict.n, verdict.unit)
        assert cell.claimed * cell.bound == claim.bound
        assert cell.paper == (not claim.source.startswith("not in the paper"))


def test_neighbours_of_an_order_have_no_side() -> None:
    target = find("study_rewards")
    ranked = replace(target, claims=tuple(c for c in target.claims if c.test == "page"))
    cells = contrasts.cells(made_up("study"), ranked, Tier.MINI)
    assert [cell.arms for cell in cells] == [
        ("nf4_lora", "bf16_lora"),
        ("mxfp4_lora", "nf4_lora"),
        ("nvfp4_lora", "mxfp4_lora"),
    ]
    assert {cell.column.metric for cell in cells} == {"train_reward_mean"}
    assert {cell.claimed for cell in cells} == {0}


def test_an_interaction_is_the_difference_of_two_differences() -> None:
    records = made_up("study_factorial")
    seeds = sorted({record.seed for record in records})
    value = {(r.arm, r.seed): r.value("accuracy") or 0.0 for r in records}
    (cell,) = cells_of("study_factorial", records)
    nvfp4, bf16 = (
        np.array([value[f"{f}_lora_aqn", s] - value[f"{f}_lora", s] for s in seeds])
        for f in ("nvfp4", "bf16")
    )
    np.testing.assert_allclose(cell.pairs, nvfp4 - bf16)
    low, high = stats.t.interval(0.95, 4, np.mean(nvfp4 - bf16), stats.sem(nvfp4 - bf16))
    assert (cell.low, cell.high) == pytest.approx((low, high))


def test_accuracy_down_and_loss_up_is_one_row_with_two_sides() -> None:
    cells = cells_of("study_harm", made_up("study_harm"))
    assert [(cell.arms, cell.column.metric, cell.claimed, cell.paper) for cell in cells] == [
        (arms, metric, side, paper)
        for arms, paper in (
            (("nvfp4_harm", "bf16_harm"), True),
            (("bf16_aqn_harm", "bf16_harm"), False),
            (("nvfp4_aqn_harm", "nvfp4_harm"), False),
        )
        for metric, side in (("accuracy", -1), ("entropy_last", 1))
    ]
    assert {cell.column.base[0] for cell in cells} == {"bf16_harm"}


def test_a_contrast_that_no_claim_names_in_a_metric_is_shown_without_a_side() -> None:
    cells = cells_of("table1_0_5b", made_up("table1_0_5b"))
    assert len(cells) == 12
    assert sum(cell.claimed == 0 for cell in cells) == 7


def test_contrasts_of_arms_without_values_or_with_one_pair_are_left_out() -> None:
    name, common = "study_schedules", "aqn_exponential"
    records = [record for record in made_up(name) if record.arm != "aqn_linear"]
    assert {cell.arms[1] for cell in cells_of(name, records)} == {"aqn_cosine", "aqn_logarithmic"}
    first = records[0].seed
    one = [record for record in made_up(name) if record.seed == first or record.arm == common]
    assert cells_of(name, one) == []
    assert paired_figure(one, EXPECTED, "mini", name, "") is None
    assert paired_figure(one, EXPECTED, "mini", "no_longer_declared", "") is None
    assert cells_of("study_harm", made_up("study_harm", without=("accuracy", "entropy_last"))) == []


def test_the_papers_differences_are_those_of_its_cells() -> None:
    arms = [(f"{name}_lora", "bf16_lora") for name in ("nf4", "mxfp4", "nvfp4")]
    seven, fourteen = printed.differences(EXPECTED, "dose_coder_0_5b", arms).values()
    assert seven == pytest.approx({arms[0]: 0.020, arms[1]: 0.067, arms[2]: 0.055})
    assert fourteen == pytest.approx({arms[2]: 0.03})
    qerl = ("nvfp4_lora_aqn", "bf16_lora")
    small, large = printed.differences(EXPECTED, "table1", [qerl]).values()
    assert (small[qerl], large[qerl]) == pytest.approx((83.7 - 76.1, 90.8 - 88.1))
    assert printed.differences(EXPECTED, "figure9", [qerl]) == {}


def test_the_picture_shows_means_intervals_pairs_and_claimed_sides() -> None:
    records = made_up("study_harm")
    cells = [c for c in cells_of("study_harm", records) if c.column.metric == "accuracy"]
    accuracy, loss = picture("study_harm", records).axes
    dots = [line for line in accuracy.lines if line.get_marker() == "o"]
    assert [line.get_xdata()[0] for line in dots] == [cell.mean for cell in cells]
    assert [line.get_color() for line in dots] == [colour(cell.arms[0]) for cell in cells]
    ticks = [line for line in accuracy.lines if line.get_marker() == "|"]
    assert [tuple(line.get_xdata()) for line in ticks] == [cell.pairs for cell in cells]
    for axes, claimed in ((accuracy, -1), (loss, 1)):
        bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        assert [np.sign(bar.get_width()) for bar in bars] == [claimed] * 3
        assert {bar.get_x() for bar in bars} == {0.0}
    assert (accuracy.get_xlabel(), loss.get_xlabel()) == ("difference, points", "difference, nats")


def test_no_worse_begins_at_its_margin() -> None:
    measured = picture("study", made_up("study")).axes[0]
    bars = [patch for patch in measured.patches if isinstance(patch, Rectangle)]
    assert sorted(bar.get_x() for bar in bars) == [-1.5] + [0.0] * 7


@pytest.mark.parametrize("name", DRAWN)
def test_words_of_the_picture_stay_apart_and_inside_it(name: str, overlap: Overlap) -> None:
    figure = picture(name, made_up(name))
    figure.draw_without_rendering()
    left = figure.axes[0]
    labels = [text.get_window_extent() for text in left.get_yticklabels()]
    heads = [axes._left_title.get_window_extent() for axes in figure.axes]
    ticks = [
        text.get_window_extent()
        for axes in figure.axes
        for text, place in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True)
        if axes.get_xlim()[0] <= place <= axes.get_xlim()[1]
    ]
    feet = [axes.xaxis.label.get_window_extent() for axes in figure.axes]
    rest = [text.get_window_extent() for text in figure.texts]
    boxes = [*labels, *heads, *ticks, *feet, *rest, figure.legends[0].get_window_extent()]
    panels = [axes.get_window_extent() for axes in figure.axes]
    for index, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 + 1
        assert box.x1 <= figure.bbox.x1 + 1
        assert not [other for other in [*boxes[index + 1 :], *panels] if overlap(box, other)]


def test_the_command_draws_each_targets_own_pictures(tmp_path: Path) -> None:
    for record in made_up("study_harm", 3):
        series = record.series | {"entropy": [0.3, 0.2]}
        replace(record, series=series).write(tmp_path / "runs")
    line = ["--records", str(tmp_path / "runs"), "--expected", str(EXPECTED), "--kinds", "svg"]
    assert main([*line, "--out", str(tmp_path / "out")]) == 0
    pictures = ("accuracy", "entropy_curves", "paired_differences")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *(f"mini_study_harm_{picture}.svg" for picture in pictures),
    ]


def test_targets_that_read_anothers_records_are_drawn_with_their_own_contrasts(
    tmp_path: Path,
) -> None:
    records = made_up("study", 3)
    for record in records:
        # The mean reward is formed of these.
        replace(record, series={"reward": [0.01 * record.seed, 0.5]}).write(tmp_path / "runs")
    line = ["--records", str(tmp_path / "runs"), "--expected", str(EXPECTED), "--kinds", "svg"]
    assert main([*line, "--out", str(tmp_path / "all")]) == 0
    drawn = {path.name for path in (tmp_path / "all").iterdir()}
    name = "study_rewards"
    assert f"mini_{name}_paired_differences.svg" in drawn
    assert main([*line, "--out", str(tmp_path / "one"), "--target", name]) == 0
    (only,) = (tmp_path / "one").iterdir()
    assert only.name == f"mini_{name}_paired_differences.svg"
    words = only.read_text(encoding="utf-8")
    assert find(name).metric(find(name).claims[0].metric).title.split(",")[0] in words
    assert find(name).statement.split(",")[0] in words


def test_intervals_drawn_are_those_of_the_verdicts_that_check_gives() -> None:
    (source,) = blessed_sources(EXPECTED, Tier.MINI)
    name = "dose_coder_0_5b"
    judged = verdicts_of(source, EXPECTED, "mini", name)
    drawn = contrasts.cells(load(source, "mini", name), find(name), Tier.MINI, judged)
    claimed = [cell for cell in drawn if cell.claimed]
    ends = {(v.low, v.high) for v in judged.values()}
    assert len(claimed) > 3
    assert {(cell.low, cell.high) for cell in claimed} <= ends
