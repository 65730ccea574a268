"""Runs of chance must differ; those of a policy that leaves nothing to chance need not."""

from __future__ import annotations

import dataclasses
from typing import Any

from repro.evidence.receipts.together import refusals_together
from repro.evidence.record import Record
from repro.spec.target import plan
from repro.spec.tier import Tier
from tests.repro.made_up import planned_record
from tests.repro.planned import SCHEDULES

SEEDS = [5, 6]
ARM = "aqn_linear"


def _records(**completions: str) -> dict[int, Record]:
    """Return the records of two seeds that both answered with these digests, by tally."""
    runs = plan(SCHEDULES, Tier.MINI, seeds=SEEDS, arms=[ARM])
    records = {}
    for run in runs:
        record = planned_record(run)
        answers: dict[str, Any] = {
            name: tally | {"completions": completions.get(name, f"{run.seed}{name}")}
            for name, tally in record.effects["answers"].items()
        }
        effects = record.effects | {"answers": answers}
        records[run.seed] = dataclasses.replace(record, effects=effects)
    return records


def test_two_runs_that_drew_the_same_answers_are_one() -> None:
    refused = refusals_together({ARM: _records(accuracy="same")})
    assert set(refused) == {(ARM, seed) for seed in SEEDS}
    assert "completions equals that of" in refused[ARM, SEEDS[0]]


def test_two_collapsed_runs_may_answer_alike() -> None:
    assert not refusals_together({ARM: _records(accuracy="same", accuracy_greedy="same")})


def test_a_collapsed_run_under_two_names_is_told_by_its_steps() -> None:
    records = _records(accuracy="same", accuracy_greedy="same")
    copied = dataclasses.replace(records[SEEDS[1]], series=records[SEEDS[0]].series)
    refused = refusals_together({ARM: records | {SEEDS[1]: copied}})
    assert "series." in refused[ARM, SEEDS[1]]
