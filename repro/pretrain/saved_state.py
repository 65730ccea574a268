"""Where an interrupted pre-training goes on: weights, AdamW's moments and progress in one file.

The file is safetensors, so it holds no code; the progress is JSON in its header. It carries the
digest of configuration and seed, and is refused by a run of another. No random state is kept, since
none exists: batches are a function of the seed and the step.

Easy to get wrong: keeping the weights and forgetting the moments, after which training goes on from
a cold optimiser with a visible bump, and a crash while writing, hence the rename.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from repro.spec.config import require


@dataclass(slots=True)
class Progress:
    """Where a run stands.

    Attributes
    ----------
    step, tokens, seconds
        Done so far, in all starts together.
    losses
        Of each step, nats a token.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)


def save_state(
    path: Path, model: nn.Module, optimizer: torch.optim.AdamW, progress: Progress, digest: str
) -> None:
    """Write weights, moments and progress to one file, replacing an earlier one whole."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            tensors[f"optimizer.{names[id(parameter)]}.{key}"] = value.clone()
    metadata = {"digest": digest, "progress": json.dumps(dataclasses.asdict(progress))}
    partial = path.with_name(path.name + ".part")
    save_file(tensors, partial, metadata=metadata)
    os.replace(partial, path)


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.AdamW, digest: str) -> Progress:
    """Read a state into model and optimiser.

    Raises
    ------
    ValueError
        When the state belongs to another configuration or seed.
    """
    with safe_open(path, framework="pt") as stored:
        metadata = stored.metadata()
        require(
            metadata["digest"] == digest,
            f"{path} belongs to another configuration or seed ({metadata['digest'][:12]}, this run "
            f"is {digest[:12]}); move it away to start again",
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(stored.get_tensor(f"model.{name}"))
                prefix = f"optimizer.{name}."
                optimizer.state[parameter] = {
                    key.removeprefix(prefix): stored.get_tensor(key).to(parameter.device)
                    for key in stored.keys()  # noqa: SIM118 - not a mapping
                    if key.startswith(prefix)
                }
    return Progress(**json.loads(metadata["progress"]))
