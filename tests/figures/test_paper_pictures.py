"""The paper's own pictures: its stored numbers and the records' measurements, and nothing else."""

import csv
import dataclasses
from statistics import fmean

import pytest

from figures import paper_pictures
from figures.__main__ import main
from figures.curves import training_points
from figures.panels import PICTURES
from repro.evidence.paper import paper_cells
from repro.run.places import expected_folder
from repro.spec.tier import Tier
from repro.targets import TARGETS

EXPECTED = expected_folder(None)


@pytest.fixture(scope="module")
def found(every_blessed):
    return paper_pictures.by_target([], every_blessed)


def marks(name, found, source):
    return [
        mark
        for of_panel in paper_pictures.marks_of(name, found, EXPECTED)
        for mark in of_panel
        if mark.source == source
    ]


@pytest.mark.parametrize("name", [name for name, of in PICTURES.items() if of[0].series])
def test_every_stored_point_of_a_figure_is_drawn_at_its_value(name, found):
    drawn = marks(name, found, "paper")
    for cell in paper_cells(EXPECTED, name):
        of_cell = [m for m in drawn if cell.column.endswith(m.place) and m.place
                   and cell.value in (m.x, m.y)]  # fmt: skip
        assert of_cell, cell.id


def test_every_number_of_the_tables_is_drawn_in_its_row(found):
    for name, size in (("table1", 20), ("table2", 90), ("table3", 18), ("table9", 24)):
        drawn = marks(name, found, "paper")
        printed = {(c.row, c.value) for c in paper_cells(EXPECTED, name)}
        assert len(drawn) == size
        assert {(mark.series, mark.y) for mark in drawn} <= printed


def test_lines_are_those_of_the_pretrained_model_that_a_panel_names(found):
    checked = found["table1_coder_0_5b"]
    points, _ = training_points(checked, "entropy")["nvfp4_lora"]
    shown = [(point.place, point.mean.value, *point.ends) for point in points]
    line = [m for m in marks("figure5", found, "here") if m.series == "NVFP4-LoRA(r32)"]
    assert [(m.x, m.y, m.low, m.high) for m in line] == shown
    seeds = len(checked.evidence.records["nvfp4_lora"])
    assert {(m.model, m.n) for m in line} == {("Qwen2.5-Coder-0.5B-Instruct on GSM8K", seeds)}


def test_bars_are_means_of_seeds_or_medians_of_steps_and_say_what_was_not_run(found):
    bars = {(m.panel, m.place): m for m in marks("table6", found, "here")}
    seeds = found["table6"].evidence.values("tokens_per_second_7b_8")["nvfp4_lora"]
    rate = bars["Throughput, rollout phase", "NVFP4 QeRL batch 8"]
    assert (rate.y, rate.n) == (pytest.approx(fmean(seeds.values())), 5)
    steps = sorted(found["table3"].evidence.values("speedup_7b_b8")["nvfp4_lora"].values())
    speed = bars["E2E RL speedup, w/ GC", "NVFP4 QeRL batch 8"]
    assert [speed.low, speed.y, speed.high] == steps
    assert bars["E2E RL speedup, w/o GC", "NVFP4 QeRL batch 8"].y is None
    assert bars["Model size", "NVFP4 QeRL"].y == pytest.approx(5.9, abs=0.1)


def test_where_memory_ran_out_the_picture_says_so(found):
    for name, of_paper, of_here in (("table8", 6, 0), ("figure11", 0, 1)):
        figure, _ = paper_pictures.draw(name, found, EXPECTED, every_panel=True)
        said = [text.get_text() for axes in figure.axes for text in axes.texts]
        assert said.count("61.8 (out of memory)") == bool(of_paper)
        assert sum("(out of memory)" in words for words in said) == of_paper
        assert sum(words.startswith("out of memory (") for words in said) == of_here


def test_policies_made_here_are_never_shown(every_blessed, found):
    assert any(checked.selection.tier is Tier.SMOKE for checked in every_blessed)
    assert "table1" not in found
    # Own records come before blessed ones.
    for own in (c for c in every_blessed if c.selection.target.name == "table6"):
        assert paper_pictures.by_target([own], every_blessed)["table6"] is own
    figure, drawn = paper_pictures.draw("figure4", found, EXPECTED, every_panel=True)
    stamped = [axes for axes in figure.axes if "not run" in [t.get_text() for t in axes.texts]]
    assert [axes.get_title(loc="left").split("\n")[0] for axes in stamped] == [
        "DAPO: NVFP4", "DAPO: MXFP4", "DAPO: NF4",
    ]  # fmt: skip
    assert {m.model for m in drawn} == {
        "Qwen2.5-7B-Instruct", "Qwen2.5-Coder-0.5B-Instruct on GSM8K",
    }  # fmt: skip


def test_panels_without_measurements_are_left_out_unless_asked_for(found):
    figure, drawn = paper_pictures.draw("figure4", found, EXPECTED)
    panels = {"GRPO: NVFP4", "GRPO: MXFP4", "GRPO: NF4"}
    assert {mark.panel for mark in drawn} == panels
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    # Of several models a table shows the one with the most arms.
    bars = [m for m in marks("table1", found, "here") if m.n]
    assert {m.model for m in bars} == {"Qwen2.5-Coder-0.5B-Instruct on GSM8K"}
    assert sum("LoRA" in m.place for m in bars) == 3
    _, alone = paper_pictures.draw("figure12", found, EXPECTED)
    assert {mark.source for mark in alone} == {"paper"}


def test_a_bar_is_the_mean_of_late_tests_where_there_are_any(every_blessed):
    (rates,) = [c for c in every_blessed if c.selection.target.name == "rates_coder_0_5b"]
    panel = next(panel for panel in PICTURES["table1"] if not panel.model)
    cell = next(cell for cell in paper_cells(EXPECTED, "table1") if cell.arm == "bf16_lora")
    late = rates.evidence.values("test_late")["bf16_lora"].values()
    assert paper_pictures._measured(panel, cell, [rates], EXPECTED)[0].value == fmean(late)


def test_the_runs_and_arms_of_panels_exist():
    targets = {target.name: target for target in TARGETS}
    for panels in PICTURES.values():
        for panel in panels:
            for series in panel.series:
                first = [targets[name].arms for name in panel.runs[:1]]
                assert all(series.arm in {arm.name for arm in arms} for arms in first) or (
                    series.name == "Float16-Full"
                )
            assert {name for group in panel.runs for name in group.split()} <= targets.keys()


def test_the_command_writes_each_kind(every_blessed, found, tmp_path, monkeypatch):
    monkeypatch.setattr("figures.__main__.blessed_checks", lambda expected: every_blessed)
    line = ["paper", "figure15", "--blessed", "--expected", str(EXPECTED), "figure11"]
    assert main([*line, "--out", str(tmp_path / "a")]) == 0
    assert main(["--kinds", "pdf,csv", "--out", str(tmp_path / "b"), *line]) == 0
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        f"{name}.{kind}"
        for name in ("figure11", "figure15")
        for kind in ("pdf", "svg", "png", "csv")
    }  # fmt: skip
    again = {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert len(again) == 4
    assert again == {name: (tmp_path / "a" / name).read_bytes() for name in again}
    with (tmp_path / "a" / "figure11.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    _, drawn = paper_pictures.draw("figure11", found, EXPECTED)
    assert rows == [
        {
            key: "" if value is None else str(value)
            for key, value in dataclasses.asdict(mark).items()
        }
        for mark in drawn
    ]
