"""Variants of a target for trying things out: fewer steps, fewer problems, any other setting.

Each has a name of its own, so that its records lie beside the original's, and neither the
original's expectations nor the paper's numbers are held against it. Arms that the original shares
with another target are run as its own: what they would be shared with is not varied.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from repro.spec.arm import Arm
from repro.spec.checks import all_of, require
from repro.spec.config import DataConfig, TrainScale, digest_of
from repro.spec.settings import flattened, parsed_json, table_of, with_settings
from repro.spec.target import Target
from repro.spec.tier import Tier

# Of the settings in a variant's name; their digest follows.
_NAME_CHARACTERS = 40
# Longest name of a variant, which its records are filed under.
_LONGEST_NAME = 48
_OWN = "Your run of "


def with_steps(target: Target, steps: int) -> Target:
    """Return `target` with its training cut to `steps`, and its warm-up to no more than these."""
    scales = {
        tier: in_steps(scale, steps)
        for tier, scale in target.scales.items()
        if isinstance(scale, TrainScale)
    }
    require(bool(scales), f"{target.name} has no training steps to cut")
    return _variant(target, f"in_{steps}_steps", f"cut to {steps} steps", scales)


def in_steps(scale: TrainScale, steps: int) -> TrainScale:
    """Return a scale cut to `steps`, and its warm-up to no more than these."""
    warm_up = min(scale.optimizer.warmup_steps, steps)
    optimizer = dataclasses.replace(scale.optimizer, warmup_steps=warm_up)
    return dataclasses.replace(scale, steps=steps, optimizer=optimizer)


def with_overrides(
    target: Target, tier: Tier, settings: Mapping[str, Any], limit: int | None = None
) -> Target:
    """Return `target` at one tier with settings of its scale or its arms replaced.

    Raises `ValueError` as `with_settings` does, or if the target cannot be so changed.

    Parameters
    ----------
    settings
        Nested fields of the scale, beside them fields of the arms under `arm`: those of an arm's
        noise change the arms that have any.
    limit
        Most problems asked of each test set and of the development split.

    Returns
    -------
    Target
        The target itself where nothing changes.
    """
    require(tier in target.scales, f"{target.name} has no scale at the {tier.value} tier to change")
    own = {key: value for key, value in settings.items() if key not in ("arm", "scale")}
    before = target.scales[tier]
    known = {item.name for item in dataclasses.fields(Arm)}
    for key in own:
        require(
            hasattr(before, key) or key not in known,
            f"there is no setting {key!r} of the scale; arm.{key} is the arms' own: "
            f"--set arm.{key}=...",
        )
    of_scale, of_arms = (table_of(settings.get(name, {}), name) for name in ("scale", "arm"))
    scale, *changed = all_of(
        lambda: with_settings(before, own | of_scale),
        *(partial(_changed, arm, of_arms) for arm in target.arms),
    )
    arms = tuple(changed)
    old, new = (flattened(json.loads(json.dumps(dataclasses.asdict(of)))) for of in (before, scale))
    words = {key: value for key, value in new.items() if key not in old or old[key] != value}
    # None is for scales that only ask; a change to none would train nothing, run by run.
    require("steps" not in words or scale.steps >= 1, "steps is 0; it must be 1 or more")
    if arms != target.arms:
        words |= flattened(json.loads(json.dumps(of_arms)), "arm")
    if limit is not None:
        scale, words = limited(scale, limit), words | {"limit": limit}
    if scale == before and arms == target.arms:
        return target
    # Of a text of several lines, such as a prompt template, the first stands for it.
    text = ", ".join(f"{key} {str(value).partition(chr(10))[0]}" for key, value in words.items())
    short = slug_of("_".join(f"{key}_{str(value).rsplit('/')[-1]}" for key, value in words.items()))
    suffix = f"with_{short[:_NAME_CHARACTERS].strip('_')}_{digest_of(words)[:6]}"
    return _variant(target, suffix, f"with {text}", {tier: scale}, arms)


def limited(scale: Any, limit: int) -> Any:
    """Return a scale that asks at most `limit` problems of each set, and holds out as few."""
    require(isinstance(scale, TrainScale), "a limit needs a target that asks problems")

    def fewer(data: DataConfig) -> DataConfig:
        held_out = min(limit, data.development_problems)
        test = min(limit, data.test_problems or limit)
        return dataclasses.replace(data, test_problems=test, development_problems=held_out)

    sets = tuple(dataclasses.replace(item, data=fewer(item.data)) for item in scale.test_sets)
    return dataclasses.replace(scale, data=fewer(scale.data), test_sets=sets)


def _changed(arm: Arm, settings: Mapping[str, Any]) -> Arm:
    """Return an arm with settings replaced, those of noise only where it has noise."""
    own = dict(settings)
    if isinstance(parsed_json(own.get("noise")), Mapping) and arm.noise is None:
        own.pop("noise")
    return with_settings(arm, own, "arm.")


def slug_of(text: str) -> str:
    """Return a text as letters, digits and underscores."""
    return re.sub(r"[\W_]+", "_", text).strip("_")


def shortened(name: str) -> str:
    """Return a name, or the beginning of a long one with its digest."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_NAME_CHARACTERS].strip('_')}_{digest_of(name)[:6]}"


def _variant(
    target: Target,
    suffix: str,
    words: str,
    scales: Mapping[Tier, Any],
    arms: tuple[Arm, ...] | None = None,
) -> Target:
    """Return `target` under another name with other scales, and no number to be held against it."""
    own = target.title.startswith(_OWN)  # a variant already
    return dataclasses.replace(
        target,
        name=shortened(f"{target.name}_{suffix}"),
        title=f"{target.title if own else _OWN + target.name}, {words}",
        statement=f"{target.statement if own else 'your run'}, {words}",
        arms=target.arms if arms is None else arms,
        scales=scales,
        shared={},
        needs={tier: needs for tier, needs in target.needs.items() if tier in scales},
        paper_file="",
        paper_column="",
    )


def reading(target: Target, changed: Target) -> Target:
    """Return a target that reads another's runs as one that reads the variant `changed` of it."""
    suffix = changed.name.removeprefix(target.runs.name)
    return dataclasses.replace(
        target, name=f"{target.name}{suffix}", records_of=changed, paper_file="", paper_column=""
    )
