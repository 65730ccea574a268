"""Steps on several GPUs predicted from blessed phases of one."""

import dataclasses
from pathlib import Path

import pytest

from repro.evidence.store import blessed_records
from repro.run.several_ranks.ranks_plan import measured_rates, parse_ranks, predicted, ranks_text
from repro.spec.step_scale import StepPoint
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find

EXPECTED = Path(__file__).parents[3] / "expected"
H100 = "nvidia_h100_80gb_hbm3"


@pytest.mark.parametrize("model", ["0.5b", "7b"])
@pytest.mark.parametrize("lengths", ["spread", "equal"])
def test_one_gpu_is_what_was_measured(model, lengths):
    (record,) = [
        record
        for record in blessed_records(EXPECTED, Tier.SYSTEMS, "step_lengths", H100)
        if record.arm == "nvfp4_lora"
    ]
    (arm,) = [arm for arm in find("table1").arms if arm.name == "nvfp4_lora_aqn"]
    name = f"{model.replace('.', '_')}_{lengths}"
    (values,) = [p for p in record.config["scale"]["points"] if p["name"] == name]
    rates = measured_rates(model, arm, EXPECTED)
    one, two, four = (predicted(rates, StepPoint.recorded(values), ranks) for ranks in (1, 2, 4))
    assert one.step == pytest.approx(record.value(f"step_seconds_{name}"), rel=0.05)
    assert one.waiting == 0
    assert one.step > two.step > four.step > one.step / 4
    assert (two.waiting > 0) == (lengths == "spread")


def test_the_text_has_a_line_per_number():
    runs = plan(find("table1"), Tier.PAPER, 1, ["nvfp4_lora_aqn", "nf4_lora"])
    text = ranks_text(runs, parse_ranks("1,2,4,8,256"), EXPECTED)
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "256"]
    seconds = [float(row[1]) for row in rows[:-1]]
    assert seconds == sorted(seconds, reverse=True)
    assert rows[-1][1:3] == ["not", "possible:"]
    assert "nf4_lora: not predicted" in text


def test_full_training_of_7b_fits_two_cards_with_moments_in_eight_bits_and_four_in_either():
    fits = {}
    target = find("table1")
    (run,) = plan(target, Tier.PAPER, 1, ["bf16_full"])
    for name in ("adamw", "adamw_8bit"):
        optimizer = dataclasses.replace(run.scale.optimizer, name=name)
        own = dataclasses.replace(run, scale=dataclasses.replace(run.scale, optimizer=optimizer))
        text = ranks_text([own], [1, 2, 4], EXPECTED)
        rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
        fits[name] = [row[8:] == ["fits"] for row in rows]
        masters = [float(row[1]) for row in rows]
        assert masters == pytest.approx([4 * 7.62, 2 * 7.62, 7.62], abs=0.05)
        assert len({row[4] for row in rows}) == 1  # each samples from a whole copy
        for row in rows:
            assert float(row[7]) == pytest.approx(sum(map(float, row[1:7])), abs=0.5)
    assert fits == {"adamw": [False, False, True], "adamw_8bit": [False, True, True]}


@pytest.mark.parametrize("text", ["two", "0,1", "", "1,,2"])
def test_numbers_of_ranks_that_are_none_are_named(text):
    with pytest.raises(ValueError, match="needs numbers such as"):
        parse_ranks(text)
