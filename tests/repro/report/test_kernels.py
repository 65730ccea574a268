"""The kernels' tables: from the records at hand, devices one below the other or side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from repro.evidence.record import Record
from repro.judge.check import Checked
from repro.report.kernel_tables import kernel_rows
from repro.report.verdict_words import stated_bars
from repro.run.places import expected_folder

EXPECTED = expected_folder(None)
Of = Callable[..., Checked]


def test_a_grid_prints_the_means_of_the_records(blessed_of: Of) -> None:
    checked = blessed_of("kernels")

    def slower(record: Record) -> Record:
        if "ratio_7b_8" not in record.metrics:
            return record
        estimate = dataclasses.replace(record.metrics["ratio_7b_8"], value=1.5)
        return dataclasses.replace(record, metrics=record.metrics | {"ratio_7b_8": estimate})

    records = {
        arm: {seed: slower(record) for seed, record in by_seed.items()}
        for arm, by_seed in checked.evidence.records.items()
    }
    evidence = dataclasses.replace(checked.evidence, records=records)
    lines = kernel_rows([dataclasses.replace(checked, evidence=evidence)], EXPECTED)
    line = next(line for line in lines if line.startswith("| 7B NVFP4 |"))
    assert line.split("|")[3].strip() == "1.50"


def test_every_bar_that_is_not_met_is_listed_with_its_word(blessed_of: Of) -> None:
    checked = blessed_of("kernels")
    lines = kernel_rows([checked], EXPECTED)
    listed = [line for line in lines if line.endswith(("| missed |", "| undecided |"))]
    not_met = [b for b in stated_bars(checked, EXPECTED) if b.verdict.status != "reproduced"]
    assert len(listed) == len(not_met) > 0
    assert all(bar.title in line for bar, line in zip(not_met, listed, strict=True))


def test_two_devices_stand_together_in_every_table(every_blessed: list[Checked]) -> None:
    lines = kernel_rows(every_blessed, EXPECTED)
    first = next(i for i, line in enumerate(lines) if line.startswith("| 7B NVFP4, H100 |"))
    assert lines[first + 1].startswith("| 7B NVFP4, H200 |")
    assert lines[first + 2].startswith("| bar (goal) |")
    heads = [line for line in lines if ", H100 |" in line and "H200 |" in line]
    assert len(heads) == 2


def test_without_records_the_page_says_so() -> None:
    assert kernel_rows([], EXPECTED) == ["No records are blessed yet."]
