"""Receipts of exploration: how many tokens were drawn so, and that it changed what was sampled."""

from __future__ import annotations

from collections.abc import Iterator

from repro.evidence.receipts.required import arm_of
from repro.evidence.record import Record


def exploration(record: Record) -> Iterator[str]:
    """Yield why rollouts did not explore as the arm asks, or did where it asks for nothing."""
    # Not every arm of a record is an `Arm`; those that are not have none.
    planned, done = record.config["arm"].get("exploration"), record.effects.get("exploration")
    if not planned:
        if done:
            yield f"an arm without exploration explored: {done}"
        return
    if not done:
        yield "effects.exploration is missing: nothing shows that rollouts explored"
        return
    asked, drawn, changed = (
        done.get(f"tokens_{name}") or 0 for name in ("asked", "explored", "changed")
    )
    if drawn != asked:
        yield f"effects.exploration.tokens_explored is {drawn}; {asked} were asked for"
    if not 0 < changed <= drawn:
        yield (
            f"effects.exploration.tokens_changed is {changed} of {drawn}: exploration must have "
            "changed at least one token, and no more than it drew"
        )
    yield from _asked(record, asked)


def _asked(record: Record, asked: int) -> Iterator[str]:
    """Yield why the tokens asked for are not those of the completions that were sampled."""
    rows, own = record.effects.get("rows") or {}, arm_of(record).exploration
    sampled = rows.get("tokens_sampled") or 0
    completions = (rows.get("groups_drawn") or 0) * record.config["scale"]["group_size"]
    if own is None:
        return
    least, most = sampled, sampled
    if own.opening_tokens:
        # A completion has one token at least.
        least, most = completions, min(sampled, completions * own.opening_tokens)
    if not least <= asked <= most:
        yield (
            f"effects.exploration.tokens_asked is {asked}; {completions} completions of {sampled} "
            f"tokens have {least} to {most}"
        )
