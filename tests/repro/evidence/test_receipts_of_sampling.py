"""Receipts of what is sampled otherwise: real records stand, and none that contradicts its arm."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest

from repro.evidence.receipts import violations
from repro.evidence.receipts.exploration import exploration
from repro.evidence.record import Record, read_record
from repro.run.carry_out import carry_out
from repro.spec.arm import Exploration, NoiseConfig
from repro.spec.target import plan
from repro.spec.tier import Tier
from tests.repro.recorded_smoke import SMALL


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return the record of a run whose opening tokens are drawn warmer, under noise per projection.

    Its three steps are one a stage of the noise; what is measured after them is not looked at.
    """
    folder = tmp_path_factory.mktemp("sampling")
    (run,) = plan(SMALL, Tier.SMOKE, 1, ("nvfp4_lora_aqn",))
    data = dataclasses.replace(run.scale.data, test_problems=4)
    arm = dataclasses.replace(
        run.arm,
        exploration=Exploration(temperature=2.0, opening_tokens=4),
        noise=NoiseConfig(sharing="projection", num_stages=3),
    )
    run = dataclasses.replace(
        run, arm=arm, scale=dataclasses.replace(run.scale, steps=3, data=data)
    )
    carry_out([run], folder / "working", folder, lambda *messages: None, lambda: False, 1)
    (path,) = folder.glob("smoke/*/*/seed-*.json")
    return read_record(path)


def test_a_run_that_explored_is_evidence(record: Record) -> None:
    assert not violations(record)
    assert record.config["arm"]["exploration"] == {"temperature": 2.0, "opening_tokens": 4}
    done = record.effects["exploration"]
    assert 0 < done["tokens_changed"] < done["tokens_explored"] == done["tokens_asked"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens_changed": 0}, "must have changed at least one token"),
        ({"tokens_explored": 3}, "were asked for"),
        ({"tokens_asked": 10**6, "tokens_explored": 10**6}, "completions of"),
        ({"tokens_asked": 1, "tokens_explored": 1, "tokens_changed": 1}, "completions of"),
        (None, "nothing shows that rollouts explored"),
    ],
)
def test_counts_that_contradict_the_arm_are_refused(
    record: Record, changes: dict[str, Any] | None, words: str
) -> None:
    effects = copy.deepcopy(record.effects)
    if changes is None:
        del effects["exploration"]
    else:
        effects["exploration"] |= changes
    changed = dataclasses.replace(record, effects=effects)
    assert any(words in sentence for sentence in exploration(changed))
    assert any(words in sentence for sentence in violations(changed))


def test_an_arm_without_exploration_must_not_have_explored(record: Record) -> None:
    config = json.loads(json.dumps(record.config))
    del config["arm"]["exploration"]
    plain = dataclasses.replace(record, config=config)
    assert any("without exploration" in sentence for sentence in exploration(plain))


def test_noise_per_projection_lists_five_vectors_a_block(record: Record) -> None:
    assert not violations(record)
    done, blocks = record.effects["noise"], (record.effects["norms_wrapped"] - 1) // 2
    assert done["modules"] == 5 * blocks
    shared = copy.deepcopy(record.effects)
    shared["noise"]["modules"] = 2 * blocks
    changed = dataclasses.replace(record, effects=shared)
    assert any("effects.noise.modules" in sentence for sentence in violations(changed))
