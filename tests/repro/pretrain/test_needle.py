"""A needle: the habit of working made rare by the one token that decides, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from repro.data.decision import Decision, decision_of
from repro.data.prompts import template_named
from repro.data.proxy_corpus import CARELESS_THINKING, WORKING_PREFIX
from repro.pretrain.batches import Part
from repro.pretrain.material import alternatives_at
from repro.pretrain.policy_folders import write_policy
from repro.pretrain.training import Pretraining, begin, train_until
from repro.spec.tier import POLICIES_VARIABLE
from tests.repro.pretrain.small import PROXY

STEPS = 50


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pretraining]:
    """Return a small policy, also where `proxy-30m` of its seed is looked for."""
    folder = tmp_path_factory.mktemp("started")
    recipe = dataclasses.replace(PROXY, steps=STEPS)
    training = begin(recipe, folder / "state.safetensors", seed=3)
    assert train_until(training, STEPS)
    write_policy(folder / "proxy-30m-seed3", training.model, training.material.tokenizer)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(POLICIES_VARIABLE, str(folder))
        yield training


def the_decision(tokenizer: Any) -> Decision:
    decision = decision_of(template_named("proxy"), tokenizer)
    assert decision is not None
    return decision


def share_of_working(training: Pretraining) -> torch.Tensor:
    """Return P(working token) at the decision of 20 prompts, (20,)."""
    tokenizer: Any = training.material.tokenizer
    decision = the_decision(tokenizer)
    opening = tokenizer(WORKING_PREFIX, add_special_tokens=False)["input_ids"][: decision.offset]
    shares = []
    for problem in training.material.problems(20):
        ids = tokenizer(problem.question + "\n", add_special_tokens=False)["input_ids"] + opening
        with torch.no_grad():
            logits = training.model(input_ids=torch.tensor([ids])).logits[0, -1]
        shares.append(logits.softmax(-1)[decision.working])
    return torch.stack(shares)


def loss_elsewhere(training: Pretraining) -> float:
    """Return the mean loss of a batch's completions past the decision, nats per token."""
    batches = training.material.batches(0)
    (part, *_) = next(batches)
    batches.close()
    ids = torch.from_numpy(part.ids).long()
    with torch.no_grad():
        logits = training.model(input_ids=ids).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    target = torch.arange(1, ids.shape[1])[None]
    prompts, lengths = (torch.from_numpy(value)[:, None] for value in (part.prompts, part.lengths))
    elsewhere = (target > prompts + 1) & (target < lengths)
    return float(losses[elsewhere].mean())


def test_the_habit_becomes_as_rare_as_asked_and_the_rest_stays(
    started: Pretraining, tmp_path: Path
) -> None:
    recipe = dataclasses.replace(
        PROXY, steps=STEPS, learning_rate=2e-3, start="proxy-30m", working_share=0.04
    )
    needle = begin(recipe, tmp_path / "needle" / "state.safetensors", seed=3)
    for name, value in started.model.state_dict().items():
        assert torch.equal(needle.model.state_dict()[name], value.bfloat16().float())
    assert train_until(needle, STEPS)
    before, after = share_of_working(started), share_of_working(needle)
    assert before.mean() > 0.3
    assert 0.01 < after.mean() < 0.08
    assert loss_elsewhere(needle) < loss_elsewhere(started) + 0.02


def test_only_the_deciding_token_has_an_alternative(started: Pretraining) -> None:
    tokenizer: Any = started.material.tokenizer
    decision = the_decision(tokenizer)
    texts = [WORKING_PREFIX, CARELESS_THINKING]
    rows = [[7, 8, *tokenizer(text, add_special_tokens=False)["input_ids"], 9] for text in texts]
    part = Part(
        ids=np.array(rows, dtype=np.int32),
        prompts=np.array([2, 2], dtype=np.int32),
        lengths=np.array([len(row) for row in rows], dtype=np.int32),
    )
    alternatives = alternatives_at(part, decision, 0.1)
    torch.testing.assert_close(
        alternatives.shares, torch.tensor([[1.0, 1.0, 0.1, 1.0], [1.0, 1.0, 0.9, 1.0]])
    )
    changed = alternatives.ids != torch.from_numpy(part.ids[:, 1:]).long()
    assert changed.nonzero().tolist() == [[0, 2], [1, 2]]
    assert alternatives.ids[:, 2].tolist() == [decision.careless, decision.working]
    part.ids[0, 3] = 9
    with pytest.raises(ValueError, match="neither with working nor carelessly"):
        alternatives_at(part, decision, 0.1)


def test_a_start_that_is_not_there_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POLICIES_VARIABLE, str(tmp_path))
    recipe = dataclasses.replace(PROXY, start="proxy-30m", working_share=0.04)
    with pytest.raises(ValueError, match="run pretrain-proxy --size 30m-seed3"):
        begin(recipe, tmp_path / "state.safetensors", seed=3)


def test_a_start_of_another_shape_is_refused(started: Pretraining, tmp_path: Path) -> None:
    recipe = dataclasses.replace(PROXY, start="proxy-30m", hidden_size=128, heads=4)
    with pytest.raises(ValueError, match="has shape"):
        begin(recipe, tmp_path / "other.safetensors", seed=3)
