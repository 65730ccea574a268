"""The dose-response picture: a point per dose, the paper's diamond at its dose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon, Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from figures import dose
from figures.__main__ import learning_figures, main
from repro.judge.check import Checked
from repro.report.dose_response import PAPER_RISE, DoseResponse, dose_response
from repro.report.twelve import decided
from tests.repro.made_up import checked_of, dose_checks

Overlap = Callable[[Bbox, Bbox], bool]


def response_with_kl() -> DoseResponse:
    made = dose_response(dose_checks())
    assert made is not None
    return made


@pytest.fixture(scope="module")
def response() -> DoseResponse:
    return response_with_kl()


@pytest.fixture(scope="module")
def by_decision() -> DoseResponse:
    made = dose_response(dose_checks()[1:])
    assert made is not None
    return made


def marks(figure: Figure, marker: str) -> list[Line2D]:
    return [line for line in figure.axes[0].lines if line.get_marker() == marker]


def place(line: Line2D) -> tuple[float, float]:
    return float(line.get_xdata()[0]), float(line.get_ydata()[0])  # type: ignore[index]


def bands(figure: Figure) -> list[Polygon | Rectangle]:
    return [item for item in figure.axes[0].patches if isinstance(item, Polygon | Rectangle)]


def test_each_dose_has_a_point_by_its_source_and_an_interval(response: DoseResponse) -> None:
    figure = dose.draw(response, "")
    assert (len(marks(figure, "o")), len(marks(figure, "^")), len(marks(figure, "s"))) == (8, 3, 1)
    points = sorted(place(line) for kind in "o^s" for line in marks(figure, kind))
    for (x, y), one in zip(points, response.responses, strict=True):
        assert y == pytest.approx(one.ratio)
        # Moved apart where doses nearly agree.
        assert x == pytest.approx(one.dose.on("kl"), rel=0.15)
    intervals = {
        tuple(map(float, line.get_ydata()))  # type: ignore[arg-type]
        for line in figure.axes[0].lines
        if line.get_linewidth() == 2.0 and len(line.get_xdata()) == 2  # type: ignore[arg-type]
    }
    assert intervals == {(one.low, one.high) for one in response.responses}


def test_the_papers_diamond_stands_at_its_dose(response: DoseResponse) -> None:
    figure = dose.draw(response, "")
    (diamond,) = marks(figure, "D")
    assert response.place is not None
    assert place(diamond) == pytest.approx((response.place.at, 32.5 / 75))
    assert 2.3e-2 < response.place.at < 5.5e-2
    assert not bands(figure)


def test_far_neighbours_have_a_band_between_them(response: DoseResponse) -> None:
    assert response.place is not None
    above = dataclasses.replace(response.place.above, kl=20 * response.place.below.on("kl"))
    far = dataclasses.replace(response.place, above=above, is_wide=True)
    figure = dose.draw(dataclasses.replace(response, place=far), "")
    (band,) = bands(figure)
    box = band.get_path().transformed(band.get_patch_transform()).get_extents()
    assert (box.x0, box.x1) == pytest.approx((far.below.on("kl"), far.above.on("kl")))


def test_without_a_place_for_the_paper_the_note_says_so(response: DoseResponse) -> None:
    figure = dose.draw(dataclasses.replace(response, place=None), "")
    assert not marks(figure, "D")
    assert figure._supxlabel is not None  # type: ignore[attr-defined]
    assert "the paper's dose is not drawn" in figure._supxlabel.get_text()  # type: ignore[attr-defined]


def test_runs_that_did_not_take_off_are_hollow_and_grey(response: DoseResponse) -> None:
    last = dataclasses.replace(response.responses[-1], took_off=False, low=None, high=None)
    figure = dose.draw(
        dataclasses.replace(response, responses=(*response.responses[:-1], last)), ""
    )
    hollow = [line for line in marks(figure, "o") if line.get_markerfacecolor() == "white"]
    assert [place(line)[1] for line in hollow] == pytest.approx([last.ratio])
    assert hollow[0].get_color() == "#a6a6a6"


def test_by_the_deciding_token_points_stand_at_what_they_add_and_the_paper_at_its_rise(
    by_decision: DoseResponse,
) -> None:
    figure = dose.draw(by_decision, "")
    points = sorted(place(line) for kind in "os" for line in marks(figure, kind))
    for (x, y), one in zip(points, by_decision.responses, strict=True):
        assert y == pytest.approx(one.ratio)
        assert x == pytest.approx(one.dose.on("decision"), rel=0.15, abs=0.004)
    assert not marks(figure, "^")
    (diamond,) = marks(figure, "D")
    assert place(diamond) == pytest.approx((PAPER_RISE, 32.5 / 75))
    assert "deciding token" in figure.axes[0].get_xlabel()
    assert "KL" in dose.draw(response_with_kl(), "").axes[0].get_xlabel()


@pytest.mark.parametrize("axis", ["kl", "decision"])
def test_words_stay_inside_and_apart(
    axis: str, response: DoseResponse, by_decision: DoseResponse, overlap: Overlap
) -> None:
    response = response if axis == "kl" else by_decision
    figure = dose.draw(response, "; proxy tier")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    names = [text for text in axes.texts if text.get_rotation() == 90]
    assert len(names) == len(response.responses)
    boxes = [Text.get_window_extent(text) for text in (*names, *figure.texts, axes.xaxis.label)]
    for box in boxes:
        assert box.x0 >= figure.bbox.x0 - 1
        assert box.x1 <= figure.bbox.x1 + 1
    assert not [pair for pair in combinations(boxes, 2) if overlap(*pair)]


def drawn_names(checks: Sequence[Checked]) -> list[str]:
    return [name for name, _ in learning_figures(decided(checks), dose_response(checks))]


def test_of_no_records_nothing_is_drawn() -> None:
    checks = dose_checks()
    assert drawn_names(checks) == [dose.NAME]
    assert drawn_names([]) == []
    assert drawn_names([checked_of(checked.selection.target, {}) for checked in checks]) == []
    assert drawn_names(checks[:1]) == []


def test_the_command_draws_nothing_of_a_folder_without_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    line = ["--records", str(tmp_path / "runs"), "--tier", "proxy", "--out", str(tmp_path / "out")]
    assert main(line) == 1
    assert "no records to draw" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
