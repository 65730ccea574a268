"""Tokens per second of a rollout on real shapes with random weights: Tables 5 to 9, Fig. 11.

The seeds of an arm are carried out together, for they are repeats: each shape is loaded once, a
batch's steps are captured once, and every seed then times it under device events, with prompts and
random numbers of its own. Weights are the same for all (their values do not matter to time). The
protocol: prompts of random tokens, the adapter on (A and B random), every row to its limit, no
prompt shared, prefill counted.

    tokens_per_second_<point>_<batch>      new tokens of all rows over the whole rollout's time
    prefill_seconds_<point>_<batch>        the rollout of one token
    step_seconds_<point>_<batch>           (rollout - prefill) / (new tokens - 1)
    host_share_<point>                     percent of a step at the smallest batch in which the
                                           device waits for the host

A point with windows is not rolled out whole (`rollout_cells`); vLLM's engine has no host share.
An adapter is folded in once, before its engine is made, and for good: nothing is trained.
`facts["folded"]` has the seconds of that, what of the adapter is rounded away, and how far that
moves the sampler from the policy with its adapter apart: `sampler_trainer_kl`, nats per token.

Each model is loaded into a device whose memory is free. A batch that does not fit has no metrics;
`facts["not_run"]` says so, by the plan before (`repro.measure.rollout_plan`) or by the allocator
after; the other batches are measured all the same. `facts["timed_retries"]` counts how often the
allocator retried under the clock. Random weights draw random tokens, so no end token ends a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch

from kernels.timing import copy_rate, matmul_rate, seconds_of
from repro.evidence.procedure import Measured, RunContext
from repro.measure.device_state import is_out_of_memory, needs_by_allocator, release, require_clean
from repro.measure.rollout_cells import Repeat, random_prompts, time_batch, time_host_share
from repro.measure.rollout_plan import cell_of, not_fitting
from repro.measure.vllm_rollout import VllmEngine
from repro.models.divergence import compared
from repro.models.loading import linears_of
from repro.models.lora import adapter_layers, fold_adapter, folding_loss
from repro.models.policy import Policy, device_bytes
from repro.models.random_policy import random_policy
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig, Products, blocks_for
from repro.rollout.step_timing import fill_cache
from repro.spec.config import RunConfig, derive_seed
from repro.spec.facts import Facts, Timing
from repro.spec.throughput_scale import ThroughputPoint, ThroughputScale

_KL_TOKENS = 256


def measure_seeds(runs: Sequence[RunConfig], context: RunContext) -> list[Measured]:
    """Sample every point and batch of the scale with the arm's policy, once per seed.

    The runs are of one arm and differ by seed; each has a `Measured`.
    """
    arm = _ArmAtHand(runs, context)
    scale: ThroughputScale = arm.run.scale
    for shape, points in groupby(scale.points, key=lambda point: point.shape):
        left = [point for point in points if arm.fitting(point)]
        if left:
            require_clean()
            arm.measure_shape(shape, left)
            release()
    arm.name_points_left_out()
    rates = copy_rate(), matmul_rate()
    return [
        Measured(metrics=repeat.metrics, facts=arm.facts | _receipt(repeat, *rates))
        for repeat in arm.repeats
    ]


class _ArmAtHand:
    """An arm, by the first of its runs, what it has measured so far, and what not, with why."""

    def __init__(self, runs: Sequence[RunConfig], context: RunContext) -> None:
        self.run = run = runs[0]
        self.context = context
        self.products: Literal["own", "bitsandbytes", "vllm"] = run.scale.products(run.arm.name)
        self.not_run = not_fitting(run.scale, run.arm, device_bytes(torch.device("cuda")))
        self.repeats = [Repeat(seed=own.seed) for own in runs]
        self.facts = Facts(
            linears={},
            adapter_modules=0,
            products=self.products,
            repeats_together=len(runs),
            not_run=self.not_run,
            timed_retries={},
        )

    @contextmanager
    def fit_or_left_out(self, *names: str) -> Iterator[None]:
        """Note parts that run out of memory, and continue."""
        sentence = None
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            sentence = needs_by_allocator(error)
        # Outside the handler: its exception holds the frames, and so the tensors, that failed.
        if sentence is not None:
            self.not_run.update(dict.fromkeys(names, sentence))
            release()

    def fitting(self, point: ThroughputPoint) -> list[int]:
        """Return the batches of a point that are not known not to fit."""
        return [batch for batch in point.batches if cell_of(point, batch) not in self.not_run]

    def name_points_left_out(self) -> None:
        """Say of points without a batch that fits why they were not run."""
        for point in self.run.scale.points:
            if not self.fitting(point):
                self.not_run[point.name] = self.not_run[cell_of(point, min(point.batches))]

    def measure_shape(self, shape: str, points: Sequence[ThroughputPoint]) -> None:
        """Load a shape and measure those of its points that may fit."""
        every = self.run.scale.points
        policy: Policy | None = None
        with self.fit_or_left_out(
            *(cell_of(p, batch) for p in points for batch in self.fitting(p))
        ):
            made = _policy(self.run, shape)
            _count(made, self.facts)
            if self.run.arm.rollout_adapter == "folded":
                self.facts.setdefault("folded", {})[shape] = fold(made)
                release()
                made = replace(made, training="none")  # there is no adapter to multiply by
            policy = made
        if policy is None:
            return
        for point in points:
            numbers = {"step": 1.0 + every.index(point), "steps": float(len(every))}
            self.context.progress(f"{point.name}: {self.run.arm.label}", numbers)
            self._point(point, policy)

    def _point(self, point: ThroughputPoint, policy: Policy) -> None:
        """Measure a point's batches that fit, on an engine for the largest of them."""
        repeats, batches = self.repeats, self.fitting(point)
        engine: Any = None
        while batches and engine is None:
            with self.fit_or_left_out(cell_of(point, max(batches))):
                if self.products == "vllm":
                    rounds = self.run.arm.name in self.run.scale.fp8
                    options = {"quantization": "fp8"} if rounds else {}
                    engine = VllmEngine(policy, point, batches, **options)
                    self.facts["vllm"] = engine.receipt
                else:
                    engine = _engine(point, max(batches), policy, self.products)
                    self.facts["road"] = engine.road
                if point.windows:
                    fill_cache(engine, repeats[0].seed)
            batches = self.fitting(point)
        if engine is None:
            return
        for batch in batches:
            cell = cell_of(point, batch)
            with self.fit_or_left_out(cell):
                also_whole = (self.run.arm.name, point.name, batch) in self.run.scale.whole
                count = time_batch(
                    point, batch, engine, repeats, self.context.should_stop, also_whole=also_whole
                )
                if count:
                    self.not_run[cell] = f"the allocator retried {count} times under the clock"
            if cell in self.not_run:
                self._forget(cell)
            else:
                self.facts["timed_retries"][cell] = 0
        smallest = cell_of(point, min(point.batches))
        stepwise = self.products != "vllm" and not point.windows and point.new_tokens > 1
        if stepwise and smallest in self.facts["timed_retries"]:
            with self.fit_or_left_out(f"host_share_{point.name}"):
                time_host_share(point, engine, repeats)
        engine.close()
        release()

    def _forget(self, cell: str) -> None:
        """Take a batch's metrics out of what was measured."""
        for repeat in self.repeats:
            for name in [name for name in repeat.metrics if name.endswith(f"_{cell}")]:
                del repeat.metrics[name]


@torch.no_grad()
def fold(policy: Policy) -> dict[str, float]:
    """Fold a policy's adapter in for good, and return the facts of that.

    `sampler_trainer_kl` is KL(folded || apart) of random tokens' successors, nats per token. Of the
    policy before the fold only hidden states are kept, so that no second copy of weights is needed.
    """
    decoder: Any = policy.decoder
    tokens = random_prompts(1, _KL_TOKENS, decoder.config.vocab_size, 0)
    ids = torch.tensor(tokens, device=policy.device)
    apart = decoder.model(input_ids=ids, use_cache=False)[0][0]
    lost = folding_loss(policy.model)
    seconds = seconds_of(partial(fold_adapter, policy.model), policy.device)
    folded = decoder.model(input_ids=ids, use_cache=False)[0][0]
    kl = float(compared(policy, folded, policy, apart)[0].mean())
    return {"seconds": seconds, "update_lost": lost, "sampler_trainer_kl": kl}


def _policy(run: RunConfig, shape: str) -> Policy:
    return random_policy(
        shape,
        weight_format=run.arm.weight_format,
        lora_rank=run.arm.lora_rank if run.arm.training == "lora" else 0,
        lora_alpha=run.arm.lora_alpha,
        seed=derive_seed("throughput", shape),
        device="cuda",
    )


def _receipt(repeat: Repeat, copied: float, multiplied: float) -> dict[str, Any]:
    """Return what was timed beside the device's rates, bytes copied and FLOP made per second."""
    if not repeat.seconds:
        return {}
    return Timing(
        seconds=repeat.seconds,
        bytes=repeat.nbytes,
        flops=repeat.flops,
        bytes_per_second=copied,
        flops_per_second=multiplied,
    ).fact()


def _engine(point: ThroughputPoint, slots: int, policy: Policy, products: Products) -> Engine:
    """Return an engine with room for all rows at full length: rows that wait would be timed, too.

    Its layout of dense weights, A's rows below, frees memory that captures may need.
    """
    config = EngineConfig(
        slots=slots,
        max_positions=point.prompt_tokens + point.new_tokens,
        max_new_tokens=point.new_tokens,
        ignore_end=True,
        products=products,
    )
    engine = Engine(policy, replace(config, cache_blocks=blocks_for(slots, config)))
    release()
    return engine


def _count(policy: Policy, facts: Facts) -> None:
    """Count the model's linear layers, and those that an adapter changes: B is not zero."""
    for kind, count in linears_of(policy.decoder).items():
        facts["linears"][kind] = facts["linears"].get(kind, 0) + count
    adapters = [layer.adapter() for _, layer in adapter_layers(policy.model)]
    facts["adapter_modules"] += sum(bool(B.any()) for _, B, _ in adapters)
