"""Requests and machines that go wrong: the right answer or a clear error, and nothing kept."""

import pytest
import torch

from repro.rollout.engine import Engine
from repro.spec.config import SamplingConfig
from tests.repro.rollout.conftest import interrupt_after, small

SAMPLING = SamplingConfig(max_new_tokens=32)


@pytest.fixture
def engine(make_policy):
    return Engine(make_policy(), small())


def require_usable(engine):
    """Check that the engine holds nothing, and still answers."""
    assert engine.pool.free == engine.pool.capacity
    assert bool((engine.state.positions == -1).all())
    batch = engine.sample([[1, 2, 3]], SAMPLING, group_size=2, seeds=[0, 1])
    assert [len(c.token_ids) for c in batch] == [32, 32]
    assert engine.pool.free == engine.pool.capacity


@pytest.mark.parametrize(
    ("prompts", "seeds", "limits", "message"),
    [
        ([[1], []], [0, 1], None, "prompt 1 is empty"),
        ([[1] * 225], [0], None, "prompt 0 has 225 .*32"),
        ([[1, 97]], [0], None, "prompt 0 .*97.*97"),
        ([[1], [2]], [0], None, "1 seeds for 2 prompts"),
        ([[1]], [0], [0], "limits .*0"),
        ([], [], None, "no prompts"),
    ],
)
def test_a_request_that_cannot_be_served_is_named(engine, prompts, seeds, limits, message):
    with pytest.raises(ValueError, match=message):
        engine.sample(prompts, SAMPLING, group_size=1, seeds=seeds, limits=limits)
    require_usable(engine)


def test_a_row_that_no_cache_could_hold_is_refused_before_anything_runs(make_policy):
    engine = Engine(make_policy(), small(cache_blocks=11))
    with pytest.raises(ValueError, match="row 1 needs 12 blocks"):
        engine.sample([[1], [5] * 15], SAMPLING, group_size=1, seeds=[0, 1])
    require_usable(engine)


def test_an_interrupt_returns_all_blocks(engine, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(engine, 8, patch)
        with pytest.raises(KeyboardInterrupt):
            engine.sample([[1, 2, 3]], SAMPLING, group_size=9, seeds=range(9))
    require_usable(engine)


@pytest.mark.parametrize(
    ("name", "at", "prompts", "message"),
    [
        (
            "model.layers.1.post_attention_layernorm.weight",
            3,
            [[1, 2, 3]],
            r"row 0 at new token 0 .*model.layers.1's",
        ),
        ("model.embed_tokens.weight", 50, [[1], [50]], r"row 1 at new token 0 .*embedding"),
    ],
)
def test_logits_that_are_not_finite_are_named_by_row_token_and_layer(
    make_policy, name, at, prompts, message
):
    policy = make_policy(seed=23)
    engine = Engine(policy, small())
    weight = policy.decoder.get_parameter(name)
    original = weight.detach().clone()
    with torch.no_grad():
        weight[at] = float("nan")
    with pytest.raises(FloatingPointError, match=message):
        engine.sample(prompts, SAMPLING, group_size=1, seeds=range(len(prompts)))
    with torch.no_grad():
        weight.copy_(original)
    require_usable(engine)


def test_full_training_and_too_many_positions_are_refused(make_policy):
    policy = make_policy()
    with pytest.raises(ValueError, match=r"max_positions is 1024.*512"):
        Engine(policy, small(max_positions=1024))
