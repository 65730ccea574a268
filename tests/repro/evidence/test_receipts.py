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
NOT_DONE = [
    ("nvfp4_lora", {"linears": {"bf16": 21}}, "was nvfp4"),
    ("nvfp4_lora", {"linears": {"nvfp4": 20, "bf16": 1}}, "not nvfp4"),
    ("nvfp4_lora", {"linears": {"nvfp4": 20}}, "20 projections"),
    ("mxfp4", {"relative_weight_error_mean": 0.0}, "a 4-bit format gives"),
    ("nvfp4", {"relative_weight_error_mean": None}, "shows the rounding"),
    ("nf4_lora", {"linears": {}}, "facts.linears is missing"),
    ("bf16", {"rounding": {"format": "nf4", "factor": 1.0}}, "facts.rounding"),
    ("bf16", {"order": 3}, "facts.order"),
    ("bf16_lora", {"folded": {"rollouts": 3}}, "facts.folded"),
    ("bf16", {"compute": "float16"}, "facts.compute"),
    ("nvfp4_lora_aqn", {"noise": NO_NOISE}, "touched nothing"),
    ("nvfp4_lora_aqn", {"noise.modules": 1}, "facts.noise.modules"),
    ("nvfp4_lora_aqn", {"noise.channels_changed": 5}, "facts.noise.channels_changed"),
    ("nvfp4_lora_aqn", {"noise.rollouts_perturbed": 3}, "were really perturbed"),
    ("nvfp4_lora", {"noise": {"modules": 6, "channels_changed": 10}}, "facts.noise.modules is 6"),
    ("bf16_lora", {"adapter_modules": 0}, "no adapter"),
    ("bf16_lora", {"adapter_modules": 1}, "facts.adapter_modules is 1"),
    ("bf16_full", {"parameters_trainable": LARGER}, "the model has"),
    ("bf16_full", {"trained_change_l2": 0.0}, "no parameter"),
    ("bf16_lora", {"trained_change_l2": -1.0}, "trained_change_l2 is -1.0"),
    ("bf16_lora", {"optimizer_steps": 15}, "15 optimiser steps"),
    ("bf16_lora", {"advantage_group_mean_max": 0.41}, "not centred"),
    ("bf16_lora", {"advantage_group_mean_max": None}, "not centred"),
    ("bf16_lora", {"rows.trained_on": 0}, "trained on"),
    ("bf16_lora", {"rows.without_reward": 100}, "facts.rows.without_reward"),
    ("bf16", {"grades": None}, "facts.grades is missing"),
    ("bf16", {"grades": {"ok": 9, "error": 1}}, "1 of 10 were dropped"),
    ("bf16", {"grades": {"ok": 9, "timeout": 1}}, "over the time limit"),
    ("bf16", {"answers": None}, "facts.answers is missing"),
    ("bf16", {"answers": {}}, "facts.answers.accuracy_greedy is missing"),
]


def showing(record, changes):
    """Return a record with other facts, named by dotted paths of up to two parts."""
    facts = dict(record.facts)
    for path, value in changes.items():
        name, _, part = path.partition(".")
        facts[name] = facts[name] | {part: value} if part else value
    return dataclasses.replace(record, facts=facts)


@pytest.mark.parametrize(("arm", "changes", "words"), NOT_DONE)
def test_a_record_of_what_was_not_done_is_no_evidence(arm, changes, words):
    record = honest_record(RUNS[arm])
    assert violations(record) == []
    reasons = violations(showing(record, changes))
    assert any(words in reason for reason in reasons), reasons


@pytest.mark.parametrize("tests", [{}, {"every": 4}, {"until": 50.0}, {"test_at": [4]}])
def test_with_a_reward_of_ones_own_golds_count_only_where_grades_decide(tests):
    record = showing(honest_record(RUNS["bf16_lora"]), {"grades": {"ok": 9, "error": 1}})
    arm, scale = (record.config[name] for name in ("arm", "scale"))
    scale |= {"evaluation": scale["evaluation"] | {"every": 0} | tests}
    record.config["arm"] = arm | {"reward_function": {"module": "short", "function": "reward"}}
    assert any("were dropped" in reason for reason in violations(record)) is bool(tests)


@pytest.mark.parametrize(("arm", "seed"), [("nvfp4_lora_aqn", 0), ("bf16", 1)])
def test_real_records_are_evidence(smoke_runs, arm, seed):
    assert violations(read_record(place(smoke_runs, arm, seed))) == []


@pytest.mark.parametrize(
    ("series", "words"),
    [
        ({"sigma": 0.004, "sigma_realised": 0.004}, "sigma was 0.004"),
        ({"sigma_realised": 2e-5}, "2e-05"),
        ({"zero_variance_groups": 1.0}, "nothing to learn"),
        ({"learning_rate": 1.0}, "learning_rate was 1.0"),
        ({"learning_rate": None}, "series.learning_rate has 0 values"),
        # Above that of equal odds.
        ({"entropy": 6.0}, "series.entropy is 6"),
        ({"sampler_trainer_kl": 50.0}, "series.sampler_trainer_kl is 50"),
    ],
)
def test_series_that_show_nothing_or_do_not_follow_are_no_evidence(series, words):
    run = RUNS["nvfp4_lora_aqn"]
    record = honest_record(run)
    assert violations(record, run) == []
    steps = len(record.series["sigma"])
    of = {name: [value] * (steps * (value is not None)) for name, value in series.items()}
    reasons = violations(dataclasses.replace(record, series=record.series | of), run)
    assert any(words in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("name", "unit", "value"),
    [
        ("kl_completions", "nats", -0.5),
        ("kl_completions", "nats", 50.0),
        ("entropy_own", "nats", -0.001),
        # Its tallies give others.
        ("accuracy", "percent", 99.9),
        ("gain_greedy", "points", 60.0),
    ],
)
def test_a_metric_that_cannot_be_or_does_not_follow_is_no_evidence(name, unit, value):
    record = honest_record(RUNS["bf16_lora"])
    metrics = record.metrics | {name: Estimate(value=value, unit=unit)}
    reasons = violations(dataclasses.replace(record, metrics=metrics))
    assert any(f"metrics.{name} is" in reason for reason in reasons)


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
def test_a_metric_that_its_tallies_do_not_give_is_refused(tier, target, metric):
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
