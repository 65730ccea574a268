"""Captured prefills against eager ones at the 7B shape: bits, rounding, and the time of each.

Needs a GPU with room for the 7B shape in 4 bits. With `-s` the times are printed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from repro.models.shapes import random_policy
from repro.rollout.eager import EagerPrefills, Prefills
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.rollout.gpu.graphs import CapturedPrefills
from repro.rollout.scheduler import Group, Row, Segment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("engine_7b"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none"),
]
LENGTHS = {96: [60, 3, 33], 255: [255], 700: [500, 200]}
# A row beside another: its products have more rows, its own arithmetic is the same.
BESIDE = 200


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    policy = random_policy(
        "qwen2.5-7b", weight_format="nvfp4", lora_rank=32, seed=0, device="cuda"
    )  # fmt: skip
    made = Engine(
        policy,
        EngineConfig(slots=8, max_positions=1280, max_new_tokens=8, prefill_graph_tokens=1024),
    )
    yield made
    made.close()


def segments_of(engine: Engine, lengths: list[int], seed: int) -> list[Segment]:
    """Return segments of random tokens, each with blocks of its own, the first from block 1 on."""
    generator = torch.Generator().manual_seed(seed)
    segments, block = [], 1
    for length in lengths:
        drawn = torch.randint(0, len(engine.forward.embedding), (length,), generator=generator)
        group = Group(prompt=(*drawn.tolist(), 0), waiting=0)
        row = Row(index=0, group=group, seed=0, limit=1)
        count = engine.pool.blocks_for(length)
        row.blocks = list(range(block, block + count))
        block += count
        segments.append(Segment(row=row, start=0, end=length))
    return segments


@torch.no_grad()
def filled(engine: Engine, prefills: Prefills, segments: list[Segment]) -> Tensor:
    """Return (2, L, blocks, ...): a cache of zeros after the segments' prefill."""
    caches = [(block.cache.keys, block.cache.values) for block in engine.forward.blocks]
    for pair in caches:
        for cache in pair:
            cache.zero_()
    prefills(segments)
    return torch.stack([torch.stack(kind) for kind in zip(*caches, strict=True)])


class _Eager:
    """Does the work as it comes, padded as for a capture."""

    def run(self, key: object, work: object) -> None:
        """Do the work."""
        assert callable(work)
        work()

    def clear(self) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("tokens", list(LENGTHS))
def test_a_replay_gives_the_bits_of_the_eager_run_on_the_same_padded_tokens(
    engine: Engine, tokens: int
) -> None:
    captured = engine._prefills
    assert isinstance(captured, CapturedPrefills)
    for seed in (0, 1):
        # What other tokens left in the captures' memory must not matter.
        segments = segments_of(engine, LENGTHS[tokens], seed)
        again = filled(engine, captured, segments_of(engine, LENGTHS[tokens], 2))
        caches = filled(engine, captured, segments)
        twice = filled(engine, captured, segments)
        assert torch.equal(caches, twice)
        assert not torch.equal(caches, again)
        # A bucket that is new to an engine of its own is run eagerly, padded, and then captured.
        fresh = CapturedPrefills(
            engine.forward, engine.state, _Eager(), most_tokens=engine.config.prefill_graph_tokens
        )
        assert torch.equal(filled(engine, fresh, segments), caches)
        # Padding has written nothing: every position that is not a token's is still zero.
        written = caches.flatten(4).any(-1).flatten(2).sum(-1)
        assert (written == tokens).all()
        assert not caches[:, :, 0].any()


@pytest.mark.parametrize("tokens", list(LENGTHS))
def test_padding_moves_a_row_no_more_than_another_row_beside_it_does(
    engine: Engine, tokens: int
) -> None:
    segments = segments_of(engine, LENGTHS[tokens], 3)
    beside = segments_of(engine, [*LENGTHS[tokens], BESIDE], 3)
    eagerly = EagerPrefills(engine.forward, engine.state)
    rows = slice(1, 1 + sum(len(segment.row.blocks) for segment in segments))
    alone = filled(engine, eagerly, segments)[:, :, rows].float()
    moved = (filled(engine, eagerly, beside)[:, :, rows].float() - alone).norm()
    filled(engine, engine._prefills, segments)
    padded = (filled(engine, engine._prefills, segments)[:, :, rows].float() - alone).norm()
    print(f"{tokens} tokens: moved by {float(moved / alone.norm()):.2e} beside another row, "
          f"by {float(padded / alone.norm()):.2e} by padding")  # fmt: skip
    assert alone.isfinite().all()
    assert float(padded) <= 2 * float(moved)


@torch.no_grad()
def median_milliseconds(prefills: Prefills, segments: list[Segment]) -> tuple[float, float]:
    """Return the host's and the whole time of a prefill, from an idle device to an idle device."""
    host, whole = [], []
    for _ in range(14):
        torch.cuda.synchronize()
        began = time.perf_counter()
        prefills(segments)
        host.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - began)
    return 1e3 * statistics.median(host[4:]), 1e3 * statistics.median(whole[4:])


def test_a_captured_prefill_of_256_tokens_takes_less_time_than_an_eager_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Uninitialised memory is no longer poisoned, which takes time, nor by captures made before.
    monkeypatch.undo()
    engine._steps.close()
    times = {}
    for tokens in (96, 256, 700):
        segments = segments_of(engine, [tokens], 0)
        for name, prefills in (
            ("eager", EagerPrefills(engine.forward, engine.state)),
            ("captured", engine._prefills),
        ):
            times[name, tokens] = host, whole = median_milliseconds(prefills, segments)
            print(f"{tokens} tokens, {name}: host {host:.2f} ms, whole {whole:.2f} ms")
    assert times["captured", 256][1] < times["eager", 256][1]
    assert times["captured", 256][0] < times["eager", 256][0] / 4
