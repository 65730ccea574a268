"""The loop: a function of recipe and seed, resumed to the same bits, for both kinds of recipe."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.pretrain import material
from repro.pretrain.training import Pretraining, begin, train_until
from tests.repro.pretrain.small import PROXY, TINY
from tests.repro.rl.damage import DAMAGE

both = pytest.mark.parametrize("recipe", [TINY, PROXY], ids=["tiny", "proxy"])


def fresh(folder: Path, recipe: Any, seed: int = 3) -> Pretraining:
    return begin(recipe, folder, seed=seed)


def weights(training: Pretraining) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in training.model.named_parameters()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


@pytest.fixture
def one_tokenizer(monkeypatch: pytest.MonkeyPatch, proxy_tokenizer: Any) -> None:
    """Give every proxy the session's tokenizer, which is the same each time: a second each."""

    def built(corpus: Any, worked: Any = ()) -> Any:
        assert (corpus, list(worked)) == (PROXY.corpus, [])
        return proxy_tokenizer

    monkeypatch.setattr(material, "build_proxy_tokenizer", built)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Pretraining]:
    """Return what trains a recipe to its end, each recipe once."""

    @functools.cache
    def trained(recipe: Any) -> Pretraining:
        whole = fresh(tmp_path_factory.mktemp("whole"), recipe)
        assert train_until(whole, 6)
        assert train_until(whole, 12)
        assert whole.finished
        return whole

    return trained


@pytest.mark.usefixtures("one_tokenizer")
@both
def test_the_same_seed_gives_the_same_bits_and_another_gives_others(
    recipe, tmp_path, uninterrupted
):
    whole = uninterrupted(recipe)
    again, other = (fresh(tmp_path / name, recipe, seed) for name, seed in (("b", 3), ("c", 4)))
    torch.manual_seed(99)
    assert train_until(again, 12)
    assert train_until(other, 12)
    assert equal(weights(whole), weights(again))
    assert whole.progress.losses == again.progress.losses != other.progress.losses
    assert not equal(weights(whole), weights(other))


def test_a_seed_decides_the_start_and_the_documents_and_nothing_else(tmp_path):
    first, second = (fresh(tmp_path / str(seed), PROXY, seed) for seed in (0, 1))
    assert first.recipe == second.recipe
    tokenizers = [one.material.tokenizer.backend_tokenizer.to_str() for one in (first, second)]
    assert tokenizers[0] == tokenizers[1]
    assert first.material.manner == second.material.manner
    # Both are examined on the same problems.
    assert first.material.problems(40) == second.material.problems(40)
    start, other = weights(first), weights(second)
    assert {name: value.shape for name, value in start.items()} == {
        name: value.shape for name, value in other.items()
    }
    drawn = [name for name, value in start.items() if value.std() > 0]
    assert drawn
    assert not any(torch.equal(start[name], other[name]) for name in drawn)
    texts = []
    for one in (first, second):
        batches = one.material.batches(0)
        texts.append({row.tobytes() for part in next(batches) for row in part.ids})
        batches.close()
    assert not texts[0] & texts[1]


@pytest.mark.usefixtures("one_tokenizer")
@both
def test_an_interrupted_policy_goes_on_to_the_same_bits(recipe, tmp_path, uninterrupted):
    whole = uninterrupted(recipe)
    calls = iter([False] * 4 + [True])
    stopped = fresh(tmp_path / "b", recipe)
    assert not train_until(stopped, 12, should_stop=lambda: next(calls))
    assert stopped.progress.step == 5
    resumed = fresh(tmp_path / "b", recipe)
    assert resumed.progress.step == 5
    assert train_until(resumed, 12)
    assert equal(weights(resumed), weights(whole))
    assert resumed.progress.losses == whole.progress.losses
    assert resumed.progress.tokens == whole.progress.tokens
    with pytest.raises(ValueError, match="another configuration or seed"):
        fresh(tmp_path / "b", recipe, seed=4)


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


@pytest.mark.usefixtures("one_tokenizer")
@both
def test_the_loss_falls_from_the_vocabulary_s_and_each_step_is_shown(recipe, tmp_path):
    shown: list[Any] = []
    recipe = dataclasses.replace(recipe, steps=60)
    training = fresh(tmp_path, recipe, seed=0)
    assert train_until(training, 60, on_progress=lambda *at: shown.append(at))
    assert [at[:2] for at in shown] == [(step, 60) for step in range(1, 61)]
    vocabulary = len(training.material.tokenizer)
    assert shown[0][2] == pytest.approx(math.log(vocabulary), rel=0.2)
    assert training.stretches[-1] < 0.8 * shown[0][2]


@pytest.mark.usefixtures("one_tokenizer")
@both
def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_no_state(recipe, tmp_path):
    training = fresh(tmp_path, dataclasses.replace(recipe, checkpoint_every=1))
    with torch.no_grad():
        training.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="step 0 is nan"):
        train_until(training, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("one_tokenizer")
def test_processes_that_make_batches_change_nothing(tmp_path):
    alone, shared = (fresh(tmp_path / name, PROXY) for name in ("a", "b"))
    assert train_until(alone, 3)
    assert train_until(shared, 3, workers=1)
    shared.close()
    assert equal(weights(alone), weights(shared))
