"""The choice of learning rates: the rule, its ties, its failures, and what it refuses."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from repro.choose import choose, main_choose
from repro.evidence.record import Record, failed_record
from repro.selection import select
from repro.spec.tier import Tier
from repro.targets.chosen_rates import chosen_rates, read_choice
from repro.targets.rates import LEARNING_RATES

Maker = Callable[..., Record]
SCALE = LEARNING_RATES.scales[Tier.PROXY]


def values(**better: float) -> dict[str, dict[int, float]]:
    return {
        arm.name: {seed: 50.0 + better.get(arm.name, 0.0) for seed in SCALE.seeds}
        for arm in LEARNING_RATES.arms
    }


def test_each_format_and_way_of_training_gets_its_best_rate() -> None:
    found = choose(LEARNING_RATES, SCALE, values(bf16_full_high=1.0, nf4_lora_low=2.0))["chosen"]
    assert found.keys() == {"bf16_full", "bf16_lora", "nf4_lora", "mxfp4_lora", "nvfp4_lora"}
    assert found["bf16_full"] == pytest.approx(3e-4)
    assert found["nf4_lora"] == pytest.approx(1e-3 / 3)
    # A tie goes to the smallest rate.
    assert found["mxfp4_lora"] == pytest.approx(1e-3 / 3)


def test_arms_that_share_a_rate_are_pooled() -> None:
    apart = values(nvfp4_lora_high=3.0, nvfp4_lora_aqn_high=-9.0, nvfp4_lora_aqn_middle=1.0)
    assert choose(LEARNING_RATES, SCALE, apart)["chosen"]["nvfp4_lora"] == pytest.approx(1e-3)


def test_the_choice_is_made_from_records_and_read_back(
    tmp_path: Path, proxy_record: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    (selection,) = select(["learning_rates"], tier="proxy")
    runs = selection.plan()
    args = argparse.Namespace(runs=str(tmp_path), out=str(tmp_path / "choice.json"))
    for run in runs[:-1]:
        shift = 5.0 if run.arm.name.endswith("_high") else 0.0
        if run.arm.name == "mxfp4_lora_high":
            failed_record(run, "the gradient is nan", {}, datetime.now(UTC)).write(tmp_path)
        else:
            proxy_record(run, shift).write(tmp_path)
    with pytest.raises(ValueError, match="nvfp4_lora_aqn_high seed 101 has no record"):
        main_choose(args)
    assert read_choice(tmp_path / "choice.json") is None
    proxy_record(runs[-1], 5.0).write(tmp_path)
    assert main_choose(args) == 0
    capsys.readouterr()
    chosen = dict(chosen_rates(tmp_path / "choice.json"))
    assert chosen["bf16_lora"] == pytest.approx(3e-3)
    # A rate at which runs fail is no good, whatever it reaches elsewhere.
    assert chosen["mxfp4_lora"] != pytest.approx(3e-3)
    raw = json.loads((tmp_path / "choice.json").read_text(encoding="utf-8"))
    assert raw["values"]["mxfp4_lora_high"] == {"100": 0.0, "101": 0.0}


def test_nothing_is_chosen_before_the_sweep_ran(tmp_path: Path) -> None:
    assert chosen_rates(tmp_path / "none.json") == ()
