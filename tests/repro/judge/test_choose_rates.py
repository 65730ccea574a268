"""The choice of learning rates: the rule, its ties, its failures, and what it refuses."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from repro.evidence.record import Record, failed_record
from repro.judge.choose_rates import choose, main_choose, smallest_tied, standard_error
from repro.run.select import select
from repro.spec.tier import Tier
from repro.targets.chosen_rates import chosen_rates, read_choice
from tests.repro.planned import SWEEP

Maker = Callable[..., Record]
SCALE = dataclasses.replace(
    SWEEP.scales[Tier.MINI],
    data=dataclasses.replace(SWEEP.scales[Tier.MINI].data, development_problems=200),
)


def values(**better: float) -> dict[str, dict[int, float]]:
    return {
        arm.name: {seed: 50.0 + better.get(arm.name, 0.0) for seed in SCALE.seeds}
        for arm in SWEEP.arms
    }


def test_each_format_and_way_of_training_gets_its_best_rate() -> None:
    rates = choose(SWEEP, SCALE, values(bf16_full_high=6.0, nf4_lora_low=6.0))["chosen"]
    assert rates.keys() == {"bf16_full", "bf16_lora", "nf4_lora", "mxfp4_lora", "nvfp4_lora"}
    assert rates["bf16_full"] == pytest.approx(3e-4)
    assert rates["nf4_lora"] == pytest.approx(1e-3 / 3)
    # A tie goes to the smallest rate.
    assert rates["mxfp4_lora"] == pytest.approx(1e-3 / 3)


def test_arms_that_share_a_rate_are_pooled() -> None:
    apart = values(nvfp4_lora_high=14.0, nvfp4_lora_aqn_high=-20.0, nvfp4_lora_aqn_middle=12.0)
    assert choose(SWEEP, SCALE, apart)["chosen"]["nvfp4_lora"] == pytest.approx(1e-3)


def test_rates_that_the_evaluation_cannot_tell_apart_are_tied() -> None:
    # 200 problems, two seeds: at 96 % the error is the root of .96 * .04 / 400, 0.98 points.
    assert standard_error(96.0, 400) == pytest.approx(0.98, abs=0.001)
    for behind, rate in ((1.9, 1e-3 / 3), (2.0, 1e-3)):
        ends = values(bf16_lora_middle=46.0, bf16_lora_low=46.0 - behind)
        choice = choose(SWEEP, SCALE, ends)
        assert choice["chosen"]["bf16_lora"] == pytest.approx(rate)
        assert choice["errors"]["bf16_lora"] == pytest.approx(0.98, abs=0.001)
    # Two arms share NVFP4's rate, so twice as many questions stand behind it.
    ends = values(nvfp4_lora_middle=46.0, nvfp4_lora_aqn_middle=46.0)
    errors = choose(SWEEP, SCALE, ends)["errors"]
    assert errors["nvfp4_lora"] == pytest.approx(0.98 / 2**0.5, abs=0.001)


def test_a_tie_reaches_over_a_rate_that_is_worse() -> None:
    assert smallest_tied({1e-4: 95.5, 3e-4: 90.0, 1e-3: 96.0}, 1.0) == 1e-4
    assert smallest_tied({1e-4: 94.5, 3e-4: 95.0, 1e-3: 96.0}, 1.0) == 3e-4
    # Nothing is left to chance where all is solved: only equals are tied.
    assert standard_error(100.0, 400) == 0.0
    assert smallest_tied({1e-4: 99.9, 1e-3: 100.0}, 0.0) == 1e-3


@pytest.mark.usefixtures("planned_targets")
def test_the_choice_is_made_from_records_and_read_back(
    tmp_path: Path, planned_record: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    (selection,) = select(["study_sweep"], tier="mini")
    runs = selection.plan()
    args = argparse.Namespace(
        sweep="study_sweep", runs=str(tmp_path), out=str(tmp_path / "choice.json")
    )
    for run in runs[:-1]:
        shift = 15.0 if run.arm.name.endswith("_high") else 0.0
        if run.arm.name == "mxfp4_lora_high":
            failed_record(run, "the gradient is nan", {}, datetime.now(UTC)).write(tmp_path)
        else:
            planned_record(run, shift).write(tmp_path)
    with pytest.raises(ValueError, match="nvfp4_lora_aqn_high seed 101 has no record"):
        main_choose(args)
    own = SWEEP.scales[Tier.MINI]
    assert read_choice(own, tmp_path / "choice.json") is None
    planned_record(runs[-1], 15.0).write(tmp_path)
    assert main_choose(args) == 0
    capsys.readouterr()
    chosen = dict(chosen_rates(own, tmp_path / "choice.json"))
    assert chosen["bf16_lora"] == pytest.approx(3e-3)
    # A rate at which runs fail is no good, whatever it reaches elsewhere.
    assert chosen["mxfp4_lora"] != pytest.approx(3e-3)
    raw = json.loads((tmp_path / "choice.json").read_text(encoding="utf-8"))
    assert raw["values"]["mxfp4_lora_high"] == {"100": 0.0, "101": 0.0}


def test_nothing_is_chosen_before_the_sweep_ran(tmp_path: Path) -> None:
    assert chosen_rates(SCALE, tmp_path / "none.json") == ()


def test_a_choice_of_another_scales_sweep_is_none(tmp_path: Path) -> None:
    path = tmp_path / "choice.json"
    path.write_text(json.dumps(choose(SWEEP, SCALE, values())), encoding="utf-8")
    assert len(chosen_rates(SCALE, path)) == 5
    shorter = dataclasses.replace(SCALE, steps=SCALE.steps // 2)
    assert chosen_rates(shorter, path) == ()
    assert read_choice(shorter, path) is None
    path.write_text(json.dumps({"schema": 1}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"choice.json: schema is 1; this program reads 2"):
        read_choice(SCALE, path)
