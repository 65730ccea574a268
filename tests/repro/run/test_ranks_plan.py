"""`plan --ranks`: measured steps are quoted as blessed, and memory is planned per rank."""

import dataclasses
import re
from pathlib import Path

import pytest

from repro.evidence.store import blessed_records
from repro.run import preflight
from repro.run.several_ranks import ranks_plan
from repro.run.several_ranks.ranks_plan import parse_ranks, ranks_text
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


def test_steps_are_those_of_the_blessed_records_and_other_numbers_are_not_timed():
    (record,) = blessed_records(EXPECTED, Tier.SYSTEMS, "scaling", H100)
    text = text_of("table1", parse_ranks("1,2,8,256"), ["nvfp4_lora", ARM, "nf4_lora"])
    of_nvfp4, of_nf4 = text.split("  nf4_lora:")
    assert "nvfp4_lora, nvfp4_lora_aqn:" in of_nvfp4
    measured = {tuple(row[:3]): row[3::2][:3] for row in rows_of(of_nvfp4) if row[-1] == H100}
    points = {
        ("1", "128", "spread"): "7b_spread",
        ("1", "128", "equal"): "7b_equal",
        ("2", "256", "spread"): "7b_spread_2",
        ("2", "256", "equal"): "7b_equal_2",
        ("2", "128", "spread"): "7b_spread_halved",
    }
    assert measured == {
        key: [f"{record.value(f'{phase}_seconds_{name}'):.2f}"
              for phase in ("step", "rollout", "update")]
        for key, name in points.items()
    }  # fmt: skip
    assert rows_of(of_nvfp4)[-2] == ["8", "not", "timed"]
    assert rows_of(of_nvfp4)[-1][1:3] == ["not", "possible:"]
    assert [row[1:] for row in rows_of(of_nf4)[:3]] == [["not", "timed"]] * 3
    assert rows_of(text_of("table1", [1, 2], sampler="vllm")) == [
        ["1", "not", "timed"], ["2", "not", "timed"]
    ]  # fmt: skip


def test_steps_are_of_this_machines_kind_of_device_where_it_has_some(monkeypatch):
    assert {row[-1] for row in rows_of(text_of("table1", [1, 2]))} == {H100, H200}
    here = {"gpu": [{"name": "NVIDIA H200"}]}
    monkeypatch.setattr(ranks_plan, "capture_environment", lambda: here)
    assert {row[-1] for row in rows_of(text_of("table1", [1, 2]))} == {H200}


def test_an_adapters_memory_is_of_the_smallest_card_here(monkeypatch):
    def planned(text):
        gigabytes, fits = re.search(r"([\d.]+) GB of .*, (fits|does not fit)$", text).groups()
        return float(gigabytes), fits

    assert planned(text_of("table2_32b", [1], ["bf16_lora"]))[1] == "does not fit"
    assert planned(text_of("table1", [1]))[0] > 60
    cards = [
        CudaDevice(name=f"A card of {size} GB", capability=(9, 0), memory_bytes=size * 10**9)
        for size in (80, 24)
    ]
    monkeypatch.setattr(preflight, "cuda_devices", lambda: cards)
    text = text_of("table1", [1])
    assert "24 GB (smallest of 2" in text
    assert planned(text)[0] < 24


def test_full_training_of_7b_fits_two_cards_with_moments_in_eight_bits_and_four_in_either():
    fits = {}
    target = find("table1")
    (run,) = plan(target, Tier.PAPER, 1, ["bf16_full"])
    for name in ("adamw", "adamw_8bit"):
        optimizer = dataclasses.replace(run.scale.optimizer, name=name)
        own = dataclasses.replace(run, scale=dataclasses.replace(run.scale, optimizer=optimizer))
        steps, rows = (rows_of(ranks_text([own], [1, 2, 4], EXPECTED))[part] for part in
                       (slice(3), slice(3, None)))  # fmt: skip
        assert [row[1:] for row in steps] == [["not", "timed"]] * 3
        fits[name] = [row[8:] == ["fits"] for row in rows]
        masters = [float(row[1]) for row in rows]
        assert masters == pytest.approx([4 * 7.62, 2 * 7.62, 7.62], abs=0.05)
        assert len({row[4] for row in rows}) == 1  # each samples from a whole copy
        for row in rows:
            assert float(row[7]) == pytest.approx(sum(map(float, row[1:7])), abs=0.5)
    assert fits == {"adamw": [False, False, True], "adamw_8bit": [False, True, True]}


@pytest.mark.parametrize("text", ["two", "0,1", "", "1,,2"])
def test_numbers_of_ranks_that_are_none_are_named(text):
    with pytest.raises(ValueError, match="numbers"):
        parse_ranks(text)
