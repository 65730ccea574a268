"""Pictures: rows from checks by plain arithmetic, pictures that show them, words with room."""

import math
import tempfile
from itertools import combinations
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
from matplotlib.text import Text
from scipy import stats

from figures import bars, captions, curves, paper_pictures
from figures.__main__ import SYSTEMS_PICTURES, pictures, save
from figures.curves import heldout_points, smooth, training_points
from figures.panels import PICTURES
from repro.run.places import expected_folder
from repro.targets import find

EXPECTED = expected_folder(None)

DOCS = EXPECTED.parent / "docs" / "figures"
H100 = "nvidia_h100_80gb_hbm3"


def learnt(seeds, steps=12):
    """Return the check of one arm with random series; nothing here was measured."""
    rng = np.random.default_rng(7)
    records = {
        seed: SimpleNamespace(
            series={"accuracy": [*rng.uniform(0, 1, steps)]}, target="table1", arm="bf16_lora",
            seed=seed, environment={}, commit="0" * 40, dirty=False, sources=(),
        )
        for seed in range(seeds)
    }  # fmt: skip
    evidence = SimpleNamespace(
        records={"bf16_lora": records}, every_record=lambda: [*records.values()]
    )
    return SimpleNamespace(evidence=evidence, selection=SimpleNamespace(target=find("table1")))


def test_a_curve_is_the_mean_over_seeds_with_its_interval():
    checked = learnt(4)
    points, _ = training_points(checked, "accuracy", window=1)["bf16_lora"]
    data = np.array([r.series["accuracy"] for r in checked.evidence.every_record()])
    assert [point.place for point in points] == list(range(1, data.shape[1] + 1))
    np.testing.assert_allclose([point.mean.value for point in points], data.mean(0))
    low, high = stats.t.interval(0.95, 3, data.mean(0), stats.sem(data))
    np.testing.assert_allclose([point.ends for point in points], np.transpose([low, high]))
    assert training_points(checked, "entropy") == {}
    # Smoothing is centred, and shorter at the ends.
    assert smooth([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]
    assert smooth([1.0, None, 5.0], 3) == [1.0, 3.0, 5.0]


@pytest.mark.parametrize(("seeds", "steps"), [(1, 12), (2, 3), (8, 200)])
def test_every_run_is_a_thin_line_behind_the_mean(seeds, steps):
    checked = learnt(seeds, steps)
    figure = curves.training(checked, "accuracy", "a title", "a unit")
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == f"BF16, LoRA: {seeds} seed" + ("s" if seeds > 1 else "")
    means = [p.mean.value for p in training_points(checked, "accuracy")["bf16_lora"][0]]
    records = checked.evidence.every_record()
    heights = [*(smooth(r.series["accuracy"], curves.WINDOW) for r in records), means]
    for line, known in zip(axes.lines, heights, strict=True):
        places = line.get_xdata().astype(int)
        assert (places[0], places[-1]) == (1, steps)
        assert max(np.diff(places)) <= curves.WINDOW
        assert len(places) <= 51
        np.testing.assert_allclose(line.get_ydata(), np.array(known)[places - 1])


def test_rates_are_means_with_t_intervals_beside_the_papers_cells(checks_of):
    (checked,) = checks_of("table6")
    points = curves.rates([checked], EXPECTED)["7b", "nvfp4_lora"]
    data = [*checked.evidence.values("tokens_per_second_7b_8")["nvfp4_lora"].values()]
    assert points[-1].mean.value == pytest.approx(fmean(data))
    ends = stats.t.interval(0.95, 4, fmean(data), stats.sem(data))
    assert points[-1].ends == pytest.approx(ends)
    assert [(point.place, point.paper) for point in points] == [
        (1, None), (2, 151.6), (4, None), (8, 2091.8),
    ]  # fmt: skip


def test_gains_have_the_ratios_and_intervals_of_the_verdicts(checks_of):
    (checked,) = checks_of("table6")
    gains = {point.place: point for point in curves.gains([checked], EXPECTED)["7b", "nvfp4_lora"]}
    (verdict,) = [v for v in checked.verdicts if v.about == "claim" and v.name.endswith("_8")]
    assert gains[8].ends == (verdict.low, verdict.high)
    slow, fast = (
        [*checked.evidence.values("tokens_per_second_7b_8")[arm].values()]
        for arm in ("bf16_lora", "nvfp4_lora")
    )
    logs = [math.log(b / a) for a, b in zip(slow, fast, strict=True)]
    assert gains[8].mean.value == pytest.approx(math.exp(fmean(logs)))


def test_memory_shows_measured_peak_plan_and_limits(checks_of):
    checks = checks_of("memory", "memory_budgets")
    rows = bars.memory_rows(checks, EXPECTED)
    (small,) = [row for row in rows if row.point.endswith("2 rows at once") and row.size == 32]
    assert (small.budget, small.most) == (32.0, 32.0)
    (record,) = [r for c in checks for r in c.evidence.every_record() if r.target != "memory"]
    assert small.measured * 1e9 == pytest.approx(record.value("peak_bytes_32b_32gb"))
    assert small.planned * 1e9 == pytest.approx(record.value("predicted_bytes_32b_32gb"))
    assert [row.size for row in rows] == sorted((row.size for row in rows), reverse=True)


def test_a_note_names_seeds_device_commit_and_protocol(checks_of):
    records = [r for checked in checks_of("rollout") for r in checked.evidence.every_record()]
    commit = records[0].commit[:7]
    assert captions.origin(records) == f"5 seeds per arm on one NVIDIA H200, commit {commit}"
    assert captions.origin(records[:9]).startswith("4 to 5 seeds per arm")
    assert captions.rollouts(records) == (
        "256 (192 at 14B, 32B) new tokens per row after 256 of the prompt, timed whole; "
        "random weights; LoRA of rank 32"
    )


def words(figure):
    """Return title, note and legend, and what stands at the ends of lines and beside rows."""
    figure.draw_without_rendering()
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        low, high = sorted(axes.get_ylim())
        # A panel that shares its neighbour's axis has no labels.
        ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=False)
        said = [child for child in axes.get_children() if isinstance(child, Text)]
        texts += [axes.xaxis.label, *said, *(t for at, t in ticks if low <= at <= high)]
    return [text for text in texts if text.get_text()]


@pytest.fixture(scope="module")
def drawn(every_blessed):
    """Return every picture of the blessed records by name, and the text of those in docs/."""
    figures, texts = dict(pictures(every_blessed, EXPECTED)), {}
    with tempfile.TemporaryDirectory() as folder:
        for name in {path.stem for path in DOCS.glob("*.svg")} & figures.keys():
            (path,) = save(figures[name], Path(folder), name, ["svg"])
            texts[name] = path.read_bytes()
    return figures, texts


def test_the_pictures_in_docs_are_those_of_the_blessed_records(drawn):
    if not DOCS.is_dir():
        pytest.skip("docs/ is not part of an installed package")
    own = [path for tier in ("systems", "mini") for path in DOCS.glob(f"{tier}_*.svg")]
    committed = {path.stem: path.read_bytes() for path in own}
    made_by = f"Matplotlib v{matplotlib.__version__}".encode()
    stale = "stale: python -m figures --blessed --kinds svg --out docs/figures --renew"
    assert committed
    assert committed.keys() <= drawn[1].keys(), stale
    if not all(made_by in text for text in committed.values()):
        pytest.skip("the pictures were drawn with another matplotlib than this one")
    assert not [name for name in committed if drawn[1][name] != committed[name]], stale


def test_words_of_every_picture_stay_inside_and_apart(every_blessed, drawn):
    figures = drawn[0]
    assert {f"systems_{H100}_{name}" for name in SYSTEMS_PICTURES} <= figures.keys()
    found = paper_pictures.by_target([], every_blessed)
    papers = {name: paper_pictures.draw(name, found, EXPECTED)[0] for name in PICTURES}
    for name, figure in (figures | papers).items():
        # An annotation's own box has its stroke in it, too.
        boxes = [(text.get_text(), Text.get_window_extent(text)) for text in words(figure)]
        for said, box in boxes:
            assert box.x0 >= figure.bbox.x0 - 1, (name, said)
            assert box.x1 <= figure.bbox.x1 + 1, (name, said)
        for (said, box), (also, other) in combinations(boxes, 2):
            width = min(box.x1, other.x1) - max(box.x0, other.x0)
            height = min(box.y1, other.y1) - max(box.y0, other.y0)
            assert min(width, height) <= 1, (name, said, also)


def test_tests_along_training_end_with_the_final_one():
    def run(seed):
        return SimpleNamespace(
            series={"test_steps": [50, 100], "test_accuracy": [30.0 + seed, 36.0 + seed]},
            metrics={"accuracy": SimpleNamespace(value=38.0 + seed)},
            facts={"optimizer_steps": 150},
        )

    untested = SimpleNamespace(series={}, metrics={}, facts={})
    records = {"bf16_lora": {0: run(0), 1: run(2)}, "nvfp4_lora": {0: untested}}
    found = heldout_points(SimpleNamespace(evidence=SimpleNamespace(records=records)))  # type: ignore[arg-type]
    assert list(found) == ["bf16_lora"]
    means, runs = found["bf16_lora"]
    assert [(point.place, point.mean.value) for point in means] == [(50, 31), (100, 37), (150, 39)]
    assert runs[1] == [(50.0, 32.0), (100.0, 38.0), (150.0, 40.0)]
