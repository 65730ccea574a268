"""What a command line selects: targets, each at a tier, perhaps with other settings or steps."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from repro.spec.checks import Bound, all_of, check_value, in_digits, require, tried
from repro.spec.config import RunConfig
from repro.spec.hub import gguf_copy, is_hub_name, require_model
from repro.spec.settings import merged, parse_settings, read_settings
from repro.spec.target import Target, default_tier, plan
from repro.spec.tier import Tier, parse_tier
from repro.spec.variants import reading, with_overrides, with_steps
from repro.targets import find
from repro.targets.paper_tier import REVISIONS

# Flags that change the targets; they are refused where stored records are read.
CHANGING = ("steps", "model", "revision", "config", "set", "limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A target, judged and reported, at a tier."""

    target: Target
    tier: Tier

    @property
    def source(self) -> Target:
        """The target whose runs are read, mostly the same."""
        return self.target.runs

    def plan(
        self, seeds: int | list[int] | None = None, arms: list[str] | None = None
    ) -> list[RunConfig]:
        """Return the runs that the selection needs: of a figure, those of its own arms."""
        return plan(self.target, self.tier, seeds, arms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a command line changes of the targets that it names.

    `settings` are nested values in place of those of the scale and, under `arm`, of the arms; of
    each test set at most `limit` problems are asked.
    """

    steps: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None


def _changes(args: argparse.Namespace) -> tuple[Changes, list[str]]:
    """Return the changes that can be read, and the errors of the others.

    `--config` comes first, then what the line names.
    """
    given = vars(args)
    file, model = given.get("config"), given.get("model")
    (settings, checkpoint, changed, steps, limit), refused = tried(
        lambda: read_settings(Path(file)) if file else {},
        lambda: None if model is None else model_source(model),
        lambda: parse_settings(given.get("set") or []),
        partial(_count, args, "steps"),
        partial(_count, args, "limit"),
    )
    named = {
        "checkpoint": checkpoint,
        "revision": given.get("revision") or (checkpoint and revision_of(checkpoint)),
    }
    named = {key: value for key, value in named.items() if value is not None}
    settings = merged(merged(settings or {}, named), changed or {})
    return Changes(steps=steps, settings=settings, limit=limit), refused


def selections_of(args: argparse.Namespace) -> list[Selection]:
    """Return the selections that a command line names; see `select`.

    All errors of the command line are reported together.
    """
    changes, refused = _changes(args)
    seeds, arms = getattr(args, "seeds", None), getattr(args, "arms", None)
    (tier, arms, *_), more = tried(
        lambda: args.tier and parse_tier(args.tier),
        partial(parse_arms, arms),
        partial(parse_seeds, seeds),
        partial(_count, args, "workers"),
        partial(_count, args, "threads"),
    )
    names = list(dict.fromkeys(args.targets))
    asked: list[Callable[[], Any]] = [partial(_require_arms, name, arms or []) for name in names]
    if tier is not None or not args.tier:
        asked = [partial(_selected, name, tier, changes) for name in names] + asked
    selections, others = tried(*asked)
    refused += [*more, *others]
    require(not refused, "; ".join(dict.fromkeys(refused)))
    return selections[: len(names)]


def _require_arms(name: str, arms: Sequence[str]) -> None:
    """Raise `ValueError` naming each arm that the runs of a target do not have."""
    runs = find(name).runs
    all_of(*(partial(runs.arm, arm) for arm in arms))


def check_line(args: argparse.Namespace) -> str:
    """Return the `check` command for the runs of a `run` command."""
    words = ["python", "-m", "repro", "check", *args.targets]
    for name in ("tier", *CHANGING, "runs", "expected"):
        given = getattr(args, name, None)
        for value in given if isinstance(given, list) else [] if given is None else [given]:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def select(
    names: Sequence[str], *, tier: str | None = None, changes: Changes | None = None
) -> list[Selection]:
    """Return the selections for target names, at a tier or each at the smallest that runs here.

    Raises `ValueError` for an unknown name, with the nearest one, and for a target that cannot be
    changed in this way.
    """
    chosen_tier = None if tier is None else parse_tier(tier)
    return [_selected(name, chosen_tier, changes or Changes()) for name in dict.fromkeys(names)]


def _selected(name: str, tier: Tier | None, changes: Changes) -> Selection:
    target = find(name)
    source = target.runs
    steps = changes.steps
    changed = _with_settings(source if steps is None else with_steps(source, steps), tier, changes)
    taken = tier or default_tier(changed)
    if target is source:
        target = changed
    elif changed.name != source.name:
        target = reading(target, changed)
    return Selection(target=target, tier=taken)


def _with_settings(source: Target, tier: Tier | None, changes: Changes) -> Target:
    if not changes.settings and changes.limit is None:
        return source
    taken = tier or default_tier(source)
    changed = with_overrides(source, taken, changes.settings, changes.limit)
    revision = changes.settings.get("revision")
    named = getattr(changed.scales[taken], "checkpoint", "")
    known = not revision or is_hub_name(named)
    require(known, f"--revision {revision}: needs a hub name (owner/model) as --model, not {named}")
    return changed


def revision_of(checkpoint: str) -> str:
    """Return the commit of a hub name that a target pins, else `main`; empty for a folder."""
    return REVISIONS.get(checkpoint, "main") if is_hub_name(checkpoint) else ""


def model_source(named: str) -> str:
    """Return `TrainScale.checkpoint` for what `--model` names: a folder or file, or a hub name.

    A GGUF file is made a checkpoint folder now, so that its sizes are known to all that follows.
    Anything else raises `ValueError`.
    """
    folder = Path(named).expanduser()
    if folder.is_file() and not gguf_copy(folder).is_dir():
        from repro.models.files.gguf_files import converted  # imports torch

        converted(folder)
    if folder.exists():
        return str(folder.resolve())
    require_model(named, "--model ")
    return named


def parse_seeds(text: str | None) -> int | list[int] | None:
    """Return how many seeds (`5`) or which (`0,3,4`, `0`) a flag names; `ValueError` for else."""
    if text is None:
        return None
    try:
        seeds = [in_digits(int, part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--seeds {text}: needs a number such as 5, or 0,3,4") from None
    if "," in text or seeds in ([], [0]):  # 0 is no number of seeds; it is one of them
        return seeds
    check_value(seeds[0], Annotated[int, Bound(least=1, most=10_000)], "--seeds")
    return seeds[0]


def parse_arms(text: str | None) -> list[str] | None:
    """Return the arms that a flag names, None for all; `ValueError` if it names none."""
    if text is None:
        return None
    arms = [part.strip() for part in text.split(",") if part.strip()]
    require(bool(arms), f"--arms {text!r} names no arm; leave it out for all arms")
    twice = sorted({arm for arm in arms if arms.count(arm) > 1})
    require(not twice, f"--arms {text}: {', '.join(twice)} is named twice")
    return arms


def _count(args: argparse.Namespace, name: str) -> int | None:
    """Return the value of a counting flag, None without it; `ValueError` below 1."""
    value: int | None = getattr(args, name, None)
    require(value is None or value >= 1, f"--{name} {value}: needs 1 or more")
    return value
