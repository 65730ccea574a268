"""The last line of a check: what is at fault or worse comes first, then verdicts in plain words."""

from dataclasses import replace
from pathlib import Path

import pytest

from repro.judge.check import exit_status
from repro.report.ending import bar_word, ending
from repro.report.verdict_words import Kind, kind_of
from repro.spec.tier import Tier


def with_statuses(checked, kind, *statuses, **more):
    """Return a check with as many verdicts of a kind, and no others."""
    one = next(verdict for verdict in checked.verdicts if kind_of(verdict) is kind)
    made = [replace(one, status=status, **more) for status in statuses]  # type: ignore[arg-type]
    return replace(checked, verdicts=made)


@pytest.mark.parametrize(
    ("statuses", "marks", "said"),
    [
        (["reproduced"], {}, "1 claim of the paper holds."),
        (["reproduced"], {"post hoc": "why"}, "1 claim of the paper holds (post hoc)."),
        (["reproduced"] * 3, {}, "3 claims of the paper hold."),
        (["excluded", "contradicted"], {}, "2 claims of the paper do not hold."),
        (
            ["reproduced", "below a tenth", "inconclusive", "not run", "not run"],
            {},
            "Of 5 claims of the paper, 1 holds, 1 is mixed, 1 is undecided and 2 were not tested.",
        ),
    ],
)
def test_claims_are_counted_in_plain_words(blessed_of, statuses, marks, said):
    assert ending([with_statuses(blessed_of("table6"), Kind.PAPER, *statuses, marks=marks)]) == said


@pytest.mark.parametrize(
    ("before", "status"), [("contradicted", 0), ("inconclusive", 0), (None, 0), ("reproduced", 1)]
)
def test_a_missed_target_says_how_it_stood_before(blessed_of, before, status):
    missed = with_statuses(blessed_of("memory"), Kind.BAR, "contradicted", before=before)
    words = bar_word(missed.verdicts[0])
    assert f"1 performance target of this suite is {words}." in ending([missed])
    assert ending([missed]).startswith("Worse than before: 1 ") == bool(status)
    assert exit_status([missed]) == status


def test_faults_come_first_and_name_their_targets(blessed_of):
    smoke = blessed_of("table1", Tier.SMOKE)
    failed = with_statuses(smoke, Kind.MACHINERY, "contradicted", "reproduced")
    refused = replace(smoke.evidence, refused=[(Path("seed-0.json"), "it was edited")])
    checks = [blessed_of("table6"), replace(failed, evidence=refused)]
    assert ending(checks).startswith(
        "Fault: 1 record refused (table1). Fault: 1 check of the machinery failed (table1). "
    )
    assert exit_status(checks) == 1


def test_runs_that_are_not_there_are_counted(blessed_of):
    smoke = blessed_of("table1", Tier.SMOKE)
    known = {arm: by_seed for arm, by_seed in smoke.evidence.records.items() if arm != "bf16"}
    failed = {("bf16", 1): (Path("seed-1.failed-1.json"), "out of memory")}
    evidence = replace(smoke.evidence, records=known, failed=failed)
    said = ending([replace(smoke, evidence=evidence)])
    assert "2 planned runs have no record. 1 run failed." in said
    lacking = replace(smoke, lacking="no record of table1 at the smoke tier")
    assert ending([lacking]) == "There are no records of table1."
    assert exit_status([lacking]) == 2
