"""What `repro list` prints: every table and figure of the paper, and what can run where."""

from __future__ import annotations

from typing import Any

from repro.spec.target import Target
from repro.spec.tier import Tier
from repro.targets import TARGETS, runs_of


def listing_json() -> dict[str, Any]:
    """Return the tiers and targets as JSON values."""
    return {
        "tiers": {
            tier.value: {
                "needs": tier.needs,
                "a pass means": tier.meaning,
                "missing here": tier.missing(),
            }
            for tier in Tier
        },
        "targets": [
            {
                "name": target.name,
                "title": target.title,
                "statement": target.statement,
                "source": target.source,
                "tiers": [tier.value for tier in runs_of(target).tiers()],
                "arms": [arm.name for arm in target.arms],
                "claims": [claim.name for claim in target.claims],
                "reads the runs of": target.records_of,
                "why not": target.why_not,
            }
            for target in TARGETS
        ],
    }


def listing_text() -> str:
    """Return the listing as lines of text."""
    width = max(len(target.name) for target in TARGETS)
    lines = ["Targets (a table or figure of the paper, and the tiers at which it can be run)"]
    for item in TARGETS:
        reason = f" ({item.why_not})" if item.why_not else ""
        lines.append(f"  {item.name:<{width}}  {_tiers(item):<12}  {item.title}{reason}")
    lines += ["", "Tiers"]
    for tier in Tier:
        missing = tier.missing()
        here = "the hardware is here; `plan` names the downloads"
        state = missing or (here if tier is Tier.PAPER else "runs here")
        lines.append(f"  {tier.value:<8} {tier.needs}")
        lines.append(f"           {state}")
        lines.append(f"           a pass means: {tier.meaning}")
    lines += ["", "Next: python -m repro plan table1"]
    return "\n".join(lines)


def _tiers(target: Target) -> str:
    tiers = runs_of(target).tiers()
    return " ".join(tier.value for tier in tiers) if tiers else "-"
