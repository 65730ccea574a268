"""Points of one model measured with one way of training: the policy is built once for all of them.

A point for which the plan says that even one sequence at a time is far too much is not tried. One
that runs out of memory goes on with smaller micro-batches (`repro.rl.step`); where that does not
help, its results have the bytes that it needs, and nothing else.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch

from repro.distributed import ALONE, Ranks
from repro.evidence.environment import probe
from repro.evidence.not_run import needs
from repro.evidence.procedure import Progress, Stopped
from repro.evidence.receipts.device import slowed_shares
from repro.measure.device_state import (
    context_bytes,
    is_out_of_memory,
    needs_by_allocator,
    release,
    require_clean,
    reset_peak,
    retries,
    slowed_us,
)
from repro.measure.rollout_plan import least_of_step, unfitted_step
from repro.measure.step_metrics import (
    PointFacts,
    PointResult,
    Results,
    share_facts,
    step_line,
    way_of,
)
from repro.measure.step_training import parameter_image, timed_step, training_of, warm_up
from repro.models.loading import linears_of
from repro.models.lora import adapter_layers
from repro.models.memory_plan import (
    CONTEXT_BYTES,
    FILLED_SHARE,
    SLOTS_SHARE,
    StepShape,
    fit_slots,
    fit_update,
    plan_memory,
    weight_bytes,
)
from repro.models.other_products import take_products
from repro.models.policy import Policy, trainable_parameters
from repro.models.random_policy import random_policy
from repro.reward.grader import GraderPool
from repro.rl.learner import Learner
from repro.rl.training_state import TrainState, fresh_state
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.rollout.for_policy import CopySampler, FoldedSampler
from repro.rollout.state import Statistics
from repro.spec.config import derive_seed
from repro.spec.step_scale import StepArm, StepPoint, StepScale
from repro.spec.tier import usable_bytes

# The plan is within a twentieth of what a step takes: beyond this share of the budget nothing fits.
_HOPELESS = 1.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bench:
    """What every measurement of a run shares.

    `ranks` measure together; points of one GPU are measured by each for itself. `product_rate` is
    FLOP per second of a large product on the device; None where none was measured. `timed_retries`
    counts, by point and way, how often the allocator retried under the clock. Within a budget
    retries are how a step is made to fit, and are not counted.
    """

    scale: StepScale
    seed: int
    should_stop: Callable[[], bool]
    progress: Progress = lambda text, values: None
    product_rate: float | None = None
    failures: list[str] = dataclasses.field(default_factory=list)
    timed_retries: Counter[str] = dataclasses.field(default_factory=Counter)
    ranks: Ranks = ALONE
    results: Results = dataclasses.field(default_factory=dict)


def step_shape(point: StepPoint, arm: StepArm, scale: StepScale, budget: int) -> StepShape:
    """Return the step that the memory plan chooses where the point leaves it the choice.

    As many rows at once as fit, in waves of equal numbers of rows; then the micro-batches and kept
    blocks. Where not all rows fit, the cache is given back for the update, and taken again. Where a
    policy's own modules multiply, no block is kept.
    """
    step = unfitted_step(point, arm, scale.optimizer)
    if not point.slots and plan_memory(step).peak > budget * SLOTS_SHARE:
        step = dataclasses.replace(step, keep_cache=False)
        waves = -(-point.rows // fit_slots(step, budget).slots)
        step = dataclasses.replace(step, slots=-(-point.rows // waves))
    if point.micro_tokens:
        return step
    keeps = arm.linears == "kernels" and arm.training == "lora"
    return fit_update(step, int(budget * FILLED_SHARE), kept=None if keeps else 0)


def first_wave(point: StepPoint, planned: StepShape) -> tuple[StepPoint, StepShape]:
    """Return what is measured of a step: all of it, or one wave of it (`StepPoint.one_wave`)."""
    if not point.one_wave:
        return point, planned
    prompts = max(
        (
            n
            for n in range(1, point.prompts + 1)
            if point.prompts % n == 0 and n * point.group <= planned.slots
        ),
        default=1,
    )
    slots = min(planned.slots, prompts * point.group)
    return (
        dataclasses.replace(point, prompts=prompts),
        dataclasses.replace(planned, prompts=prompts, slots=slots),
    )


def together(points: Iterable[StepPoint]) -> list[list[StepPoint]]:
    """Return the points in their order, cut where another policy or budget is needed."""
    needed = attrgetter("model", "lora_rank", "budget_bytes")
    return [list(group) for _, group in groupby(points, key=needed)]


def measure_points(bench: Bench, arm: StepArm, points: list[StepPoint]) -> None:
    """Measure some points of one model; raise `Stopped` between two steps."""
    require_clean()
    with _budget(points[0]) as budget:
        left = [point for point in points if not _is_hopeless(bench, arm, point, budget)]
        policy: Policy | None = None
        for point in left:
            if bench.should_stop():
                raise Stopped
            entry = PointResult()
            try:
                policy = policy or build_policy(arm, point, bench.seed)
                _measure(bench, arm, point, policy, budget, entry)
            except Exception as error:
                if isinstance(error, Stopped) or bench.ranks.world > 1:
                    raise  # the others are elsewhere now
                if is_out_of_memory(error):
                    entry = PointResult(out_of_memory=needs_by_allocator(error))
                else:
                    entry = PointResult()
                    _note_failure(bench, arm, point, error)
            bench.results[point.name, way_of(arm)] = entry
            # Outside the handler: its exception holds the frames, and so the tensors, that failed.
            release()


def _note_failure(bench: Bench, arm: StepArm, point: StepPoint, error: Exception) -> None:
    """Record what went wrong with a point; raise where the device itself no longer answers."""
    traceback.print_exception(error)
    message = (str(error).splitlines() or [""])[0]
    bench.failures.append(f"{point.name} {way_of(arm)}: {type(error).__name__}: {message}")
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def _budget(point: StepPoint) -> Iterator[int]:
    """Cap the allocator at the point's budget, the driver's context included; yield the bytes.

    A context grows as kernels are loaded, so a young process leaves room for a full-grown one.
    """
    total = torch.cuda.get_device_properties(0).total_memory
    usable = usable_bytes(total)
    release()
    budget = min(point.budget_bytes or usable, usable)
    context = max(context_bytes(), CONTEXT_BYTES)
    torch.cuda.set_per_process_memory_fraction(min(1.0, (budget - context) / total))
    try:
        yield budget
    finally:
        torch.cuda.set_per_process_memory_fraction(usable / total)
        release()


def build_policy(arm: StepArm, point: StepPoint, seed: int) -> Policy:
    """Return the arm's policy of the point's shape with random weights."""
    full = arm.training == "full"
    policy = random_policy(
        f"qwen2.5-{point.model}",
        weight_format=arm.weight_format,
        lora_rank=0 if full else point.lora_rank or arm.lora_rank,
        seed=derive_seed(seed, "weights"),
        device="cuda",
        full=full,
    )
    take_products(policy.model, arm.linears, policy.compute_dtype)
    return policy


def _is_hopeless(bench: Bench, arm: StepArm, point: StepPoint, budget: int) -> bool:
    """Whether a point needs far too much by the plan, one row at once; if so, note how much."""
    if arm.training == "full" or arm.linears != "kernels":
        return False  # neither has a plan
    least = least_of_step(point, arm, bench.scale.optimizer)
    if least > _HOPELESS * budget:
        sentence = needs(least, budget, "by the plan")
        bench.results[point.name, way_of(arm)] = PointResult(out_of_memory=sentence)
    return least > _HOPELESS * budget


def _measure(
    bench: Bench, arm: StepArm, point: StepPoint, policy: Policy, budget: int, entry: PointResult
) -> None:
    """Warm up and measure the repeats of a point into its entry; raise `Stopped` between two."""
    scale = bench.scale
    several = point.ranks > 1
    share = dataclasses.replace(point, prompts=point.prompts // point.ranks)
    planned = step_shape(share, arm, scale, budget)
    part, shape = first_wave(share, planned)
    waves = share.prompts // part.prompts
    config = engine_config(part, shape)
    full = policy.training == "full"
    for parameter in policy.model.parameters():
        parameter.grad = None  # a step that ran out of memory may have left one
    release()
    reset_peak()  # what an earlier point took is not this one's
    engine, folds = partial(Engine, config=config), arm.rollout_adapter == "folded"
    around: Any = FoldedSampler if folds else CopySampler
    sampler = around(policy, engine) if folds or full else engine(policy)
    made = getattr(sampler, "engine", sampler)
    release()
    ranks = bench.ranks if several else ALONE
    with closing(made), GraderPool(among=ranks if several else None) as pool:
        t = training_of(
            policy,
            sampler,
            pool,
            arm,
            dataclasses.replace(part, prompts=part.prompts * point.ranks),
            scale,
            seed=bench.seed,
            micro_tokens=planned.micro_tokens,
            kept_blocks=planned.kept_blocks,
            ranks=ranks,
        )
        before = parameter_image(policy)
        state = fresh_state(t.learner.run)
        for _ in range(scale.warm_up):
            warm_up(t, state, scale.warm_up_tokens)
        for _ in range(scale.steps):
            if bench.should_stop():
                raise Stopped
            retried, counted, begun = retries(), probe(slowed_us), time.monotonic()
            seconds = timed_step(t, state, waves)
            slowed = slowed_shares(counted, probe(slowed_us), time.monotonic() - begun)
            if not point.budget_bytes and not point.memory_only:
                bench.timed_retries[f"{point.name} {way_of(arm)}"] += retries() - retried
            moved = float((parameter_image(policy) - before).norm())
            facts = _facts(t.learner, made.statistics, state, planned, point, waves)
            if not point.memory_only:
                facts["sampler_trainer_kl"] = seconds["sampler_trainer_kl"]
                facts |= share_facts(planned, seconds, bench.product_rate, point.ranks, full=full)
                bench.progress(step_line(point, way_of(arm), seconds, facts), {})
            entry.repeats.append(seconds | {"slowed": slowed})
            folded = sampler.receipt() if isinstance(sampler, FoldedSampler) else {}
            entry.facts = facts | {"moved": moved, "road": made.road} | folded


def _facts(
    learner: Learner,
    statistics: Statistics,
    state: TrainState,
    planned: StepShape,
    point: StepPoint,
    waves: int,
) -> PointFacts:
    """Return what was really done and what it took, as JSON values."""
    fallbacks, policy = state.facts.get("micro_batch_fallbacks", []), learner.policy
    (generated,) = learner.ranks.add_numbers([statistics.generated_tokens])
    facts = PointFacts(
        micro_tokens=state.facts.get("micro_tokens", planned.micro_tokens),
        kept_blocks=planned.kept_blocks,
        fallbacks=[asked for _, asked, _ in fallbacks],
        slots=planned.slots,
        measured_rows=point.rows // waves,
        ranks=point.ranks,
        keeps_cache=planned.keep_cache,
        decode_steps=waves * statistics.decode_steps,
        generated_tokens=waves * generated,
        preemptions=statistics.preemptions,
        weight_bytes=weight_bytes(planned),
        linears=linears_of(policy.decoder),
        adapter_modules=len(dict(adapter_layers(policy.model))),
        parameters_trainable=sum(p.numel() for p in trainable_parameters(policy).values()),
    )
    if policy.training != "full":
        plan = plan_memory(planned)
        facts["plan"] = dataclasses.asdict(plan) | {"step": point.name}
        facts["predicted_bytes"] = plan.peak
    return facts | _memory()


def _memory() -> dict[str, int]:
    if not torch.cuda.is_available():
        return {"peak_bytes": 0}
    reserved, context = torch.cuda.max_memory_reserved(), context_bytes()
    return {
        "reserved_bytes": reserved,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "context_bytes": context,
        "peak_bytes": reserved + context,
    }


def engine_config(point: StepPoint, planned: StepShape) -> EngineConfig:
    """Return an engine of the planned size whose rows end at their limit alone."""
    return EngineConfig(
        slots=planned.slots,
        max_positions=point.row_tokens,
        max_new_tokens=point.completion_tokens,
        cache_blocks=planned.cache_blocks,
        ignore_end=True,
        keeps_cache=planned.keep_cache,
    )
