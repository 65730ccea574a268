"""Effects by policy: every policy, and the verdict's own numbers."""

from __future__ import annotations

import pytest

from repro.evidence.store import Blessed
from repro.judge.check import Checked, check_selection
from repro.report.over_policies import over_policies
from repro.run.places import expected_folder
from repro.run.select import select


def checked(name: str) -> Checked:
    (selection,) = select([name], tier="proxy")
    expected = expected_folder(None)
    return check_selection(selection, Blessed(expected, "proxy", "nvidia_h200"), expected)


@pytest.fixture(scope="module")
def judged() -> Checked:
    return checked("needle_policies")


def test_a_row_has_every_policy_and_the_verdicts_own_numbers(judged: Checked) -> None:
    rows = over_policies([judged])["needle_policies"]
    assert len(rows) == len(judged.verdicts) == 4
    for row, verdict in zip(rows, judged.verdicts, strict=True):
        assert (row.mean, row.low, row.high) == (verdict.effect, verdict.low, verdict.high)
        assert len(row.each) == verdict.n == 4
        assert f"by pre-training seed {row.each[0]:.3g}, {row.each[1]:.3g}" in verdict.sentence
        assert min(row.each) < row.mean < max(row.each)


def test_statements_about_training_seeds_have_no_row() -> None:
    assert over_policies([checked("needle_ranks_grown")]) == {}
