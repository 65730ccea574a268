"""Choose each arm's learning rate from the records of the sweep, by the rule fixed in advance.

The rule stands in `repro.targets.chosen_rates`; a run that failed counts as an accuracy of 0. The
choice is refused while any arm or seed of the sweep is missing. It is written with all values and
errors behind it, so that it can be made again from the file alone.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from repro.judge.gathering import Evidence, gather
from repro.run.places import runs_folder
from repro.run.select import select
from repro.spec.arm import require
from repro.spec.config import LearningRates, TrainScale
from repro.spec.target import Target
from repro.spec.whole_files import replace_text
from repro.targets import find
from repro.targets.chosen_rates import (
    METRIC,
    RULE,
    SCHEMA,
    TIE_ERRORS,
    choice_file,
    sweep_digest,
)

Values = Mapping[str, Mapping[int, float]]


def main_choose(args: argparse.Namespace) -> int:
    """Carry out `repro choose`; return the exit status."""
    folder, _ = runs_folder(args.runs)
    target = find(args.sweep)
    (tier,) = target.tiers()
    (selection,) = select([target.name], tier=tier.value)
    evidence = gather(selection, folder)
    problems = [why for _, why in evidence.refused]
    require(not problems, f"nothing is chosen: {problems[:1]}")
    scale = selection.source.scales[tier]
    values = with_failures(selection.source, scale, evidence)
    out = Path(args.out) if args.out else choice_file(target.name)
    choice = choose(selection.source, scale, values) | provenance(evidence)
    replace_text(out, json.dumps(choice, indent=1, sort_keys=True) + "\n")
    for key, rate in choice["chosen"].items():
        print(f"{key:<12} {rate:g}  {choice['means'][key]}")  # noqa: T201
    print(f"wrote {out}")  # noqa: T201
    return 0


def with_failures(target: Target, scale: TrainScale, evidence: Evidence) -> Values:
    """Return {arm: {seed: value of the metric}}, 0 where the run failed.

    Raises
    ------
    ValueError
        If a run of the sweep has neither finished nor failed.
    """
    failed = {(path.parent.name, path.name.split(".")[0]) for path, _ in evidence.failed}
    by_arm: dict[str, dict[int, float]] = {}
    recorded = evidence.values(METRIC)
    for arm in target.arms:
        for seed in scale.seeds:
            value = recorded.get(arm.name, {}).get(seed)
            if value is None and (arm.name, f"seed-{seed}") in failed:
                value = 0.0
            require(value is not None, f"nothing is chosen: {arm.name} seed {seed} has no record")
            by_arm.setdefault(arm.name, {})[seed] = float(value or 0.0)
    return by_arm


def choose(target: Target, scale: TrainScale, values: Values) -> dict[str, Any]:
    """Return the choice as its file holds it.

    Parameters
    ----------
    values
        {arm: {seed: value of the metric}}.
    """
    rates = scale.optimizer.learning_rates
    pooled: dict[str, dict[float, list[float]]] = {}
    for arm in target.arms:
        by_rate = pooled.setdefault(LearningRates.key(arm), {})
        by_rate.setdefault(rates.of(arm), []).extend(values[arm.name].values())
    asked = scale.data.development_problems * scale.evaluation.samples
    means, errors = {}, {}
    for key, by_rate in pooled.items():
        means[key] = {rate: fmean(measured) for rate, measured in sorted(by_rate.items())}
        best = max(means[key], key=means[key].__getitem__)
        errors[key] = standard_error(means[key][best], asked * len(by_rate[best]))
    return {
        "schema": SCHEMA,
        "sweep": sweep_digest(scale),
        "rule": RULE,
        "metric": METRIC,
        "chosen": {
            key: smallest_tied(measured, TIE_ERRORS * errors[key])
            for key, measured in means.items()
        },
        "means": {
            key: {f"{rate:g}": round(mean, 3) for rate, mean in measured.items()}
            for key, measured in means.items()
        },
        "errors": {key: round(error, 3) for key, error in errors.items()},
        "values": {
            arm: {str(seed): v for seed, v in measured.items()} for arm, measured in values.items()
        },
    }


def standard_error(percent: float, questions: int) -> float:
    """Return the binomial standard error, in points, of a percentage of `questions`."""
    share = percent / 100
    return 100 * math.sqrt(share * (1 - share) / questions)


def smallest_tied(means: Mapping[float, float], points: float) -> float:
    """Return the smallest rate whose mean lies within `points` of the best."""
    least = max(means.values()) - points
    return min(rate for rate, mean in means.items() if mean >= least)


def provenance(evidence: Evidence) -> dict[str, Any]:
    """Return commits and times of the records behind a choice."""
    records = [record for by_seed in evidence.records.values() for record in by_seed.values()]
    return {
        "commits": sorted({record.commit for record in records}),
        "finished": max((record.finished for record in records), default=None),
        "records": len(records),
    }
