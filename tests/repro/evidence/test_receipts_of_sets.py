"""Accuracy over several sets is held against the sets' answers, and other payers are let be."""

from __future__ import annotations

import dataclasses
from statistics import fmean
from typing import Any

import pytest

from repro.evidence.derived import at_k_metrics
from repro.evidence.receipts import violations
from repro.evidence.record import Estimate, Record, read_record
from repro.spec.config import ProblemSet
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import honest_record, with_accuracy
from tests.repro.planned import SCALE, STUDY

MEANS = {
    "accuracy": "right",
    "accuracy_lenient": "right_lenient",
    "format_rate": "format",
    "working_rate": "working",
    "truncation_rate": "truncated",
}


def changed(record: Record, part: str, **values: Any) -> Record:
    """Return a record with other members of one part of its configuration."""
    config = record.config | {part: record.config[part] | values}
    return dataclasses.replace(record, config=config)


def over_sets() -> Record:
    """Return a record whose accuracy is the mean over its further test sets."""
    (run,) = plan(STUDY, Tier.MINI, 1, ["bf16_lora"])
    sets = tuple(ProblemSet(name=name, data=SCALE.data) for name in ("one", "two"))
    record = honest_record(
        dataclasses.replace(run, scale=dataclasses.replace(run.scale, test_sets=sets))
    )
    names = [item.name for item in sets]
    for number, name in enumerate(names):
        record = with_accuracy(record, f"accuracy_{name}", 30.0 + 7 * number)
    answers = {n: t for n, t in record.effects["answers"].items() if n != "accuracy"}
    metrics = dict(record.metrics)
    for metric, part in MEANS.items():
        shares = [share(answers[f"accuracy_{name}"][part]) for name in names]
        metrics[metric] = Estimate(value=fmean(shares), unit="percent", n=len(names))
    metrics["completion_tokens_mean"] = Estimate(value=20.0, unit="tokens", n=len(sets))
    record = changed(record, "scale", accuracy_over="sets")
    effects = record.effects | {"answers": answers}
    return dataclasses.replace(record, metrics=metrics, effects=effects)


def share(tally: list[int]) -> float:
    """Return the percent of right answers."""
    right = sum(count * number for number, count in enumerate(tally))
    return 100 * right / (sum(tally) * (len(tally) - 1))


def test_a_mean_over_sets_needs_no_answers_of_its_own() -> None:
    assert violations(over_sets()) == []


@pytest.mark.parametrize("name", [*MEANS, "completion_tokens_mean"])
def test_a_mean_that_the_sets_answers_do_not_give_is_refused(name: str) -> None:
    record = over_sets()
    own = record.metrics[name]
    other = dataclasses.replace(own, value=(own.value or 0.0) + 1)
    reasons = violations(dataclasses.replace(record, metrics=record.metrics | {name: other}))
    assert any(f"metrics.{name}.value" in sentence for sentence in reasons)


def test_what_stands_beside_a_sets_accuracy_is_held_against_its_answers() -> None:
    record = over_sets()
    name = next(iter(record.config["scale"]["test_sets"]))["name"]
    samples = record.config["scale"]["evaluation"]["samples"]
    for beside in ("accuracy_lenient", "truncation_rate", f"mean_at_{samples}"):
        metric = f"{beside}_{name}"
        wrong = {metric: Estimate(value=99.0, unit="percent", n=1)}
        reasons = violations(dataclasses.replace(record, metrics=record.metrics | wrong))
        assert any(metric in sentence for sentence in reasons)


def with_estimates_at_k() -> Record:
    """Return a record over sets whose scale asks for pass@1, with all that follows from it."""
    record = over_sets()
    evaluation = record.config["scale"]["evaluation"] | {"at": (1,)}
    tallies = record.effects["answers"]
    metrics, sets = dict(record.metrics), record.config["scale"]["test_sets"]
    of_sets = [at_k_metrics(tallies[f"accuracy_{item['name']}"], (1,)) for item in sets]
    for item, estimates in zip(sets, of_sets, strict=True):
        metrics |= {f"{name}_{item['name']}": value for name, value in estimates.items()}
    for name in of_sets[0]:
        values = [estimates[name].value or 0.0 for estimates in of_sets]
        metrics[name] = Estimate(value=fmean(values), unit="percent", n=len(values))
    return dataclasses.replace(changed(record, "scale", evaluation=evaluation), metrics=metrics)


def test_estimates_at_k_over_sets_follow_from_the_sets_answers() -> None:
    record = with_estimates_at_k()
    assert violations(record) == []
    first = record.config["scale"]["test_sets"][0]["name"]
    for name in ("pass_at_1", "maj_at_1_lenient", f"pass_at_1_{first}"):
        own = record.metrics[name]
        other = record.metrics | {name: dataclasses.replace(own, value=(own.value or 0.0) + 1)}
        reasons = violations(dataclasses.replace(record, metrics=other))
        assert any(f"metrics.{name}.value" in sentence for sentence in reasons)
        less = {key: value for key, value in record.metrics.items() if key != name}
        reasons = violations(dataclasses.replace(record, metrics=less))
        assert any(f"metrics.{name} is missing" in sentence for sentence in reasons)


def test_a_users_own_reward_is_not_what_answers_and_formats_earn() -> None:
    record = honest_record(plan(find("table1"), Tier.SMOKE, 1, ["bf16_lora"])[0])
    rewards = [0.5 + 0.01 * step for step in range(len(record.series["reward"]))]
    metrics = record.metrics | {
        "train_reward_mean": dataclasses.replace(
            record.metrics["train_reward_mean"], value=fmean(rewards)
        )
    }
    record = dataclasses.replace(
        record, series=record.series | {"reward": rewards}, metrics=metrics
    )
    assert any("series.reward" in sentence for sentence in violations(record))
    own = {"module": "m", "function": "f", "source_sha256": "0" * 64}
    assert violations(changed(record, "arm", reward_function=own)) == []


def test_inputs_may_name_the_commit_of_a_checkpoint_and_digests_alone(tmp_path: Any) -> None:
    record = honest_record(plan(find("table1"), Tier.SMOKE, 1, ["bf16_lora"])[0])
    commit = {"checkpoint_revision": "a" * 40}
    named = dataclasses.replace(record, inputs=record.inputs | commit)
    assert read_record(named.write(tmp_path / "a")).inputs == named.inputs
    wrong = dataclasses.replace(record, inputs=record.inputs | {"checkpoint": "a" * 40})
    with pytest.raises(ValueError, match=r"inputs\.checkpoint"):
        read_record(wrong.write(tmp_path / "b"))
