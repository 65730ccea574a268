"""How long ensembles of runs will take on some devices, from a cost model with measured parameters.

An ensemble's time is linear in what it does: training steps (a part that does not depend on how
many runs there are, and a part per run), and passes of questions (the same two parts). Dynamic
sampling draws further batches; how many is not known in advance, so a step of it counts
`DYNAMIC_STEPS` plain ones. Devices take ensembles from one queue, the longest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from repro.spec.config import KL_PROBLEMS, RunConfig, TrainScale
from repro.spec.target import TogetherCost

# Between 1 (every group informative) and DAPO's 3 batches at most.
DYNAMIC_STEPS = 2.0
# Of a step of reinforcement learning, the part that is not its rollout: 0.31 to 0.40 of the seconds
# that the records of ten ensembles give to rollouts and updates.
UPDATE_SHARE = 0.37
# What a run's part of a step grows by for each further 32 of rank. An ensemble's adapters are
# stacked at its largest: 65 runs of rank 16 to 128 took 432 s to train (d36c27d, beside other work
# on the host), where by the parameters fitted to rank 32 their 120 steps alone take 305.
WIDER_SHARE, _FITTED_RANK = 0.11, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Questions of one run: how many passes over a set, and how many completions in all."""

    passes: int
    completions: int


def asked_of(run: RunConfig) -> Asked:
    """Return what one run is asked, before, during and after training."""
    scale: TrainScale = run.scale
    samples, test = scale.evaluation.samples, scale.data.test_problems
    further = [item.data.test_problems for item in scale.test_sets]
    # At the end: sampled and greedy on the test problems, sampled on the further sets.
    passes = 2 + len(further)
    completions = test * (samples + 1) + sum(further) * samples
    if run.procedure == "evaluate":
        return Asked(passes=passes + 1, completions=completions + test)  # with the working forced
    if scale.evaluation.kl_to_start:
        passes, completions = passes + 1, completions + min(test, KL_PROBLEMS)
    during = scale.steps // scale.evaluation.every + 1 if scale.evaluation.every else 0
    return Asked(
        passes=passes + 1 + during,
        completions=completions + test + during * scale.data.development_problems,
    )


def ensemble_seconds(runs: Sequence[RunConfig], cost: TogetherCost, shared_by: int = 1) -> float:
    """Return the predicted wall time of one ensemble on one device.

    Parameters
    ----------
    shared_by
        Ensembles at once on the device: each takes longer, and all are done sooner.
    """
    if shared_by > 1:
        return ensemble_seconds(runs, cost) * shared_by / cost.side_by_side
    trained = [run for run in runs if run.procedure != "evaluate"]
    seconds = cost.start_seconds
    if trained:
        weights = [_weight(run) for run in trained]
        seconds += trained[0].scale.steps * max(weights) * cost.step_seconds
        work = sum(w * run.scale.steps for w, run in zip(weights, trained, strict=True))
        seconds += _wider(trained) * work * cost.step_seconds_per_run
    asked = [asked_of(run) for run in runs]
    seconds += max(item.passes for item in asked) * cost.pass_seconds
    return seconds + sum(item.completions for item in asked) * cost.question_seconds


def _weight(run: RunConfig) -> float:
    """Return how many plain steps of reinforcement learning a step of a run counts as."""
    if run.procedure == "finetune":
        return UPDATE_SHARE
    return DYNAMIC_STEPS if run.arm.loss.dynamic_sampling else 1.0


def _wider(trained: Sequence[RunConfig]) -> float:
    """Return how many times as long a run's part of a step takes as at rank 32."""
    ranks = [run.arm.lora_rank for run in trained if run.arm.training == "lora"]
    return 1.0 + WIDER_SHARE * max(0.0, max(ranks, default=_FITTED_RANK) / _FITTED_RANK - 1.0)


def unmeasured(runs: Sequence[RunConfig]) -> list[str]:
    """Return what a prediction for these runs takes for granted, and no recorded ensemble shows."""
    sentences = []
    if any(run.procedure == "train" and run.arm.loss.dynamic_sampling for run in runs):
        sentences.append(f"a step with dynamic sampling counts as {DYNAMIC_STEPS:g}")
    return sentences


def queue_seconds(seconds: Sequence[float], devices: int) -> float:
    """Return when the last of a queue's ensembles ends, the longest handed out first."""
    return max(ends_of(seconds, devices))


def ends_of(seconds: Sequence[float], devices: int) -> list[float]:
    """Return when each device ends, the longest of a queue's ensembles handed out first."""
    ends = [0.0] * max(1, devices)
    for value in sorted(seconds, reverse=True):
        heapq.heappush(ends, heapq.heappop(ends) + value)
    return ends


def likely_groups(runs: Sequence[RunConfig], most: int) -> list[tuple[RunConfig, ...]]:
    """Return runs that train the same kind of thing on the same data, in groups of about a size.

    For planning where the policy, whose shape decides how many fit, is not there.
    """
    kinds: dict[tuple[object, ...], list[RunConfig]] = {}
    for run in runs:
        loss = run.arm.loss
        trained = run.arm.training if run.procedure == "train" else "lora"
        kind = (run.scale.checkpoint, run.scale.data, trained, bool(loss.dynamic_sampling))
        kinds.setdefault(kind, []).append(run)
    groups = []
    for alike in kinds.values():
        count = -(-len(alike) // most)
        size = -(-len(alike) // count)
        groups += [tuple(alike[place : place + size]) for place in range(0, len(alike), size)]
    return groups
