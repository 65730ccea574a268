"""Where an interrupted pre-training goes on: weights, AdamW's moments and progress.

A snapshot as those of training (`repro.rl.snapshots`: checksums, atomic, the last two kept). It
carries the digest of configuration and seed, and is refused by a run of another. No random state is
kept, since none exists: batches are a function of the seed and the step.

Easy to get wrong: keeping the weights and forgetting the moments, after which training goes on from
a cold optimiser with a visible bump.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from repro.evidence.provenance import source_states
from repro.rl.snapshots import Snapshot, SnapshotError, restore_newest
from repro.rl.training_checkpoint import restore_trained, write_trained


@dataclass(slots=True)
class Progress:
    """Where a run stands.

    Attributes
    ----------
    step, tokens, seconds
        Done so far, in all starts together.
    losses
        Of each step, nats per token.
    peak_bytes
        Most memory that an earlier start had used when it wrote the state.
    refused
        A sentence per checkpoint that could not be gone on from.
    sources
        States of the source that the steps so far ran, as in `repro.evidence.provenance`.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    refused: list[str] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)

    def note_refused(self, sentences: list[str]) -> None:
        """Keep a sentence per checkpoint that could not be gone on from."""
        self.refused += sentences


def save_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.AdamW, progress: Progress, digest: str
) -> None:
    """Write weights, moments and progress."""
    progress.sources = source_states(progress.sources)
    content = {"digest": digest, "progress": dataclasses.asdict(progress)}
    write_trained(folder, progress.step, dict(model.named_parameters()), optimizer, content)


def load_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.AdamW, digest: str
) -> Progress | None:
    """Read the last good state into model and optimiser; return its progress, None without any.

    Raises
    ------
    ValueError
        When every state is damaged, or belongs to another configuration or seed; the message names
        each.
    """

    def restore(snapshot: Snapshot) -> Progress:
        of = snapshot.value("digest", str)
        if of != digest:
            raise SnapshotError(
                f"it belongs to another configuration or seed ({of[:12]}, this run is "
                f"{digest[:12]})"
            )
        progress = _parse(snapshot.value("progress", dict), snapshot.step)
        restore_trained(snapshot, dict(model.named_parameters()), optimizer)
        return progress

    return restore_newest(folder, restore)


def _parse(values: dict[str, Any], step: int) -> Progress:
    """Return the progress that JSON values stand for; it must have a loss per step."""
    try:
        progress = Progress(**values)
    except TypeError as error:
        raise SnapshotError(f"its progress has unexpected fields: {error}") from error
    if progress.step != step or len(progress.losses) != step:
        raise SnapshotError(
            f"its progress is of step {progress.step} with {len(progress.losses)} losses; the "
            f"checkpoint is of step {step}"
        )
    return progress
