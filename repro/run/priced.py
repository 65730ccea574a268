"""What training would take that nobody has timed: a measured step, scaled to the run's rows.

A price needs a blessed step of the run's own shape and format, of rows that end at lengths of their
own. It is scaled by rows and by tokens, and says so. Larger rollouts are sampled somewhat faster a
token than that, and tests come on top. Where only a step of equal lengths was timed, its few rows
take much longer a token: that price is an upper limit. What nothing like it was timed for has none.

The shortest honest answer to Table 1 is QeRL beside 16-bit LoRA, at as many seeds as decide the
paper's gain by the spread between seeds that trained runs have shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev

from repro.evidence.environment import device_of
from repro.evidence.record import Record
from repro.evidence.store import blessed_records
from repro.evidence.verdicts.statistics import minimum_detectable_effect
from repro.spec.config import RunConfig, TrainScale
from repro.spec.shapes import shape_named, shape_of_checkpoint
from repro.spec.step_scale import StepPoint
from repro.spec.tier import Tier

# Targets with whole steps by the trainer's own iteration, the last two of equal lengths alone.
_STEPS = ("step_lengths", "step_lengths_32b", "scaling", "table3_arms", "table3_full")
# Tokens of a completion of GSM8K by the paper's prompt: 289 at 0.5B, 312 at 1.5B, untrained. Of
# other sets nobody has measured it.
_TOKENS = {"gsm8k": 300}
# Runs that show the spread between seeds, the arms of the paper's headline, and the paper's gain in
# points: those with more seeds and better tests first.
_SPREAD = (
    ("learning_coder_1_5b", "test_late"),
    ("learning_coder_0_5b", "test_late"),
    ("table1_coder_0_5b", "accuracy_lenient"),
)
_HEADLINE = ("bf16_lora", "nvfp4_lora_aqn")
_GAIN = 2.7
_MOST_SEEDS = 1000
# The card of a price where this machine has none that was timed.
_USUAL = "nvidia_h100_80gb_hbm3"


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of training of one run, and the step, its device, and how it was scaled."""

    seconds: float
    basis: str
    at_most: bool = False


def blessed_steps(expected: Path) -> list[Record]:
    """Return the blessed records from which runs are priced."""
    return [record for name in _STEPS for record in blessed_records(expected, Tier.SYSTEMS, name)]


def price(run: RunConfig, steps: Iterable[Record], device: str | None) -> Price | None:
    """Return what a run's training would take by a step of its kind; None where none was timed.

    Steps of spread lengths come first, then those of `device`, then an H100's, then those with the
    run's own noise.
    """
    scale = run.scale
    if run.procedure != "train" or not isinstance(scale, TrainScale):
        return None
    tokens, shape = _TOKENS.get(scale.data.source), shape_of_checkpoint(scale.checkpoint)
    if tokens is None or shape is None:
        return None
    noisy = run.arm.noise is not None
    found = []
    for record in steps:
        if _kind(record) != (run.arm.weight_format, run.arm.training, run.arm.lora_rank):
            continue
        on = device_of(record.environment) or ""
        alike = (record.config["arm"]["noise"] is not None) is noisy
        for point in map(StepPoint.recorded, record.config["scale"]["points"]):
            seconds = record.value(f"step_seconds_{point.name}")
            if point.ranks == 1 and shape_named(point.model) == shape and seconds is not None:
                place = (point.lengths == "spread", on == device, on == _USUAL, alike, on)
                found.append((place, point, seconds))
    if not found:
        return None
    (spread, *_, on), point, seconds = max(found, key=lambda item: item[0])
    rows = scale.prompts_per_rollout * scale.group_size
    rollouts = -(-scale.steps // scale.updates_per_rollout)
    share = rows / point.rows * tokens / point.expected_tokens
    return Price(
        seconds=rollouts * seconds * share,
        basis=f"{'' if spread else 'at most, of equal lengths: '}"
        f"a step of {point.rows} rows of {point.expected_tokens} tokens on {on}, "
        f"scaled to {rollouts} rollouts of {rows} rows of {tokens} tokens; without tests",
        at_most=not spread,
    )


def _kind(record: Record) -> tuple[str, str, int] | None:
    arm = record.config["arm"]
    own = arm.get("linears", "kernels") == "kernels"
    return (arm["weight_format"], arm["training"], arm["lora_rank"]) if own else None


def shortest_answer(prices: dict[str, Price], expected: Path, planned: Sequence[int]) -> str | None:
    """Return how many seeds decide the paper's headline and what they take; None where unknown.

    Prices are by arm, of one run; `planned` seeds are the target's.
    """
    if not all(arm in prices and not prices[arm].at_most for arm in _HEADLINE):
        return None
    pair = sum(prices[arm].seconds for arm in _HEADLINE)
    for target, metric in _SPREAD:
        records = blessed_records(expected, Tier.MINI, target)
        by_arm = [
            {r.seed: v for r in records if r.arm == arm and (v := r.value(metric)) is not None}
            for arm in _HEADLINE
        ]
        seeds = sorted(set(by_arm[0]) & set(by_arm[1]))
        if len(seeds) >= 3:
            deviation = stdev([by_arm[1][seed] - by_arm[0][seed] for seed in seeds])
            needed = 3
            while minimum_detectable_effect(deviation, needed) > _GAIN and needed < _MOST_SEEDS:
                needed += 1
            return (
                f"{' and '.join(_HEADLINE)}: {needed} seeds show {_GAIN} points with probability "
                f"0.8 if seeds differ as in {target} (standard deviation {deviation:.1f} points "
                f"over {len(seeds)}): {needed * pair / 3600:.0f} h; the {len(planned)} planned: "
                f"{len(planned) * pair / 3600:.0f} h"
            )
    return None
