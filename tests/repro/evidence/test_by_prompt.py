"""Values by prompt: means over records, of the prompts that all of them have."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from repro.evidence.record import Record, means_by_prompt, record_of
from repro.spec.target import plan
from repro.spec.tier import Tier
from tests.repro.planned import ENTROPY


def record(values: list[float | None]) -> Record:
    (run,) = plan(ENTROPY, Tier.MINI, 1, ["nvfp4"])
    made = record_of(run, metrics={}, environment={}, started=datetime.now(UTC))
    return replace(made, series={"entropy_own_by_prompt": values})


def test_a_prompts_value_is_the_mean_over_the_records() -> None:
    records = [record([1.0, 2.0, 3.0]), record([3.0, 4.0, 5.0])]
    assert means_by_prompt(records, "entropy_own") == {0: 2.0, 1: 3.0, 2: 4.0}


def test_a_prompt_that_one_record_lacks_does_not_count() -> None:
    records = [record([1.0, None, 3.0, 4.0]), record([3.0, 4.0, 5.0])]
    assert means_by_prompt(records, "entropy_own") == {0: 2.0, 2: 4.0}


def test_records_without_the_series_have_no_prompts() -> None:
    assert means_by_prompt([record([1.0])], "entropy_forced") == {}
    assert means_by_prompt([record([1.0]), replace(record([1.0]), series={})], "entropy_own") == {}
    assert means_by_prompt([], "entropy_own") == {}
