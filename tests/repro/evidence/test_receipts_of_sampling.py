"""Receipts of what is sampled otherwise: real records stand, and none that contradicts its arm."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from repro.evidence.receipts import violations
from repro.evidence.record import Record, read_record
from repro.run.carry_out import carry_out
from repro.spec.arm import NoiseConfig
from repro.spec.target import plan
from repro.spec.tier import Tier
from tests.repro.recorded_smoke import SMALL


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return the record of a run under noise per projection.

    Its three steps are one a stage of the noise; what is measured after them is not looked at.
    """
    folder = tmp_path_factory.mktemp("sampling")
    (run,) = plan(SMALL, Tier.SMOKE, 1, ("nvfp4_lora_aqn",))
    data = dataclasses.replace(run.scale.data, test_problems=4)
    arm = dataclasses.replace(
        run.arm,
        noise=NoiseConfig(sharing="projection", num_stages=3),
    )
    run = dataclasses.replace(
        run, arm=arm, scale=dataclasses.replace(run.scale, steps=3, data=data)
    )
    carry_out([run], folder / "working", folder, lambda *messages: None, lambda: False, 1)
    (path,) = folder.glob("smoke/*/*/seed-*.json")
    return read_record(path)


def test_noise_per_projection_lists_five_vectors_a_block(record: Record) -> None:
    assert not violations(record)
    done, blocks = record.effects["noise"], (record.effects["norms_wrapped"] - 1) // 2
    assert done["modules"] == 5 * blocks
    shared = copy.deepcopy(record.effects)
    shared["noise"]["modules"] = 2 * blocks
    changed = dataclasses.replace(record, effects=shared)
    assert any("effects.noise.modules" in sentence for sentence in violations(changed))
