"""Metrics over several sets follow from the sets' own answers."""

import dataclasses
from statistics import fmean

import pytest

from repro.evidence.derived import at_k_metrics
from repro.evidence.receipts import violations
from repro.spec.config import ProblemSet
from repro.spec.target import plan
from repro.spec.tier import Tier
from tests.repro.made_up import honest_record, with_accuracy
from tests.repro.planned import SCALE, STUDY

MEANS = {
    "accuracy": "right",
    "accuracy_lenient": "right_lenient",
    "format_rate": "format",
    "working_rate": "working",
    "truncation_rate": "truncated",
}
NAMES = ("one", "two")


def over_sets(**evaluation):
    """Return a record whose accuracy is the mean over its further test sets."""
    (run,) = plan(STUDY, Tier.MINI, 1, ["bf16_lora"])
    sets = tuple(ProblemSet(name=name, data=SCALE.data) for name in NAMES)
    record = honest_record(
        dataclasses.replace(run, scale=dataclasses.replace(run.scale, test_sets=sets))
    )
    for number, name in enumerate(NAMES):
        record = with_accuracy(record, f"accuracy_{name}", 30.0 + 7 * number)
    scale = record.config["scale"]
    scale = scale | {"accuracy_over": "sets", "evaluation": scale["evaluation"] | evaluation}
    record = dataclasses.replace(record, config=record.config | {"scale": scale})
    return without(record, "accuracy")


def without(record, name):
    """Return a record without the answers of one accuracy."""
    answers = {n: tally for n, tally in record.facts["answers"].items() if n != name}
    return dataclasses.replace(record, facts=record.facts | {"answers": answers})


def share(tally):
    """Return the percent of right answers."""
    right = sum(count * number for number, count in enumerate(tally))
    return 100 * right / (sum(tally) * (len(tally) - 1))


def test_a_mean_over_sets_needs_no_answers_of_its_own():
    record = over_sets()
    assert violations(dataclasses.replace(record, metrics=record.metrics | record.derived())) == []
    metrics, answers = record.derived(), record.facts["answers"]
    for metric, part in MEANS.items():
        shares = [share(answers[f"accuracy_{name}"][part]) for name in NAMES]
        assert metrics[metric].value == pytest.approx(fmean(shares))
        assert metrics[metric].n == len(NAMES)
    for metric in ("accuracy", "accuracy_lenient", "truncation_rate"):
        tally = answers["accuracy_one"][MEANS[metric]]
        assert metrics[f"{metric}_one"].value == pytest.approx(share(tally))
    assert "format_rate_one" not in metrics
    # A set that was not asked is missed.
    assert "facts.answers.accuracy_two is missing" in violations(without(record, "accuracy_two"))


def test_estimates_at_k_over_sets_follow_from_the_sets_answers():
    record = over_sets(at=(1,))
    metrics = record.derived()
    of_sets = [at_k_metrics(record.facts["answers"][f"accuracy_{name}"], (1,)) for name in NAMES]
    assert metrics["pass_at_1_one"] == of_sets[0]["pass_at_1"]
    for name in ("pass_at_1", "maj_at_1_lenient"):
        values = [one[name].value or 0.0 for one in of_sets]
        assert metrics[name].value == pytest.approx(fmean(values))
