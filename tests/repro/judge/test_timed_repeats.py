"""Timed repeats stand in for seeds where a workload is deterministic: in verdicts and in bless."""

import shutil

import pytest

from repro.judge.blessing import bless
from repro.judge.check import check_selection, exit_status
from repro.judge.gathering import gather
from repro.run.places import expected_folder
from repro.run.select import Selection
from repro.spec.tier import Tier
from repro.targets.steps import TABLE3
from tests.repro.recorded_steps import write_steps

SELECTION = Selection(target=TABLE3, tier=Tier.SYSTEMS)
SLOW, FAST = (17.9, 18.0, 18.1), (10.1, 10.0, 10.0)


def write(runs, own=FAST, lora=SLOW):
    """Write made-up records of Table 3 with these step times of NVFP4 and 16-bit LoRA."""

    def change(arm, metric, values):
        if metric.name.startswith("step_seconds_"):
            return list(own if arm == "nvfp4_lora" else lora)
        if metric.name.startswith("speedup_"):
            return [slow / fast for slow, fast in zip(lora, own, strict=True)]
        return values

    write_steps(runs, change)


def checked(runs, expected=None):
    return check_selection(SELECTION, runs, expected or expected_folder(None))


@pytest.mark.parametrize(
    ("own", "lora", "status", "effect"),
    [
        (FAST, SLOW, "reproduced", 1.794),
        ((20.1, 20.0, 20.2), SLOW, "contradicted", 0.896),
        ((10.0, 30.0, 17.0), SLOW, "inconclusive", 1.046),
        # Two are too few.
        ((10.0, 10.0), (18.0, 18.0), "inconclusive", 1.8),
    ],
)
def test_three_repeats_of_one_seed_decide_a_claim_about_time(own, lora, status, effect, tmp_path):
    write(tmp_path, own, lora)
    claims = [v for v in checked(tmp_path).verdicts if v.about == "claim"]
    assert {(v.status, v.n) for v in claims} == {(status, len(own))}
    # One process timed them: how processes differ is not in their spread.
    assert {mark for v in claims for mark in v.marks} == {"within one process"}
    assert claims[0].effect == pytest.approx(effect, abs=0.01)
    assert ("a verdict needs 3" in claims[0].sentence) == (len(own) == 2)


def test_seeds_that_were_timed_together_are_of_one_process(blessed_of):
    for name, marks in (("table6", {"within one process"}), ("kernels", set())):
        assert {
            m for v in blessed_of(name).verdicts if v.about == "claim" for m in v.marks
        } == marks


@pytest.mark.parametrize(
    ("own", "status", "inside"),
    [(FAST, "reproduced", "3 of 3"), ((10.1, 12.5, 10.0), "contradicted", "2 of 3")],
)
def test_a_bar_must_hold_in_every_repeat(own, status, inside, tmp_path):
    write(tmp_path, own)
    # Blessed values may have its name.
    stated = {v.name: v for v in checked(tmp_path).verdicts if v.source.startswith("derived")}
    bar = stated["nvfp4_lora.speedup_7b_b8"]
    assert (bar.status, inside in bar.sentence) == (status, True)


def blessed(runs, expected):
    return bless(SELECTION, gather(SELECTION, runs, expected), expected, runs=runs)[0]


def test_a_timed_target_is_blessed_on_its_declared_repeats_of_one_seed(tmp_path, expected):
    write(tmp_path / "runs")
    blessed(tmp_path / "runs", expected)
    again = checked(tmp_path / "runs", expected)
    rows = {(row.arm, row.metric): row for row in again.as_before.rows}
    assert rows["nvfp4_lora", "step_seconds_7b_b2"].old == (10.1, 10.0, 10.0)
    assert set(again.as_before.counts()) == {"unchanged"}


@pytest.mark.parametrize(
    ("before", "now", "stood", "status"),
    [
        (SLOW, SLOW, "contradicted", 0),
        (FAST, SLOW, "reproduced", 1),
        (FAST, FAST, "reproduced", 0),
        (None, SLOW, None, 0),
    ],
    ids=["missed before", "met before", "met", "nothing blessed"],
)
def test_a_bar_missed_again_is_no_fault(before, now, stood, status, tmp_path, expected):
    shutil.copytree(expected_folder(None) / "bars", expected / "bars")
    if before is not None:
        write(tmp_path / "old", before)
        blessed(tmp_path / "old", expected)
    write(tmp_path / "new", now)
    result = checked(tmp_path / "new", expected)
    (bar,) = (v for v in result.verdicts if v.name == "nvfp4_lora.speedup_7b_b8")
    assert bar.status == ("contradicted" if now is SLOW else "reproduced")
    assert (bar.before, exit_status([result])) == (stood, status)
