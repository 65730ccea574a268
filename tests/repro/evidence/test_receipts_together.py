"""Runs of chance must differ; those of a policy that leaves nothing to chance need not."""

from __future__ import annotations

import dataclasses
from typing import Any

from repro.evidence.origins import refusal
from repro.evidence.receipts.together import refusals_together
from repro.evidence.record import Record
from repro.evidence.store import read_stored, stored_path
from repro.run.places import expected_folder
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import honest_proxy_record

EXPECTED = expected_folder(None)
SEEDS = [232, 233]
ARM = "nvfp4_lora_28e4"


def _records(**completions: str) -> dict[int, Record]:
    """Return the records of two seeds that both answered with these digests, by tally."""
    runs = plan(find("needle_rates"), Tier.PROXY, seeds=SEEDS, arms=[ARM])
    records = {}
    for run in runs:
        record = honest_proxy_record(run)
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


def _pre_trainings() -> dict[str, dict[int, Record]]:
    by_arm: dict[str, dict[int, Record]] = {}
    for record in read_stored(stored_path(EXPECTED, "proxy", "pretrain_proxy", "nvidia_h200")):
        by_arm.setdefault(record.arm, {})[record.seed] = record
    return by_arm


def test_a_pre_training_goes_on_from_a_policy_of_its_own_seed() -> None:
    records = _pre_trainings()
    needles = records["proxy_30m_needle4"]
    assert len({record.inputs["start"] for record in needles.values()}) == len(needles) > 1
    assert not refusals_together(records)
    other = needles[1].inputs | {"start": needles[2].inputs["start"]}
    bent = needles | {1: dataclasses.replace(needles[1], inputs=other)}
    (place, words), = refusals_together(records | {"proxy_30m_needle4": bent}).items()  # fmt: skip
    assert place == ("proxy_30m_needle4", 1)
    assert "no policy of seed 1" in words
    # Without its policies nothing can be said of a start.
    assert not refusals_together({"proxy_30m_needle4": bent})


def test_what_a_pre_training_goes_on_from_may_differ_between_commits_by_seed() -> None:
    records = _pre_trainings()["proxy_30m_needle4"]
    assert len({record.commit for record in records.values()}) > 1
    alike = [*records.values()]
    assert refusal(alike, target="pretrain_proxy", several=True) is None
    other = records[1].inputs | {"tokenizer": "0" * 64}
    alike[1] = dataclasses.replace(records[1], inputs=other)
    assert "had different tokenizer" in str(refusal(alike, target="pretrain_proxy", several=True))
