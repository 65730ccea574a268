"""Entropy before training: per prompt, on the same tokens, and with noise that really acts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.evidence.procedure import Measured
from repro.procedures import entropy_start as module
from repro.run.carry_out import procedure_named
from repro.spec.config import RunConfig
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from repro.targets.table1 import SMOKE

PROMPTS = 5


def run_of(arm: str) -> RunConfig:
    (run,) = plan(find("entropy_start"), Tier.PROXY, None, [arm])
    data = dataclasses.replace(SMOKE.data, development_problems=PROMPTS)
    rollout = dataclasses.replace(SMOKE.rollout, max_new_tokens=12)
    scale = dataclasses.replace(SMOKE, data=data, rollout=rollout, group_size=2)
    return dataclasses.replace(run, tier="smoke", scale=scale)


def measured(arm: str, tmp_path: Path) -> Measured:
    return procedure_named("entropy")(
        run_of(arm),
        folder=tmp_path,
        progress=lambda text, values: None,
        should_stop=lambda: False,
        threads=1,
    )


def test_for_bf16_its_own_samples_are_the_common_tokens(tmp_path: Path) -> None:
    found = measured("bf16", tmp_path)
    own = found.series["entropy_own_by_prompt"]
    assert len(own) == PROMPTS
    assert own == found.series["entropy_forced_by_prompt"]
    assert found.metrics["entropy_own"].value == pytest.approx(sum(map(float, own)) / PROMPTS)
    limit = float(torch.log(torch.tensor(10_000.0)))
    assert all(0 < float(value) < limit for value in own)


def test_rounding_and_noise_change_the_entropy_on_the_same_tokens(tmp_path: Path) -> None:
    plain = measured("bf16", tmp_path)
    for arm in ("nvfp4", "bf16_noisy"):
        other = measured(arm, tmp_path)
        assert other.inputs == plain.inputs
        forced = other.series["entropy_forced_by_prompt"]
        assert forced != plain.series["entropy_forced_by_prompt"]
        noise = other.effects["noise_at_start"]
        assert (noise["channels_changed"] > 0) is (arm == "bf16_noisy")
    assert noise["sigma"] == pytest.approx(1e-2)


def test_the_common_tokens_are_sampled_once_and_parts_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {arm: measured(arm, tmp_path) for arm in ("bf16", "mxfp4")}
    sampled = []
    sample = module._sample

    def counted(*args: Any) -> Any:
        sampled.append(len(args[-1]))
        return sample(*args)

    monkeypatch.setattr(module, "_sample", counted)
    monkeypatch.setattr(module, "_PROMPTS_AT_ONCE", 3)
    module._common_rows.cache_clear()
    for arm, wanted in whole.items():
        found = measured(arm, tmp_path)
        for name, values in wanted.series.items():
            assert found.series[name] == pytest.approx(values, abs=1e-5), (arm, name)
    # The common ones, then each arm's own.
    assert sampled == [3, 2] * 3
    module._common_rows.cache_clear()
