"""What is said of trained arms: means over seeds, and differences from 16-bit LoRA's own seeds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from repro.report.tables import NOTHING
from repro.report.training import training_rows
from repro.spec.tier import Tier
from repro.targets import find

TARGET = find("table1_coder_0_5b")
ENDS = {"bf16_lora": [30.0, 32.0, 34.0], "nvfp4_lora": [29.0, 31.0, 33.0, 10.0]}


def checked(ends: dict[str, list[float]] = ENDS) -> Any:
    def values(metric: str) -> dict[str, dict[int, float]]:
        share = metric in ("took_off", "collapsed")
        return {
            arm: {
                seed: end if metric == "accuracy_lenient" else float(end > 20) if share else end / 4
                for seed, end in enumerate(of)
            }
            for arm, of in ends.items()
        }

    evidence = SimpleNamespace(values=values, count=len(ends))
    return SimpleNamespace(
        evidence=evidence, selection=SimpleNamespace(target=TARGET, tier=Tier.MINI)
    )


def test_arms_are_told_beside_the_same_seeds_of_bf16() -> None:
    head, _, bf16, nvfp4, *_ = training_rows([checked()], TARGET.name)
    heads = [cell.strip() for cell in head.split("|")]
    first, second = (
        dict(zip(heads, map(str.strip, row.split("|")), strict=True)) for row in (bf16, nvfp4)
    )
    assert first["beside BF16, points"] == ""
    assert first["GSM8K at the end"] == "32.0 %"
    # The fourth seed has no partner: it is in the mean and in no difference.
    assert second["beside BF16, points"].startswith("-1.0 (")
    assert second["GSM8K at the end"] == "25.8 %"
    assert second["steps to the threshold"].endswith("(3 of 4)")
    assert second["broke down"] == "3"


@pytest.mark.parametrize("checks", [[], [checked({})]])
def test_nothing_trained_is_said_to_be_nothing(checks: list[Any]) -> None:
    assert training_rows(checks, TARGET.name) == NOTHING
