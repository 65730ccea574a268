"""What a command line selects: targets, each at a tier, perhaps with other problems or steps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from repro.data.load import DATA_VARIABLE
from repro.spec.config import RunConfig, require
from repro.spec.target import Target, default_tier, plan
from repro.spec.tier import Tier, parse_tier
from repro.spec.variants import on_data, with_human_problems, with_steps
from repro.targets import find, runs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A target at a tier.

    Attributes
    ----------
    target
        What is judged and reported.
    source
        The target whose runs it reads; itself for most.
    """

    target: Target
    source: Target
    tier: Tier

    def plan(
        self, seeds: int | list[int] | None = None, arms: list[str] | None = None
    ) -> list[RunConfig]:
        """Return the runs that the selection needs: of a figure, those of its own arms."""
        if arms is None and self.target is not self.source:
            arms = [arm.name for arm in self.target.arms]
        return plan(self.source, self.tier, seeds, arms)


def select(
    names: list[str],
    *,
    tier: str | None = None,
    data: str | None = None,
    steps: int | None = None,
) -> list[Selection]:
    """Return the selections for target names.

    Where `$REPRO_DATA` names a folder, proxy policies are those pre-trained on its problems, too.

    Parameters
    ----------
    tier
        Name of a tier; None takes, for each target, the highest that runs here without downloads.
    data
        A folder of JSONL, or a data set's name, in place of the targets' own problems.
    steps
        Training steps in place of the targets' own.

    Raises
    ------
    ValueError
        If a name is unknown (the message lists the valid ones) or a target cannot be so changed.
    """
    chosen_tier = None if tier is None else parse_tier(tier)
    selections = []
    for name in dict.fromkeys(names):
        target = find(name)
        source = runs_of(target)
        changed = with_human_problems(source) if os.environ.get(DATA_VARIABLE) else source
        if data is not None:
            changed = on_data(changed, data_source(data))
        if steps is not None:
            changed = with_steps(changed, steps)
        selections.append(
            Selection(
                target=changed if target is source else target,
                source=changed,
                tier=chosen_tier or (default_tier(changed) if changed.scales else Tier.SMOKE),
            )
        )
    return selections


def data_source(named: str) -> str:
    """Return `DataConfig.source` for what a user named: a folder that exists, or a data set."""
    if named.startswith("folder:"):
        named = named.removeprefix("folder:")
    if Path(named).is_dir():
        return f"folder:{Path(named).resolve()}"
    require(
        "/" not in named and not named.startswith("."),
        f"--data {named}: there is no such folder",
    )
    return named


def parse_seeds(text: str | None) -> int | list[int] | None:
    """Return how many seeds (`5`) or which (`0,3,4`) a flag names.

    Raises
    ------
    ValueError
        If the text is neither.
    """
    if text is None:
        return None
    try:
        if "," in text:
            return [int(part) for part in text.split(",") if part.strip()]
        count = int(text)
    except ValueError:
        raise ValueError(f"--seeds {text}: needs a number such as 5, or 0,3,4") from None
    if count < 1:
        raise ValueError(f"--seeds {text}: needs 1 or more")
    return count


def parse_arms(text: str | None) -> list[str] | None:
    """Return the arms that a flag names, None for all."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]
