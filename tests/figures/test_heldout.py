"""Held-out accuracy over tokens: means of straight curves, one named line an arm."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest

from figures.curves import draw_heldout, heldout_rows
from repro.evidence.record import Record, record_of
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find


def record(arm: str, seed: int, last: float) -> Record:
    (run,) = plan(find("table1_0_5b"), Tier.MINI, [seed], [arm])
    budget = run.scale.evaluation.token_budget
    series: dict[str, list[float | None]] = {
        "evaluation_tokens": [0, budget / 2],
        "evaluation_accuracy": [20.0, last],
    }
    return record_of(run, metrics={}, environment={}, started=datetime.now(UTC), series=series)


def test_rows_are_means_over_seeds_held_after_the_last_evaluation() -> None:
    rows = heldout_rows([record("bf16_lora", seed, last) for seed, last in enumerate((40, 50, 60))])
    assert rows[0].mean == pytest.approx(20)
    quarter = rows[len(rows) // 4]
    assert quarter.mean == pytest.approx(35, abs=1)
    assert rows[-1].mean == pytest.approx(50)
    assert rows[-1].low is not None
    assert rows[-1].n == 3


def test_each_arm_has_a_line_and_a_name() -> None:
    records = [record(arm, seed, 50.0) for arm in ("bf16_lora", "nvfp4_lora") for seed in (0, 1)]
    figure = draw_heldout(heldout_rows(records))
    (axes,) = figure.axes
    assert len(axes.lines) == 2
    assert {text.get_text() for text in axes.texts} == {"BF16 LoRA", "NVFP4 LoRA"}


def test_records_without_a_budget_have_no_rows() -> None:
    run = plan(find("table1"), Tier.SMOKE, 1, ["bf16_lora"])[0]
    plain = record_of(run, metrics={}, environment={}, started=datetime.now(UTC))
    failed = dataclasses.replace(record("bf16_lora", 0, 50.0), outcome={"status": "failed"})
    assert heldout_rows([plain, failed]) == []
