"""A record that shows that something was not done is no evidence, for its own reason."""

import dataclasses

import pytest

from repro.evidence.receipts import violations
from repro.evidence.record import Estimate, read_record
from repro.evidence.store import blessed_records
from repro.run.places import expected_folder
from repro.spec.shapes import TINY
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import honest_record
from tests.repro.recorded_smoke import place

TABLE1 = find("table1")
RUNS = {run.arm.name: run for run in plan(TABLE1, Tier.SMOKE, 1)}
NO_NOISE = {"modules": 0, "channels_changed": 0}
LARGER = dataclasses.replace(TINY, vocabulary=1024).parameters()

# What a record of an arm shows instead of what was due, and words of the reason.
NOT_DONE = {
    "nothing quantised": ("nvfp4_lora", {"linears": {"bf16": 21}}, "was nvfp4"),
    "some layers left in sixteen bits": (
        "nvfp4_lora",
        {"linears": {"nvfp4": 20, "bf16": 1}},
        "not nvfp4",
    ),
    "a projection too few": ("nvfp4_lora", {"linears": {"nvfp4": 20}}, "20 projections"),
    "called quantised, unchanged": (
        "mxfp4",
        {"relative_weight_error_mean": 0.0},
        "a 4-bit format gives",
    ),
    "no weight error": ("nvfp4", {"relative_weight_error_mean": None}, "shows the rounding"),
    "no format": ("nf4_lora", {"linears": {}}, "facts.linears is missing"),
    "a rounding that the arm has not": (
        "bf16",
        {"rounding": {"format": "nf4", "factor": 1.0}},
        "facts.rounding",
    ),
    "another order of channels": ("bf16", {"order": 3}, "facts.order"),
    "a fold that the arm has not": ("bf16_lora", {"folded": {"rollouts": 3}}, "facts.folded"),
    "another precision": ("bf16", {"compute": "float16"}, "facts.compute"),
    "noise never added": ("nvfp4_lora_aqn", {"noise": NO_NOISE}, "touched nothing"),
    "noise on one norm": ("nvfp4_lora_aqn", {"noise.modules": 1}, "facts.noise.modules"),
    "noise on five channels": (
        "nvfp4_lora_aqn",
        {"noise.channels_changed": 5},
        "facts.noise.channels_changed",
    ),
    "noise in some rollouts only": (
        "nvfp4_lora_aqn",
        {"noise.rollouts_perturbed": 3},
        "were really perturbed",
    ),
    "noise in an arm that has none": (
        "nvfp4_lora",
        {"noise": {"modules": 6, "channels_changed": 10}},
        "perturbed 6 norms",
    ),
    "no adapter": ("bf16_lora", {"adapter_modules": 0}, "no adapter"),
    "one adapter": ("bf16_lora", {"adapter_modules": 1}, "facts.adapter_modules is 1"),
    "too many parameters": ("bf16_full", {"parameters_trainable": LARGER}, "the model has"),
    "never stepped": ("bf16_full", {"trained_change_l2": 0.0}, "no parameter"),
    "half of the steps": ("bf16_lora", {"optimizer_steps": 15}, "15 optimiser steps"),
    "not centred": ("bf16_lora", {"advantage_group_mean_max": 0.41}, "not centred"),
    "no receipt of centring": ("bf16_lora", {"advantage_group_mean_max": None}, "not centred"),
    "no rows": ("bf16_lora", {"rows.trained_on": 0}, "trained on"),
    "unpaid rows": ("bf16_lora", {"rows.without_reward": 100}, "facts.rows.without_reward"),
    "no grades": ("bf16", {"grades": None}, "facts.grades is missing"),
    "grades dropped": ("bf16", {"grades": {"ok": 9, "error": 1}}, "1 of 10 were dropped"),
    "grades late": ("bf16", {"grades": {"ok": 9, "timeout": 1}}, "over the time limit"),
    "no answers": ("bf16", {"answers": None}, "facts.answers is missing"),
    "no greedy answers": ("bf16", {"answers": {}}, "facts.answers.accuracy_greedy is missing"),
}


def showing(record, changes):
    """Return a record with other facts, named by dotted paths of up to two parts."""
    facts = dict(record.facts)
    for path, value in changes.items():
        name, _, part = path.partition(".")
        facts[name] = facts[name] | {part: value} if part else value
    return dataclasses.replace(record, facts=facts)


@pytest.mark.parametrize("name", sorted(NOT_DONE))
def test_a_record_of_what_was_not_done_is_no_evidence(name):
    arm, changes, words = NOT_DONE[name]
    record = honest_record(RUNS[arm])
    assert violations(record) == []
    reasons = violations(showing(record, changes))
    assert any(words in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("arm", "series", "words"),
    [
        ("nvfp4_lora_aqn", {"sigma_realised": 2e-5}, "2e-05"),
        ("bf16_lora", {"zero_variance_groups": 1.0}, "nothing to learn"),
    ],
)
def test_series_that_show_nothing_are_no_evidence(arm, series, words):
    record = honest_record(RUNS[arm])
    constant = {name: [value] * len(record.series["sigma"]) for name, value in series.items()}
    reasons = violations(dataclasses.replace(record, series=record.series | constant))
    assert any(words in reason for reason in reasons), reasons


@pytest.mark.parametrize(("arm", "seed"), [("nvfp4_lora_aqn", 0), ("bf16", 1)])
def test_real_records_are_evidence(smoke_runs, arm, seed):
    assert violations(read_record(place(smoke_runs, arm, seed))) == []


def spoilt(name, arm="nvfp4_lora_aqn"):
    record = honest_record(RUNS[arm])
    half = [0.5 * (value or 0.0) for value in record.series["sigma"]]
    series = {
        "half of the noise": {"sigma": half, "sigma_realised": half},
        "a rate of 1": {"learning_rate": [1.0] * len(half)},
        "no rates": {"learning_rate": []},
        "an entropy above that of equal odds": {"entropy": [6.0] * len(half)},
        "a divergence of 50 nats": {"sampler_trainer_kl": [50.0] * len(half)},
    }.get(name, {})
    metrics = dict(record.metrics)
    if name == "ten points more than the tallies":
        better = dataclasses.replace(metrics["accuracy"], value=metrics["accuracy"].value + 10)
        metrics["accuracy"] = better
    if name == "a gain of its own":
        metrics["gain_greedy"] = dataclasses.replace(metrics["gain_greedy"], value=60.0)
    return dataclasses.replace(record, series=record.series | series, metrics=metrics)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("half of the noise", "sigma was"),
        ("a rate of 1", "learning_rate was 1.0"),
        ("no rates", "series.learning_rate has 0 values"),
        ("an entropy above that of equal odds", "series.entropy is 6"),
        ("a divergence of 50 nats", "series.sampler_trainer_kl is 50"),
        ("ten points more than the tallies", "metrics.accuracy is"),
        ("a gain of its own", "metrics.gain_greedy is 60"),
    ],
)
def test_numbers_that_do_not_follow_are_no_evidence(name, words):
    run = RUNS["nvfp4_lora_aqn"]
    assert violations(honest_record(run), run) == []
    reasons = violations(spoilt(name), run)
    assert any(words in reason for reason in reasons), reasons


def test_a_negative_change_or_divergence_is_no_evidence():
    record = showing(honest_record(RUNS["bf16_lora"]), {"trained_change_l2": -1.0})
    assert any("trained_change_l2 is -1.0" in reason for reason in violations(record))
    kl = Estimate(value=-0.5, unit="nats")
    for name, value in (("kl_completions", -0.5), ("entropy_own", -0.001), ("kl_completions", 50)):
        metrics = record.metrics | {name: dataclasses.replace(kl, value=value)}
        spoilt_metric = dataclasses.replace(record, metrics=metrics)
        assert any(f"metrics.{name} is" in reason for reason in violations(spoilt_metric))


@pytest.mark.parametrize(
    ("tier", "target", "metric"),
    [
        (Tier.MINI, "table1_coder_0_5b", "accuracy_lenient"),
        (Tier.MINI, "untrained_coder_1_5b", "accuracy"),
        (Tier.MINI, "dose_coder_0_5b", "pass_at_16"),
        (Tier.MINI, "dose_coder_0_5b", "entropy_own"),
        (Tier.SYSTEMS, "step_lengths", "step_seconds_7b_spread"),
        (Tier.SYSTEMS, "table6", "tokens_per_second_7b_8"),
        (Tier.SYSTEMS, "rollout", "tokens_per_second_32b_64"),
        (Tier.SYSTEMS, "memory", "peak_bytes_14b"),
        (Tier.SYSTEMS, "memory_budgets", "predicted_bytes_7b_10gb"),
        (Tier.SYSTEMS, "memory_budgets", "prediction_error_7b_10gb"),
    ],
)
def test_a_stored_metric_that_its_tallies_or_repeats_do_not_give_is_no_evidence(
    tier, target, metric
):
    record = next(item for item in blessed_records(expected_folder(None), tier, target) if item.ok)
    assert violations(record) == []
    stated = record.metrics[metric]
    better = dataclasses.replace(stated, value=1.1 * (stated.value or 0.0))
    spoilt_record = dataclasses.replace(record, metrics=record.metrics | {metric: better})
    reasons = violations(spoilt_record)
    assert any(reason.startswith(f"metrics.{metric} is") for reason in reasons)


def test_a_ratio_of_a_layer_is_that_of_its_seconds():
    stored = blessed_records(expected_folder(None), Tier.SYSTEMS, "kernels")
    record = next(item for item in stored if item.ok and "ratio_7b_8" in item.metrics)
    ratio = record.value("ratio_7b_8")
    timed = {
        f"seconds_{who}_7b_8": Estimate(value=value, unit="seconds")
        for who, value in (("ours", 1e-3), ("bf16", 1e-3 * ratio))
    }
    record = dataclasses.replace(record, metrics=record.metrics | timed)
    assert violations(record) == []
    slower = {"seconds_ours_7b_8": Estimate(value=2e-3, unit="seconds")}
    (reason,) = violations(dataclasses.replace(record, metrics=record.metrics | slower))
    assert reason.startswith("metrics.ratio_7b_8 is")
