"""Time the engine's decode step and its prefill; `test_lengths` times whole steps.

On a GPU: four blocks of Qwen2.5-7B's shape with random NVFP4 weights and an adapter of rank 32;
`ratio_to_bf16` is the time of the same with bfloat16 weights, in the same session, over it. On a
CPU a tiny shape in plain PyTorch, and the rows say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from benchmarks.device_time import CLOCK, Limits, device_type, record_rounds
from kernels import timing
from repro.models.random_policy import random_policy, shape_config
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.rollout.step_timing import fill_cache, fill_rows, time_steps
from repro.spec.arm import WeightFormat
from repro.spec.config import SamplingConfig

_ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is timed: a shape and the lengths of its work."""

    name: str
    shape: dict[str, Any]
    dtype: str
    rank: int
    width: int
    position: int
    prompts: int
    prompt_tokens: int
    new_tokens: int


LARGE = Size(
    name="7b-4-layers-nvfp4-kernel-cuda",
    shape=shape_config("qwen2.5-7b") | {"num_hidden_layers": 4},
    dtype="bfloat16",
    rank=32,
    width=64,
    position=1024,
    prompts=8,
    prompt_tokens=512,
    new_tokens=64,
)
TINY = Size(
    name="tiny-2-layers-nvfp4-reference-cpu",
    shape=shape_config("qwen2.5-0.5b")
    | {
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    dtype="float32",
    rank=4,
    width=4,
    position=24,
    prompts=2,
    prompt_tokens=16,
    new_tokens=8,
)
SIZE = LARGE if device_type() == "cuda" else TINY
ROW = pytest.mark.parametrize("size", [pytest.param(SIZE, id=SIZE.name)])
TIMED = pytest.mark.benchmark(timer=CLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """An engine, and what is timed on it."""

    engine: Engine
    size: Size

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return int(self.size.shape["vocab_size"])

    def prompts(self) -> list[list[int]]:
        """Return random prompts."""
        shape = (self.size.prompts, self.size.prompt_tokens)
        generator = torch.Generator().manual_seed(0)
        drawn: list[list[int]] = torch.randint(
            0, self.vocabulary, shape, generator=generator
        ).tolist()
        return drawn


def build(size: Size, weight_format: WeightFormat, device: str) -> Timed:
    """Return a policy with random weights, ready to be sampled from."""
    policy = random_policy(
        size.shape,
        weight_format=weight_format,
        lora_rank=size.rank,
        compute_dtype=size.dtype,
        seed=0,
        device=device,
    )
    config = EngineConfig(
        slots=size.width,
        max_positions=size.position + 2 * size.new_tokens,
        max_new_tokens=size.new_tokens,
        ignore_end=True,
    )
    engine = Engine(policy, config)
    fill_cache(engine, 0)
    return Timed(engine=engine, size=size)


@pytest.fixture(scope="module")
def quantized(device: str) -> Iterator[Timed]:
    """Return what the rows time."""
    timed = build(SIZE, "nvfp4", device)
    yield timed
    timed.engine.close()


@pytest.fixture(scope="module")
def sixteen_bits(device: str) -> Iterator[Timed | None]:
    """Return the same with 16-bit weights, which the rows are compared with on a GPU."""
    timed = build(SIZE, "bf16", device) if device == "cuda" else None
    yield timed
    if timed is not None:
        timed.engine.close()


def decode_step(timed: Timed) -> float:
    """Return the seconds of a step of `width` rows."""
    fill_rows(timed.engine, timed.size.width, 0)
    count = timed.size.new_tokens // 2
    return time_steps(timed.engine, timed.size.width, timed.size.position, count)


def prefill(timed: Timed) -> float:
    """Return the seconds of a rollout of one new token per prompt: the prefill and one step."""

    def work() -> None:
        timed.engine.sample(
            timed.prompts(),
            SamplingConfig(max_new_tokens=1),
            group_size=1,
            seeds=range(timed.size.prompts),
        )

    return timing.seconds_of(work, timed.engine.device)


def _record(
    benchmark: Any,
    device: str,
    once: Callable[[Timed], float],
    quantized: Timed,
    sixteen_bits: Timed | None,
) -> float:
    median = record_rounds(benchmark, lambda: once(quantized), rounds=_ROUNDS, device=device)
    if sixteen_bits is not None:
        once(sixteen_bits)
        plain = sorted(once(sixteen_bits) for _ in range(_ROUNDS))[_ROUNDS // 2]
        benchmark.extra_info["ratio_to_bf16"] = plain / median
    return median


def _work(timed: Timed, tokens: int) -> tuple[float, float]:
    """Return the bytes of all weights that a pass reads and the FLOP of its `tokens` tokens."""
    shape = timed.size.shape
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    keys = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    block = hidden * (2 * hidden + 2 * keys + 3 * shape["intermediate_size"])
    head = timed.vocabulary * hidden
    return layers * block * 9 / 16 + 2 * head, 2.0 * tokens * layers * block


@TIMED
@ROW
def test_decode_step(
    size: Size,
    device: str,
    limits: Limits | None,
    quantized: Timed,
    sixteen_bits: Timed | None,
    benchmark: Any,
) -> None:
    median = _record(benchmark, device, decode_step, quantized, sixteen_bits)
    if limits is not None:
        nbytes, flops = _work(quantized, size.width)
        shape = size.shape
        head_dim = shape["hidden_size"] // shape["num_attention_heads"]
        cached = size.width * size.position * shape["num_key_value_heads"] * head_dim
        nbytes += 4 * shape["num_hidden_layers"] * cached
        flops += 2.0 * size.width * quantized.vocabulary * shape["hidden_size"]
        benchmark.extra_info |= limits.shares(median, nbytes, flops)


@TIMED
@ROW
def test_prefill(
    size: Size,
    device: str,
    limits: Limits | None,
    quantized: Timed,
    sixteen_bits: Timed | None,
    benchmark: Any,
) -> None:
    median = _record(benchmark, device, prefill, quantized, sixteen_bits)
    if limits is not None:
        work = _work(quantized, size.prompts * size.prompt_tokens)
        benchmark.extra_info |= limits.shares(median, *work)
