"""The loop: a function of recipe and seed, resumed to the same bits."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.pretrain.recipes import Recipe
from repro.pretrain.training import Pretraining, begin, train_until
from tests.repro.pretrain.small import TINY
from tests.repro.rl.damage import DAMAGE


def fresh(folder: Path, recipe: Recipe = TINY, seed: int = 3) -> Pretraining:
    return begin(recipe, folder, seed=seed)


def weights(training: Pretraining) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in training.model.named_parameters()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Pretraining:
    """Return the recipe's policy, trained to its end, in two calls."""
    training = fresh(tmp_path_factory.mktemp("whole"))
    assert train_until(training, 6)
    assert train_until(training, 12)
    assert training.finished
    return training


def test_the_same_seed_gives_the_same_bits_and_another_gives_others(
    tmp_path: Path, whole: Pretraining
) -> None:
    again, other = (fresh(tmp_path / name, TINY, seed) for name, seed in (("b", 3), ("c", 4)))
    torch.manual_seed(99)
    assert train_until(again, 12)
    assert train_until(other, 12)
    assert equal(weights(whole), weights(again))
    assert whole.progress.losses == again.progress.losses != other.progress.losses
    assert not equal(weights(whole), weights(other))


def test_an_interrupted_policy_goes_on_to_the_same_bits(tmp_path: Path, whole: Pretraining) -> None:
    calls = iter([False] * 4 + [True])
    stopped = fresh(tmp_path / "b")
    assert not train_until(stopped, 12, should_stop=lambda: next(calls))
    assert stopped.progress.step == 5
    resumed = fresh(tmp_path / "b")
    assert resumed.progress.step == 5
    assert train_until(resumed, 12)
    assert equal(weights(resumed), weights(whole))
    assert resumed.progress.losses == whole.progress.losses
    assert resumed.progress.tokens == whole.progress.tokens
    with pytest.raises(ValueError, match="another configuration or seed"):
        fresh(tmp_path / "b", seed=4)


EVERY_STEP = dataclasses.replace(TINY, checkpoint_every=1)


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pretraining]:
    """Return a folder with the states of three steps, to be copied, and what wrote it."""
    folder = tmp_path_factory.mktemp("three-steps")
    whole = fresh(folder, EVERY_STEP)
    assert train_until(whole, 3)
    return folder, whole


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_pre_training_goes_on_from_the_state_before_a_damaged_one(tmp_path, damage, three_steps):
    recipe, (states, whole) = EVERY_STEP, three_steps
    shutil.copytree(states, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "step-00000003")
    resumed = fresh(tmp_path, recipe)
    (sentence,) = resumed.progress.refused
    assert re.search(DAMAGE[damage], sentence)
    assert sentence.endswith("training went on from step-00000002")
    assert train_until(resumed, 3)
    assert equal(weights(resumed), weights(whole))
    assert fresh(tmp_path, recipe).progress.refused == [sentence]


def test_a_resumed_policy_remembers_the_most_memory_of_all_its_starts(tmp_path):
    training = fresh(tmp_path, TINY)
    training.progress.peak_bytes = 2**50
    assert not train_until(training, 12, should_stop=lambda: True)
    assert fresh(tmp_path, TINY).progress.peak_bytes == 2**50


def test_the_loss_falls_from_the_vocabulary_s_and_each_step_is_shown(tmp_path: Path) -> None:
    shown: list[Any] = []
    recipe = dataclasses.replace(TINY, steps=60)
    training = fresh(tmp_path, recipe, seed=0)
    assert train_until(training, 60, on_progress=lambda *at: shown.append(at))
    assert [at[:2] for at in shown] == [(step, 60) for step in range(1, 61)]
    vocabulary = len(training.tokenizer)
    assert shown[0][2] == pytest.approx(math.log(vocabulary), rel=0.2)
    assert training.stretches[-1] < 0.8 * shown[0][2]


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_no_state(tmp_path: Path) -> None:
    training = fresh(tmp_path, dataclasses.replace(TINY, checkpoint_every=1))
    with torch.no_grad():
        training.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="step 0 is nan"):
        train_until(training, 2)
    assert list(tmp_path.iterdir()) == []
