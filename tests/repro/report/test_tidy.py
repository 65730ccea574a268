"""The tidy table: one row a claim or bar, one a value, with what the checks themselves say."""

import csv
import dataclasses

import pytest

from repro.__main__ import main
from repro.judge.blessed import blessed_of
from repro.report.tidy import statements, values
from repro.report.verdict_words import labelled
from repro.run.places import expected_folder
from repro.spec.tier import Tier

EXPECTED = expected_folder(None)


def test_each_claim_and_bar_has_one_row_with_its_verdict(every_blessed):
    rows = statements(every_blessed, EXPECTED)
    verdicts = [v for c in every_blessed for v in c.verdicts]
    assert [(r.name, r.verdict, r.effect, r.low) for r in rows] == [
        (v.name, labelled(v), v.effect, v.low) for v in verdicts
    ]
    places = [(r.target, r.tier, r.device, r.name, r.source) for r in rows]
    assert len(set(places)) == len(places)
    assert {r.treatment for r in rows} & {"delivered", "not delivered", "unclear"}
    devices = {"cpu", "nvidia_h100_80gb_hbm3", "nvidia_h200", "nvidia_h200_portable"}
    assert {r.device for r in rows} == devices


def row_of(checked, name):
    (row,) = [row for row in statements([checked], EXPECTED) if row.name == name]
    return row


def test_a_row_says_whose_kernels_which_model_and_what_the_paper_has(blessed_of):
    row = row_of(blessed_of("figure11"), "nvfp4_faster_than_bitsandbytes_14b_r16")
    assert (row.model, row.kernels) == ("14B", "this project's over bitsandbytes")
    assert row.paper == pytest.approx(93.9 / 45.1, rel=0.1)
    smoke = row_of(blessed_of("table1", Tier.SMOKE), "nf4_lora_gains")
    found = (smoke.device, smoke.model, smoke.kernels)
    assert found == ("cpu", "tiny on generated", "torch, dequantised")
    assert row_of(blessed_of("table3"), "nvfp4_lora.speedup_7b_b8").paper == 1.2


def test_values_are_those_that_verdicts_are_of(blessed_of):
    checked, metric = blessed_of("table6"), "tokens_per_second_7b_8"
    listed = {(r["arm"], r["seed"]): r["value"] for r in values([checked]) if r["metric"] == metric}
    known = checked.evidence.values(metric)
    assert listed == {(arm, seed): of[seed] for arm, of in known.items() for seed in of}


def test_check_writes_the_table_to_files_and_without_a_place_to_the_screen(tmp_path, capsys):
    line = ["check", "table6", "--blessed", "--table"]
    assert main([*line, str(tmp_path / "t.csv")]) == 0
    checks = blessed_of(EXPECTED, ["table6"], None)
    stated = [*map(dataclasses.asdict, statements(checks, EXPECTED))]
    for name, made in (("t.csv", stated), ("t.values.csv", values(checks))):
        rows = list(csv.DictReader((tmp_path / name).open()))
        assert len(rows) == len(made) > 5
        assert rows[0].keys() == made[0].keys()
    capsys.readouterr()
    assert main(line) == 0
    assert capsys.readouterr().out == (tmp_path / "t.csv").read_text()
