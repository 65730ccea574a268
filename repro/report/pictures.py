"""Pictures of the page of learning: a heading per target, then what its verdicts are about.

A target has up to six pictures. Shown is the one of paired differences, which is what statements
are judged by; the others are links below it. Where a target has none, its held-out accuracy is
shown, and of Table 1, which most other targets are compared with, all are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from repro.spec.target import Target
from repro.spec.tier import Tier
from repro.targets import TARGETS

_FIRST = ("paired_differences", "heldout_accuracy", "accuracy")
_SHOWN_WHOLE = ("table1",)
# What ends the names of the pictures that are of no single target; they stand in the page's text.
FOREST, DOSE = "forest", "dose_response"


def picture_lines(folder: Path, page: Path) -> list[str]:
    """Return the section on pictures, empty without any in `folder`; links start from `page`."""
    pictures = {
        path.stem: path
        for kind in ("svg", "png")
        for path in (sorted(folder.glob(f"proxy_*.{kind}")) if folder.is_dir() else [])
        if not path.stem.endswith((f"_{FOREST}", f"_{DOSE}"))
    }
    if not pictures:
        return []
    by_target: dict[str, dict[str, Path]] = {}
    for stem, path in pictures.items():
        name, what = _target_and_rest(stem)
        by_target.setdefault(name, {})[what] = path
    lines = ["Drawn from the same records.", ""]
    for target in TARGETS:
        if target.name in by_target:
            lines += _of_target(target, by_target[target.name], page)
    return lines


def _target_and_rest(stem: str) -> tuple[str, str]:
    """Return the target's name and what a picture shows: `proxy_table1_accuracy`."""
    bare = stem.removeprefix(f"{Tier.PROXY.value}_")
    named = [target.name for target in TARGETS if f"_{target.name}_" in f"_{bare}"]
    if not named:
        raise ValueError(f"picture {stem}: needs a target's name, as in proxy_table1_accuracy")
    name = max(named, key=len)
    device, what = f"_{bare}".split(f"_{name}_", 1)
    return name, "_".join(filter(None, [what, device.strip("_")]))


def _of_target(target: Target, pictures: Mapping[str, Path], page: Path) -> list[str]:
    shown: Sequence[str] = list(pictures)
    if target.name not in _SHOWN_WHOLE:
        first = next((what for what in _FIRST if _having(pictures, what)), None)
        shown = _having(pictures, first) if first else shown
    links = {
        what: os.path.relpath(path, page).replace(os.sep, "/") for what, path in pictures.items()
    }
    lines = [f"### `{target.name}`", "", f"Stated: {target.statement} ({target.source}).", ""]
    for what in shown:
        words = f"{target.name} {what}".replace("_", " ")
        lines += [f"![{words}]({links[what]})", ""]
    others = [f"[{what.replace('_', ' ')}]({links[what]})" for what in links if what not in shown]
    return [*lines, f"Also drawn: {', '.join(others)}.", ""] if others else lines


def _having(pictures: Mapping[str, Path], what: str) -> Sequence[str]:
    """Return the pictures that show `what`, of whichever device."""
    return [name for name in pictures if name.startswith(what)]
