"""Two sets of records compared: what regresses, what does not, and what is not judged at all."""

import dataclasses

import pytest

from repro.evidence.record import Estimate
from repro.judge.as_before import Side, compare
from repro.report.regression import EXIT_STATUS, Judgement
from repro.spec.config import digest_of
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import TARGETS, find
from repro.targets.steps import TABLE3
from tests.repro.made_up import honest_record
from tests.repro.recorded_steps import step_records, times, unchanged

STEP = "step_seconds_7b_b2"


def compared(new=unchanged, old=unchanged, target=TABLE3):
    sides = (
        Side(name="old", records=step_records(old)),
        Side(name="new", records=step_records(new)),
    )
    return compare(target, Tier.SYSTEMS, *sides)


def row(comparison, metric, arm="nvfp4_lora"):
    (one,) = (item for item in comparison.rows if (item.arm, item.metric) == (arm, metric))
    return one


def status(comparison):
    judgement = Judgement(comparisons=(comparison,))
    return judgement.status, EXIT_STATUS[judgement.status]


def values(*own):
    """Return a change that sets the step times of the NVFP4 arm at batch 2."""

    def change(arm, metric, given):
        return list(own) if (arm, metric.name) == ("nvfp4_lora", STEP) else given

    return change


def only(metric, **changes):
    """Return Table 3 with one metric alone, perhaps changed."""
    changed = dataclasses.replace(TABLE3.metric(metric), **changes)
    return dataclasses.replace(TABLE3, metrics=(changed,), claims=(), headline=metric)


def test_six_percent_slower_with_small_noise_regresses():
    comparison = compared(times(1.06, STEP))
    one = row(comparison, STEP)
    assert one.verdict == "regressed"
    assert one.change == pytest.approx(0.06, abs=1e-3)
    assert 0.05 < one.low < one.change
    assert [item for item in comparison.rows if item.verdict != "unchanged"] == [one]
    assert status(comparison) == ("regressed", 1)
    # Three percent are shown as surely, and are below the threshold.
    less = compared(times(1.03, STEP))
    one = row(less, STEP)
    assert one.p_worse < 0.05
    assert (one.verdict, status(less)) == ("unchanged", ("fine", 0))


@pytest.mark.parametrize(
    ("metric", "factor", "verdict"),
    [
        ("tokens_per_second_7b_b4", 0.94, "regressed"),
        ("tokens_per_second_7b_b4", 1.06, "improved"),
        (STEP, 0.94, "improved"),
        ("speedup_7b_b8", 0.9, "regressed"),
        ("peak_bytes_7b_b8", 1.015, "regressed"),
        ("peak_bytes_7b_b8", 1.005, "unchanged"),
        ("prediction_error_7b_b8", 1.8, "unchanged"),
    ],
)
def test_a_metric_is_judged_by_the_threshold_of_its_unit(metric, factor, verdict):
    assert row(compared(times(factor, metric)), metric).verdict == verdict


def test_what_has_no_better_and_no_worse_is_not_judged():
    names = {item.metric for item in compared(times(2.0, "predicted_", "idle_")).rows}
    assert not any(name.startswith(("predicted_", "idle_", "optimizer_")) for name in names)


def test_many_rows_are_corrected_for_their_number():
    new, old = values(10.5, 10.9, 10.7), values(9.9, 10.2, 10.0)
    alone = row(compared(new, old=old, target=only(STEP)), STEP)
    among = row(compared(new, old=old), STEP)
    assert alone.p_worse < 0.05 < among.p_worse
    assert (alone.verdict, among.verdict) == ("regressed", "unclear")


@pytest.mark.parametrize(
    ("new", "old", "verdict"),
    [
        # Of one timing each there is the threshold alone.
        ((10.6,), (10.0,), "regressed"),
        ((10.4,), (10.0,), "unchanged"),
        # Pairs that overlap.
        ((10.1, 11.3), (9.9, 10.2), "unclear"),
        # One timing has the spread of the baseline.
        ((10.6,), (10.0, 10.01, 9.99), "regressed"),
        ((10.6,), (9.0, 10.0, 11.0), "unclear"),
        ((9.0, 10.6, 12.2), (8.5, 10.0, 11.5), "unclear"),
        # Noise that could hide a loss, without any change.
        ((8.5, 10.0, 11.5), (8.5, 10.0, 11.5), "unclear"),
    ],
)
def test_few_timings_are_judged_by_what_spread_there_is(new, old, verdict):
    comparison = compared(values(*new), old=values(*old))
    one = row(comparison, STEP)
    assert one.verdict == verdict
    assert status(comparison) == (("regressed", 1) if verdict == "regressed" else ("fine", 0))
    assert (one.p_worse is None) == (max(len(new), len(old)) < 3)


@pytest.mark.parametrize(
    ("unit", "new", "verdict"),
    [("rows", 0.0, "unchanged"), ("rows", 1.0, "regressed"), ("bytes", 512.0, "regressed")],
)
def test_what_was_zero_has_no_ratio_and_regresses_all_the_same(unit, new, verdict):
    target = only(STEP, unit=unit, better="lower")
    one = row(compared(values(*[new] * 3), old=values(0.0, 0.0, 0.0), target=target), STEP)
    assert (one.verdict, one.relative, one.change) == (verdict, False, new)


def smoke_row(metric, *factors):
    target = dataclasses.replace(find("table1"), metrics=(metric,), claims=(), headline=None)

    def side(name, factors):
        records = {}
        for run in plan(target, Tier.SMOKE, len(factors), ["bf16"]):
            value = factors[run.seed] * (10.0 + run.seed)
            values = {metric.name: Estimate(value=value, unit=metric.unit)}
            records[run.seed] = dataclasses.replace(honest_record(run), metrics=values)
        return Side(name=name, records={"bf16": records})

    (one,) = compare(target, Tier.SMOKE, side("old", [1.0] * 5), side("new", factors)).rows
    return one


@pytest.mark.parametrize(
    ("metric", "factors", "verdict"),
    [
        ("entropy_first", (1.0, 1.0, 1.0), "unchanged"),
        ("entropy_first", (1.08, 1.081, 1.079), "changed"),
        ("entropy_first", (0.92, 0.921, 0.919), "changed"),
        ("entropy_first", (1.0, 1.1, 1.2), "unclear"),
        ("accuracy", (0.6, 0.62, 0.61), "regressed"),
        ("accuracy", (0.8, 0.82, 0.81), "unchanged"),
        ("accuracy", (1.4, 1.42, 1.41), "improved"),
    ],
)
def test_seeds_are_compared_in_pairs_where_they_draw_something(metric, factors, verdict):
    """Seeds differ by a tenth of their value each, which would hide every one of these changes."""
    assert smoke_row(find("table1").metric(metric), *factors).verdict == verdict


def on_arms(**changes):
    """Return Table 3's records with some fields replaced."""
    return {
        arm: {seed: dataclasses.replace(record, **changes) for seed, record in by_seed.items()}
        for arm, by_seed in step_records().items()
    }


def against(new, problems=()):
    old = Side(name="old", records=step_records())
    return compare(TABLE3, Tier.SYSTEMS, old, Side(name="new", records=new, problems=problems))


OTHER = {"arm": {"name": "another"}, "seed": 0}
STATE = {"commit": "1" * 40, "dirty": False, "sha256": "1" * 64}


@pytest.mark.parametrize(
    ("changes", "problems", "words"),
    [
        (None, (), "new: there is no record"),
        ({}, ("seed-0.json is refused: noise",), "seed-0.json is refused: noise"),
        ({"environment": {"gpu": [{"name": "NVIDIA H100"}]}}, (), "nvidia_h200 and of nvidia_h100"),
        ({"config": OTHER, "digest": digest_of(OTHER)}, (), "2 configurations"),
        ({"commit": STATE["commit"], "sources": [STATE]}, (), "2 commits"),
    ],
    ids=["none", "refused", "another device", "another configuration", "two commits"],
)
def test_sides_that_do_not_stand_beside_each_other_are_not_judged(changes, problems, words):
    new = {} if changes is None else on_arms(**changes)
    if changes and "sources" in changes:
        new = {**step_records(), "bf16_lora": new["bf16_lora"]}
    comparison = against(new, problems)
    assert words in comparison.problems[0]
    assert (comparison.rows, status(comparison)) == ((), ("could not judge", 2))


def without(metric, records):
    for by_seed in records.values():
        for record in by_seed.values():
            del record.metrics[metric]
    return records


def test_a_value_that_is_missing_is_said_and_the_others_are_judged():
    gone = without("peak_bytes_7b_b8", step_records(times(1.06, STEP)))
    comparison = against(gone)
    assert "lacks 2 values of table3" in comparison.problems[0]
    assert row(comparison, STEP).verdict == "regressed"
    assert status(comparison) == ("regressed", 1)
    assert status(against({**gone, "nvfp4_lora": gone["bf16_lora"]})) == ("could not judge", 2)
    # A new metric has no baseline, and is no problem.
    sides = Side(name="old", records=gone), Side(name="new", records=step_records())
    assert status(compare(TABLE3, Tier.SYSTEMS, *sides)) == ("fine", 0)


def test_rows_are_listed_by_how_bad_they_are():
    def change(arm, metric, given):
        factor = {STEP: 1.1, "rollout_seconds_7b_b2": 1.3, "update_seconds_7b_b2": 0.8}
        return [factor.get(metric.name, 1.0) * value for value in given]

    rows = Judgement(comparisons=(compared(change),)).rows
    assert [item.metric for item in rows[:4:2]] == ["rollout_seconds_7b_b2", STEP]
    assert [item.verdict for item in rows[4:7]] == ["improved", "improved", "unchanged"]


def test_every_metric_says_which_way_is_better():
    silent = [
        f"{target.name}.{metric.name}"
        for target in TARGETS
        for metric in target.metrics
        if metric.direction() is None
    ]
    assert silent == []
