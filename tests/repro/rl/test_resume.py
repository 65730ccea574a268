"""Checkpoints: a resumed run equals an uninterrupted one, whatever ended it."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from repro.evidence.provenance import source_states
from repro.models.policy import trainable_parameters
from repro.rl.single_run.optimizers import build_optimizer
from repro.rl.training_checkpoint import TrainState, load_checkpoint, save_checkpoint
from repro.spec.arm import NoiseConfig
from repro.spec.config import LearningRates, OptimizerConfig
from tests.repro.rl.damage import DAMAGE, drop_a_moment, rewrite_state
from tests.repro.small_runs import equal, weights

NOISE = NoiseConfig(sigma_start=0.3, sigma_end=0.1, num_stages=3)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    go: Any, tmp_path: Path, damage: Any
) -> None:
    whole, first, _ = go(steps=2, checkpoint_every=1)
    damage(tmp_path / "a" / "step-00000002")
    again, second, _ = go(steps=2, checkpoint_every=1)
    assert again.series == whole.series
    assert equal(weights(first), weights(second))
    (sentence,) = again.effects["checkpoints_refused"]
    assert re.search(DAMAGE[damage], sentence)
    assert sentence.startswith("checkpoint step-00000002 was refused")
    assert sentence.endswith("training went on from step-00000001")
    third, _, _ = go(steps=2, checkpoint_every=1)
    assert third.effects["checkpoints_refused"] == [sentence]


def test_a_refused_checkpoint_changes_nothing_of_the_policy(
    make_policy: Any, go: Any, tmp_path: Path
) -> None:
    go(steps=1)
    checkpoint = tmp_path / "a" / "step-00000001"
    digest = json.loads((checkpoint / "state.json").read_text())["state"]["digest"]
    drop_a_moment(checkpoint)
    policy = make_policy()
    parameters, before = trainable_parameters(policy), weights(policy)
    with pytest.raises(ValueError, match="is missing"):
        load_checkpoint(
            tmp_path / "a", digest, parameters, build_optimizer(parameters, run_optimizer())
        )
    assert equal(weights(policy), before)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of everything inside JSON values."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:1])
    collected = []
    for key, item in inside:
        collected += [(*path, key)]
        collected += places_in(item, (*path, key)) if isinstance(item, dict | list) else []
    return collected


def test_no_value_of_the_state_that_is_of_another_kind_ends_in_a_traceback(
    go: Any, make_policy: Any, tmp_path: Path
) -> None:
    go(steps=1)
    folder, policy = tmp_path / "a" / "step-00000001", make_policy()
    parameters = trainable_parameters(policy)
    optimizer = build_optimizer(parameters, run_optimizer())
    good = json.loads((folder / "state.json").read_text())
    sentences = []
    for *path, last in places_in(good):
        for value in (None, -1, 0.5, "x", [], {}, {"x": None}):
            bad = copy.deepcopy(good)
            place = bad
            for key in path:
                place = place[key]
            place[last] = value
            rewrite_state(folder, bad)
            try:
                state = load_checkpoint(
                    tmp_path / "a", good["state"]["digest"], parameters, optimizer
                )
            except ValueError as error:
                sentences.append(str(error))
            else:
                assert state is not None
    assert len(sentences) > 50
    assert all("step-00000001: " in sentence for sentence in sentences)


def test_an_unfinished_folder_is_ignored_and_removed(make_policy: Any, tmp_path: Path) -> None:
    parameters = trainable_parameters(make_policy())
    left = tmp_path / "unfinished-00000009-1"
    left.mkdir()
    config = run_optimizer()
    optimizer = build_optimizer(parameters, config)
    assert load_checkpoint(tmp_path, "d", parameters, optimizer) is None
    state = TrainState(digest="d", step=0, draws=1, series={"reward": [0.5]}, effects={})
    save_checkpoint(tmp_path, copy.deepcopy(state), parameters, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
    saved = dataclasses.replace(state, effects={"sources": source_states()})
    assert load_checkpoint(tmp_path, "d", parameters, optimizer) == saved


def run_optimizer() -> Any:
    return OptimizerConfig(learning_rates=LearningRates(lora_16bit=1, lora_4bit=1, full=1))
