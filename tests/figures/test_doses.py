"""The picture of doses: rises over draws beside the paper's, and accuracy beside entropy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from figures import doses
from repro.evidence.record import Estimate
from repro.report.doses import paper_rises
from repro.run.places import expected_folder
from repro.spec.target import plan
from repro.spec.tier import Tier
from tests.repro.made_up import honest_record
from tests.repro.planned import DOSES, registered

MEASURED = {"bf16_lora": (0.36, 14.0), "nvfp4_lora": (0.44, 10.0), "mxfp4_lora": (0.46, 7.0)}


def records() -> list[Any]:
    made = []
    with registered():
        for run in plan(DOSES, Tier.MINI, [0, 1, 2], [*MEASURED]):
            entropy, accuracy = MEASURED[run.arm.name]
            record = honest_record(run)
            metrics = {
                "entropy_finished": Estimate(value=entropy + 0.01 * run.seed, unit="nats"),
                "accuracy_lenient": Estimate(value=accuracy, unit="percent"),
            }
            made.append(dataclasses.replace(record, metrics=metrics))
    return made


def test_rises_are_paired_by_draw_and_the_papers_stand_beside_them() -> None:
    figure = doses.draw(records(), paper_rises(expected_folder(None)))
    assert figure is not None
    left, right = figure.axes
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == ["NVFP4 LoRA", "MXFP4 LoRA"]
    means = [line.get_xdata()[0] for line in left.lines if line.get_marker() == "o"]
    assert means == pytest.approx([0.08, 0.10])
    papers = [line.get_xdata()[0] for line in left.lines if line.get_marker() == "D"]
    assert papers == pytest.approx([0.055, 0.067])
    assert {text.get_text() for text in right.texts} == {"BF16 LoRA", *names}


def test_without_records_of_doses_nothing_is_drawn() -> None:
    assert doses.draw([], {}) is None
    assert doses.draw([one for one in records() if one.arm != "bf16_lora"], {}) is None
