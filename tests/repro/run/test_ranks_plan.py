"""Steps on several GPUs predicted from blessed phases of one."""

import dataclasses
import re
from pathlib import Path

import pytest

from repro.evidence.store import blessed_records
from repro.run import preflight
from repro.run.several_ranks import ranks_plan
from repro.run.several_ranks.ranks_plan import (
    Rates,
    decode_steps,
    measured_rates,
    parse_ranks,
    predicted,
    ranks_text,
    step_off,
)
from repro.spec.config import derive_seed
from repro.spec.step_scale import StepPoint
from repro.spec.target import plan
from repro.spec.tier import CudaDevice, Tier
from repro.targets import find

EXPECTED = Path(__file__).parents[3] / "expected"
H100, H200 = "nvidia_h100_80gb_hbm3", "nvidia_h200"
ARM = "nvfp4_lora_aqn"


@pytest.fixture(autouse=True)
def no_card_here(monkeypatch):
    monkeypatch.setattr(preflight, "cuda_devices", lambda: ())
    monkeypatch.setattr(ranks_plan, "capture_environment", dict)


def text_of(target, counts, arms=(ARM,), **changes):
    runs = plan(find(target), Tier.PAPER, 1, [*arms])
    changed = [dataclasses.replace(r, scale=dataclasses.replace(r.scale, **changes)) for r in runs]
    return ranks_text(changed, counts, EXPECTED)


def rows_of(text):
    return [line.split() for line in text.splitlines() if re.match(r" {4}[ \d]{3}\d  ", line)]


@pytest.mark.parametrize("rates_of", [H100, H200])
def test_steps_of_one_and_two_gpus_are_within_a_tenth_of_what_was_measured(rates_of):
    (record,) = blessed_records(EXPECTED, Tier.SYSTEMS, "scaling", rates_of)
    for values in record.config["scale"]["points"]:
        point = StepPoint.recorded(values)
        rates = measured_rates(point.model, find("table1").arm(ARM), EXPECTED, rates_of)
        assert rates_of in rates.basis
        one, two, four = (predicted(rates, point, ranks) for ranks in (1, 2, 4))
        assert one.waiting == 0
        assert one.step > two.step > four.step > one.step / 4
        assert (two.waiting > 0) == (point.lengths == "spread")
        measured = record.value(f"step_seconds_{point.name}")
        near = 1e-6 if (point.ranks, point.lengths) == (1, "spread") else 0.1  # those are fitted
        assert (one, two)[point.ranks - 1].step == pytest.approx(measured, rel=near)


def test_the_text_has_a_row_per_number_and_none_of_vllms_rollout_and_arms_alike_once():
    text = text_of("table1", parse_ranks("1,2,4,8,256"), ["nvfp4_lora", ARM, "nf4_lora"])
    rows = rows_of(text)
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "256"]
    seconds = [float(row[3]) for row in rows[:-1]]
    assert seconds == sorted(seconds, reverse=True)
    assert rows[-1][1:3] == ["not", "possible:"]
    assert "nvfp4_lora, nvfp4_lora_aqn:" in text
    assert re.search("nf4_lora:\\s+not predicted", text)
    assert max(map(len, text.splitlines())) <= 100
    by_vllm = text_of("table1", [1, 2], sampler="vllm")
    assert "sampler is vllm" in by_vllm
    assert rows_of(by_vllm) == []


def test_memory_is_of_the_smallest_card_here_and_what_does_not_fit_is_marked(monkeypatch):
    assert "does not fit" in text_of("table2_32b", [1], ["bf16_lora"])
    assert float(rows_of(text_of("table1", [1]))[0][8]) > 60
    cards = [
        CudaDevice(name=f"A card of {size} GB", capability=(9, 0), memory_bytes=size * 10**9)
        for size in (80, 24)
    ]
    monkeypatch.setattr(preflight, "cuda_devices", lambda: cards)
    text = text_of("table1", [1])
    assert "A card of 24 GB (smallest of 2 cards" in " ".join(text.split())
    assert float(rows_of(text)[0][8]) < 24


def test_a_step_off_takes_the_longer_phase_of_gpus_divided_between_both():
    # A rollout is as long as its longest row, an update in proportion to tokens.
    rates = Rates(per_step=0.01, per_token=0, per_update_token=1e-3, fixed=0, basis="none")
    point = StepPoint(name="p", model="7b", prompts=8, completion_tokens=100, prompt_tokens=150)
    assert predicted(rates, point, 8).step == pytest.approx(1 + 16 / 8)
    assert step_off(rates, point, 2) == pytest.approx(16)
    assert step_off(rates, point, 8) == pytest.approx(16 / 7)


def test_steps_that_share_a_rollout_have_its_time_divided_and_a_pass_for_old_logprobs():
    (one,), (four,) = (
        [[float(cell) for cell in row] for row in rows_of(text_of("table1", [1], **changes))]
        for changes in ({"updates_per_rollout": 1}, {"steps": 601})
    )
    assert four[1] == one[1]
    # A pass forward is half of an update that computes no block again.
    assert four[2] == pytest.approx(one[2] * (1 + 3 / 8), rel=1e-3)
    assert four[6:8] == pytest.approx([four[3] / 4, four[3] * 151 / 3600], abs=0.01)


def test_rows_without_a_slot_wait_as_measured_and_draws_of_a_batch_are_told():
    (record,) = blessed_records(EXPECTED, Tier.SYSTEMS, "step_lengths_32b", H100)[:1]
    point = StepPoint.recorded(record.config["scale"]["points"][0])
    facts = record.facts["points"][point.name]["bf16"]
    lengths = point.drawn_lengths(derive_seed(0, "rollout", 3, "3/generated-3514f07c3d535cb6", 0))
    assert sum(lengths) == facts["generated_tokens"]
    assert decode_steps(lengths, facts["slots"]) == pytest.approx(facts["decode_steps"], rel=0.01)
    assert decode_steps(lengths, len(lengths)) == max(lengths)
    assert "1 to 3 times" in text_of("table2_32b", [1])


def test_the_sentences_say_what_the_rows_say():
    text = text_of("table1", range(1, 17))
    rows = {int(row[0]): [float(cell) for cell in row[1:]] for row in rows_of(text)}
    said = " ".join(text.split())
    halved = int(re.search(r"From (\d+) GPUs", said)[1])
    assert rows[halved - 1][4] >= 0.5 >= rows[halved][4]
    off = {int(ranks): float(s) for s, ranks in re.findall(r"([\d.]+) s on (\d+)", said)}
    assert off.keys() == rows.keys() - {1}
    worth = re.search(r"15 % faster on ([\d, ]+)\.", said)[1]
    faster = {ranks for ranks in off if rows[ranks][2] >= 1.15 * off[ranks]}
    assert {int(ranks) for ranks in worth.split(",")} == faster


def test_rates_are_of_this_machines_kind_of_device_where_it_has_some(monkeypatch):
    assert H100 in text_of("table1", [1])
    here = {"gpu": [{"name": "NVIDIA H200"}]}
    monkeypatch.setattr(ranks_plan, "capture_environment", lambda: here)
    assert H200 in text_of("table1", [1])


def test_full_training_of_7b_fits_two_cards_with_moments_in_eight_bits_and_four_in_either():
    fits = {}
    target = find("table1")
    (run,) = plan(target, Tier.PAPER, 1, ["bf16_full"])
    for name in ("adamw", "adamw_8bit"):
        optimizer = dataclasses.replace(run.scale.optimizer, name=name)
        own = dataclasses.replace(run, scale=dataclasses.replace(run.scale, optimizer=optimizer))
        rows = rows_of(ranks_text([own], [1, 2, 4], EXPECTED))
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
