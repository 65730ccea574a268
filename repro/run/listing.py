"""What `repro list` prints: the paper's tables and figures, what else there is, what runs where."""

from __future__ import annotations

import argparse
import re

from repro.evidence.origins import grouped_by
from repro.spec.target import Target
from repro.spec.tier import Tier
from repro.targets import TARGETS


def main_list(args: argparse.Namespace) -> int:
    """Print the paper's tables and figures, the others named or counted; return 0."""
    groups = grouped_by(TARGETS, _group)
    named = _GROUPS if args.all else _GROUPS[:1]
    width = max(len(item.name) for title in named for item in groups[title])
    lines = []
    for title in named:
        lines.append(title)
        for item in groups[title]:
            reason = f" ({item.why_not})" if item.why_not else ""
            tiers = " ".join(tier.value for tier in item.runs.tiers()) or "-"
            lines.append(f"  {item.name:<{width}}  {tiers:<12}  {title_of(item)}{reason}")
        lines.append("")
    if not args.all:
        lines.append("Further targets, which `python -m repro list --all` names")
        lines += [f"  {len(groups[title]):<3} {title}" for title in _GROUPS[1:]]
        lines.append("")
    lines.append("Tiers")
    for tier in Tier:
        missing = tier.missing()
        here = "the hardware is here; `plan` names the downloads"
        state = missing or (here if tier is Tier.PAPER else "runs here")
        lines.append(f"  {tier.value:<8} {tier.needs}")
        lines.append(f"           {state}")
        lines.append(f"           a pass means: {tier.meaning}")
    lines += ["", "Next: python -m repro plan table1"]
    print("\n".join(lines))  # noqa: T201
    return 0


_GROUPS = (
    "The paper's tables and figures, and the tiers at which they can be run",
    "The same at other sizes of the paper's",
    "Learning on small published checkpoints: contrasts, doses, sweeps",
    "Time and memory: other sizes, lengths, formats and products",
)
_OF_PAPER = re.compile(r"(table|figure)\d+")


def _group(target: Target) -> str:
    tiers = target.runs.tiers()
    if _OF_PAPER.fullmatch(target.name):
        return _GROUPS[0]
    return _GROUPS[1 if Tier.PAPER in tiers else 2 if Tier.MINI in tiers else 3]


def title_of(target: Target) -> str:
    """Return a target's title, and whose measurement it is where its name says another table."""
    named = re.match(r"table(\d+)_", target.name)
    titled = re.match(r"Table (\d+)", target.title)
    if named and titled and named[1] != titled[1]:
        return f"{target.title} (measured as Table {named[1]})"
    return target.title
