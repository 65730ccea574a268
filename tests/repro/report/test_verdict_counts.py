"""The counts of verdicts by kind."""

from repro.report.verdict_counts import count_rows
from repro.report.verdict_words import Kind, counted, of_kind
from repro.run.places import expected_folder
from repro.spec.tier import Tier

EXPECTED = expected_folder(None)


def row_of(lines, label):
    line = next(line for line in lines if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_kinds_are_counted_apart_and_every_claim_once(blessed):
    smoke = [item for item in blessed if item.selection.tier is Tier.SMOKE]
    rows = count_rows(smoke, EXPECTED)
    for kind in (Kind.PAPER, Kind.MACHINERY):
        verdicts = [verdict for checked in smoke for verdict in of_kind(checked, kind)]
        assert row_of(rows, kind.value)[1] == counted(verdicts)
