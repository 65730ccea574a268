"""README's six rows: each value from the records, each verdict in its word."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from repro.judge.check import Checked
from repro.report.readme import answer_rows
from repro.report.systems_rates import comparisons
from repro.report.verdicts import counted
from repro.run.places import expected_folder
from repro.spec.tier import Tier

EXPECTED = expected_folder(None)
Of = Callable[..., Checked]


def rows(checks: list[Checked]) -> list[list[str]]:
    lines = answer_rows(checks, EXPECTED)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[2] != "-"]


def test_six_questions_have_a_line_for_each_device_that_answers_them(
    blessed: list[Checked], on_other_device: Of
) -> None:
    heads, *answers = rows(blessed)
    assert heads == ["question", "paper", "tier", "measured", "verdict"]
    assert len(answers) == 6
    systems = [on_other_device(item) for item in blessed if item.selection.tier is Tier.SYSTEMS]
    _, *wider = rows([*blessed, *systems])
    for alone, both in zip(answers, wider, strict=True):
        of_systems = alone[2] == Tier.SYSTEMS.value
        assert both[:3] == alone[:3]
        again = f"{alone[3]}<br>{alone[3].replace('H200: ', 'H100: ')}"
        assert both[3:] == [again if of_systems else alone[3], alone[4]]


def test_verdicts_that_differ_between_devices_are_named_by_device(
    blessed_of: Of, on_other_device: Of
) -> None:
    checked = blessed_of("table6")
    worse = [dataclasses.replace(item, status="contradicted") for item in checked.verdicts]
    other = dataclasses.replace(on_other_device(checked), verdicts=worse)
    verdict = rows([checked, other])[1][4]
    assert verdict == "H200: 2 reproduced<br>H100: 2 contradicted"


def test_the_rollouts_span_and_verdicts_are_those_of_the_tables(
    blessed: list[Checked], blessed_of: Of
) -> None:
    pairs = [p for n in "5678" for p in comparisons(blessed_of(f"table{n}"), EXPECTED)]
    ratios = [pair.ratio.value for pair in pairs]
    first = rows(blessed)[1]
    assert first[3] == f"H200: {min(ratios):.2f} to {max(ratios):.2f} x"
    judged = [pair.verdict for pair in pairs if pair.verdict is not None]
    assert sum(int(part.split()[0]) for part in first[4].split(", ")) == len(judged) > 0


def test_what_no_real_model_was_asked_says_so_and_has_its_claims_words_once_one_was(
    blessed: list[Checked], blessed_of: Of
) -> None:
    for row in rows(blessed)[4:6]:
        assert row[2] == Tier.MINI.value
        assert row[3] == ""
        assert row[4].startswith("not tested on a real model yet")
        assert "docs/proxy_study.md" in row[4]
    smoke = blessed_of("table1", Tier.SMOKE)
    shown = [
        dataclasses.replace(item, status="excluded", effect=1.5, low=-1.0, high=4.0)
        for item in smoke.verdicts
        if item.name in ("aqn_helps", "qerl_beats_lora")
    ]
    selection = dataclasses.replace(smoke.selection, tier=Tier.MINI)
    row = rows([dataclasses.replace(smoke, selection=selection, verdicts=shown)])[5]
    assert row[1] == "QeRL +2.7, AQN +2.3 points (7B)"
    assert row[3].endswith("QeRL +1.5 (-1 to +4) points, AQN +1.5 (-1 to +4) points")
    assert row[4] == counted(shown)


def test_the_papers_own_number_is_not_run_until_it_is(blessed: list[Checked]) -> None:
    last = rows(blessed)[-1]
    assert last[1] == "90.8 %"
    assert last[2] == Tier.PAPER.value
    assert last[-1].startswith("not run")


def test_without_records_there_is_no_table() -> None:
    assert answer_rows([], EXPECTED) == ["No records are blessed yet."]
