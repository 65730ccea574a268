"""Prefills padded to buckets, and steps, done again from the same place, in plain torch on a CPU.

`Again` stands for a captured graph: what was done first under a name is done again, whatever the
later call brings, so only what was copied in place can reach it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import repro.rollout.engine as engine_module
import repro.rollout.gpu.graphs as graphs_module
from repro.models.lora import adapter_layers
from repro.models.policy import Policy
from repro.rl.noise import perturbed
from repro.rollout.backend import TorchBackend
from repro.rollout.eager import Prefills, Steps
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.rollout.forward import Forward
from repro.rollout.gpu.graphs import CapturedPrefills, CapturedSteps, Captures
from repro.rollout.ops import TILE, Operations
from repro.rollout.prefill import BUCKETS, exact_shape, numbers_of, padded_shape, tokens_of
from repro.rollout.sampler import RolloutBatch
from repro.rollout.scheduler import Group, Row, Segment
from repro.rollout.state import RowState
from repro.spec.arm import NoiseConfig
from repro.spec.config import SamplingConfig
from tests.repro.rollout import conftest
from tests.repro.rollout.conftest import prompts_of, require_alike

MakePolicy = Callable[..., Policy]
SAMPLING = SamplingConfig(max_new_tokens=24)


@dataclass
class Again:
    """Does the first work of a name again."""

    works: dict[Hashable, Callable[[], object]] = field(default_factory=dict)
    runs: int = 0

    def run(self, key: Hashable, work: Callable[[], object]) -> None:
        """Do `work`, or what was done under `key` first."""
        self.runs += 1
        self.works.setdefault(key, work)()

    def clear(self) -> None:
        """Forget all."""
        self.works.clear()


@dataclass(slots=True)
class PaddedBackend(TorchBackend):
    """Plain torch with padded prefills of up to `most_tokens`, and with steps, done again."""

    again: Again = field(default_factory=Again)
    stepping: Again = field(default_factory=Again)
    most_tokens: int = 1024

    def steps(self, forward: Forward, state: RowState) -> Steps:
        """Return steps that are done again."""
        return CapturedSteps(forward, state, self.stepping)

    def prefills(self, forward: Forward, state: RowState) -> Prefills:
        """Return padded prefills."""
        return CapturedPrefills(forward, state, self.again, most_tokens=self.most_tokens)


def small(**changes: Any) -> EngineConfig:
    return conftest.small(**{"max_new_tokens": 24, "prefill_tokens": 80, "graphs": True} | changes)


def padded_engine(policy: Policy, config: EngineConfig, most_tokens: int = 1024) -> Any:
    """Return an engine with padded prefills, and what does those again."""
    backend = PaddedBackend(
        cache_dtype=policy.compute_dtype,
        operations=Operations(),
        live_noise=True,
        most_tokens=most_tokens,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "backend_for", lambda policy, config: backend)
        return Engine(policy, config), backend.again


def segment(count: int, start: int = 0, blocks: int = 700) -> Segment:
    row = Row(index=0, group=Group(prompt=(5,) * (start + count + 1), waiting=1), seed=0, limit=1)
    row.blocks = list(range(1, 1 + blocks))
    return Segment(row=row, start=start, end=start + count)


def test_a_bucket_has_room_for_all_that_may_be_in_it() -> None:
    draw = random.Random(0)
    for tokens in range(1, BUCKETS[-1] + 1):
        rows = draw.randint(1, min(tokens, 8))
        cuts = [0, *sorted(draw.sample(range(1, tokens), rows - 1)), tokens]
        chunk = [segment(b - a) for a, b in pairwise(cuts)]
        shape = padded_shape(chunk, most_tokens=BUCKETS[-1], slots=8, max_blocks=3)
        assert shape is not None
        assert shape.tokens in BUCKETS
        assert shape.tokens >= tokens
        if tokens > 128:
            assert shape.tokens - tokens < shape.tokens / 3
        padding = shape.tokens - tokens
        assert exact_shape(chunk, 3).tiles + -(-padding // TILE) <= shape.tiles


def test_what_has_too_many_tokens_or_rows_has_no_bucket() -> None:
    room = {"slots": 64, "max_blocks": 3}
    assert padded_shape([segment(257)], most_tokens=256, **room) is None
    assert padded_shape([segment(1)], most_tokens=0, **room) is None
    assert padded_shape([segment(2)] * 32, most_tokens=64, **room) is None
    assert padded_shape([segment(8)] * 8, most_tokens=64, **room) is not None


def test_every_token_is_in_one_tile_and_padding_has_no_slot() -> None:
    chunk = [segment(70, start=5), segment(3), segment(64, start=2)]
    shape = padded_shape(chunk, most_tokens=1024, slots=6, max_blocks=700)
    assert shape is not None
    tokens, new = shape.parts(numbers_of(chunk, shape, 4))
    count = tokens_of(chunk)
    assert (tokens[:count] == 5).all()
    assert (tokens[count:] == 0).all()
    assert (new.slots[:count] >= 4).all()
    assert (new.slots[count:] == -1).all()
    assert new.positions[:70].tolist() == list(range(5, 75))
    assert new.slots[70:73].tolist() == [4, 5, 6]
    seen = torch.zeros(shape.tokens, dtype=torch.int32)
    for row, first, length, position in new.tiles.tolist():
        seen[first : first + length] += 1
        assert length <= TILE
        assert (row < 0) == (first >= count or length == 0)
        if row >= 0:
            assert new.positions[first] == position
            assert new.table[row, :3].tolist() == [1, 2, 3]
    assert (seen == 1).all()
    for part in (tokens, new.positions, new.slots, new.tiles, new.table):
        assert part.storage_offset() % 4 == 0


# The longest goes in two chunks, of which the first is beyond the buckets.
LENGTHS = [9, 1, 23, 150, 40]
LIMITS = [1 + (7 * i) % 24 for i in range(10)]


@pytest.mark.parametrize(
    ("changes", "lengths", "limits"),
    [
        ({}, LENGTHS, LIMITS),
        ({"share_prompts": False}, LENGTHS, LIMITS),
        ({"block_size": 7, "slots": 7}, LENGTHS, LIMITS),
        ({"cache_blocks": 15}, [11, 6, 14, 9, 20], [24] * 10),
    ],
    ids=["shared", "apart", "blocks_of_7", "preempted"],
)
def test_padded_prefills_draw_the_tokens_that_eager_ones_draw(
    make_policy: MakePolicy, changes: dict[str, Any], lengths: list[int], limits: list[int]
) -> None:
    policy, prompts = make_policy("qwen3", "nvfp4"), prompts_of(lengths)
    ask: dict[str, Any] = {"group_size": 2, "seeds": range(10), "limits": limits}
    eager = Engine(policy, small(**changes))
    expected = eager.sample(prompts, SAMPLING, **ask)
    engine, again = padded_engine(policy, small(**changes), most_tokens=64)
    batch = engine.sample(prompts, SAMPLING, **ask)
    require_alike(batch, expected)
    statistics = engine.statistics
    assert statistics.prefill_tokens == eager.statistics.prefill_tokens
    assert statistics.preemptions == eager.statistics.preemptions
    assert (statistics.preemptions > 0) == ("cache_blocks" in changes)
    assert statistics.padding_tokens > 0
    assert eager.statistics.padding_tokens == 0
    assert engine.sample(prompts, SAMPLING, **ask) == batch
    assert again.runs >= 2 * len(again.works)
    assert engine.pool.free == engine.pool.capacity


def test_padding_writes_to_no_block_and_its_nan_reaches_no_row(make_policy: MakePolicy) -> None:
    policy = make_policy(seed=41)
    prompts, ask = prompts_of([9, 30]), {"group_size": 1, "seeds": [0, 1], "limits": [1, 1]}
    caches: list[tuple[Tensor, Tensor]] = []
    batches = []
    # Padding is of token 0, and the prompts hold none.
    embedding = policy.decoder.get_parameter("model.embed_tokens.weight")
    original = embedding.detach().clone()
    for padded in (False, True):
        engine = Engine(policy, small())
        if padded:
            engine, again = padded_engine(policy, small())
            with torch.no_grad():
                embedding[0] = float("nan")
        batches.append(engine.sample(prompts, SAMPLING, **ask))  # type: ignore[arg-type]
        caches.append((engine._keys[:, 1:], engine._values[:, 1:]))
    with torch.no_grad():
        embedding.copy_(original)
    assert again.runs == 1
    require_alike(batches[1], batches[0])
    for eager, captured in zip(*caches, strict=True):
        assert torch.equal(eager == 0, captured == 0)
        torch.testing.assert_close(captured, eager)


def test_noise_and_an_updated_adapter_are_seen_by_prefills_done_again(
    make_policy: MakePolicy,
) -> None:
    policy = make_policy("qwen2", "nf4", seed=43)
    prompts, ask = prompts_of([12, 33]), {"group_size": 2, "seeds": range(4)}
    eager = Engine(policy, small())
    engine, again = padded_engine(policy, small())

    def both() -> RolloutBatch:
        eager.refresh()
        engine.refresh()
        batch: RolloutBatch = engine.sample(prompts, SAMPLING, **ask)
        require_alike(batch, eager.sample(prompts, SAMPLING, **ask))  # type: ignore[arg-type]
        return batch

    before = both()
    captured = set(again.works)
    noise = NoiseConfig(sigma_start=0.3, sigma_end=0.2)
    with perturbed(policy, noise, seed=1, step=5, total_steps=10):
        assert both() != before
    assert both() == before
    for _, layer in adapter_layers(policy.model):
        with torch.no_grad():
            layer.adapter()[1].mul_(-3.0)
    assert both() != before
    assert set(again.works) == captured


def test_a_nan_prompt_is_named_and_leaves_a_padded_engine_usable(make_policy: MakePolicy) -> None:
    policy = make_policy(seed=47)
    engine, _ = padded_engine(policy, small(share_prompts=False))
    embedding = policy.decoder.get_parameter("model.embed_tokens.weight")
    original = embedding.detach().clone()
    prompts = [[1, 2, 3], [4, 50, 6]]
    ask: dict[str, Any] = {"group_size": 1, "seeds": [0, 1], "limits": [1, 1]}
    before = engine.sample(prompts, SAMPLING, **ask)
    with torch.no_grad():
        embedding[50] = float("nan")
    with pytest.raises(FloatingPointError, match=r"logits of row 1 at new token 0 are not finite"):
        engine.sample(prompts, SAMPLING, **ask)
    with torch.no_grad():
        embedding.copy_(original)
    assert engine.pool.free == engine.pool.capacity
    assert engine.sample(prompts, SAMPLING, **ask) == before


def test_captures_used_least_recently_are_dropped_beyond_the_budget_and_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    @dataclass
    class Graph:
        name: str

        def replay(self) -> None:
            done.append(f"{self.name} again")

    def capture(self: Captures, work: Callable[[], object]) -> Any:
        name = work()
        done.append(str(name))
        return graphs_module._Capture(graph=Graph(str(name)), nbytes=40)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs_module, "_capture_stream", lambda device: None)
    monkeypatch.setattr(Captures, "_capture", capture)
    captures = Captures(torch.device("cpu"), 100)
    for name in ("a", "b", "a", "c", "a", "b", "b"):
        captures.run(name, partial(str, name))
        assert captures.nbytes <= 100
    # b was the one used least recently when c came.
    assert done == ["a", "b", "a again", "c", "a again", "b", "b again"]
    captures.clear()
    assert captures.nbytes == 0


def test_a_negative_limit_of_captured_prefills_is_refused() -> None:
    with pytest.raises(ValueError, match="prefill_graph_tokens is -1; it must be 0 or more"):
        EngineConfig(prefill_graph_tokens=-1)
