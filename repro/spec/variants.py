"""Variants of a target for trying things out: other problems, fewer steps.

Each has a name of its own, so that its records lie beside the original's and none of the original's
expectations is held against it. Arms that the original shares with another target are run as its
own: what they would be shared with is not varied.
"""

from __future__ import annotations

import dataclasses
import re

from repro.spec.config import PretrainScale, TrainScale, require
from repro.spec.target import Target


def on_data(target: Target, source: str) -> Target:
    """Return `target` with the problems of its training scales taken from `source`.

    The result has another name, so that its records lie beside the original's, and none of its
    expectations.

    Parameters
    ----------
    source
        A data set's name or `folder:<path>`, as `DataConfig.source` takes it.
    """
    slug = re.sub(r"\W+", "_", source.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1]).strip("_")
    require(bool(slug), f"data source {source!r} has no name to file its records under")
    scales = {
        tier: dataclasses.replace(
            scale, data=dataclasses.replace(scale.data, source=source, levels=())
        )
        for tier, scale in target.scales.items()
        if isinstance(scale, TrainScale)
    }
    require(bool(scales), f"{target.name} trains on no problems, so it takes no other data")
    return dataclasses.replace(
        target,
        name=f"{target.name}_on_{slug}",
        title=f"{target.title}, on {slug}",
        scales=scales,
        shared={},
        costs={tier: cost for tier, cost in target.costs.items() if tier in scales},
    )


def with_steps(target: Target, steps: int) -> Target:
    """Return `target` with its training cut to `steps`, under another name, for trying things out.

    None of its expectations apply to the result, and its records lie beside the original's.
    """
    require(steps >= 1, f"steps is {steps}; it must be 1 or more")
    scales = {
        tier: dataclasses.replace(scale, steps=steps)
        for tier, scale in target.scales.items()
        if isinstance(scale, TrainScale)
    }
    require(bool(scales), f"{target.name} has no training steps to cut")
    return dataclasses.replace(
        target,
        name=f"{target.name}_in_{steps}_steps",
        title=f"{target.title}, cut to {steps} steps",
        scales=scales,
        shared={},
        costs={tier: cost for tier, cost in target.costs.items() if tier in scales},
    )


def with_human_problems(target: Target) -> Target:
    """Return `target` pre-training on human-written problems too, under its own name.

    A target whose recipes take none is returned as it is.
    """
    scales = {
        tier: dataclasses.replace(scale, human_data=True)
        for tier, scale in target.scales.items()
        if isinstance(scale, PretrainScale) and scale.recipe == "proxy"
    }
    return dataclasses.replace(target, scales={**target.scales, **scales}) if scales else target
