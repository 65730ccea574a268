"""What a policy said when training ended, so that an export can be compared with it later.

Beside an adapter lies `qerl_probe.json`: per probe text, the mean log-probability of its tokens
under the policy in memory. An adapter that is loaded later on other base weights (a folder that was
written over, another commit, a format that differs) says something else, and no file shows it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from repro.export.comparing import DifferentError, logits_of, probes_of
from repro.models.checkpoint import write_json
from repro.models.files.tensor_files import CheckpointError
from repro.models.policy import Policy

PROBE = "qerl_probe.json"
# Largest difference of a text's mean log-probability, nats: both in float32, and otherwise.
_EXACT, _ROUNDED = 1e-3, 3e-2


def write_probe(policy: Policy, folder: Path) -> Path:
    """Write what the policy says now, without added noise, beside its adapter; return the file."""
    rows = probes_of(policy)
    value = {
        "compute_dtype": str(policy.compute_dtype).removeprefix("torch."),
        "mean_logprobs": mean_logprobs(logits_of(policy.model, rows), rows),
    }
    write_json(folder / PROBE, value)
    return folder / PROBE


def check_probe(folder: Path, logits: Tensor, rows: Tensor, dtype: torch.dtype) -> str:
    """Return a sentence on how a loaded policy compares with what was said when training ended.

    Parameters
    ----------
    folder
        The adapter's.
    logits : Tensor, (B, T, V)
        Of the loaded policy on the probe rows (B, T).
    dtype
        Of its activations.

    Raises
    ------
    DifferentError
        When it says something else.
    CheckpointError
        When the file is not one that `write_probe` wrote.
    """
    path = folder / PROBE
    if not path.is_file():
        return f"{folder} holds no {PROBE}: what training ended with is known from its files alone"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        before = [float(number) for number in value["mean_logprobs"]]
        exact = value["compute_dtype"] == "float32" and dtype == torch.float32
        pairs = list(zip(before, mean_logprobs(logits, rows), strict=True))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a probe: {error!r}") from error
    largest, bound = max(abs(a - b) for a, b in pairs), _EXACT if exact else _ROUNDED
    if not largest <= bound:
        raise DifferentError(
            f"{folder} loaded on its base differs by {largest:.2e} nats per token from what "
            f"training ended with, where at most {bound:.0e} is rounding: the base is not "
            "the one trained on"
        )
    return f"from the end of training: {largest:.1e} nats per token at most"


def mean_logprobs(logits: Tensor, rows: Tensor) -> list[float]:
    """Return the mean log-probability of each row's tokens but the first, nats."""
    following = logits[:, :-1].double().log_softmax(-1)  # (B, T - 1, V)
    own = following.gather(-1, rows[:, 1:, None]).squeeze(-1)
    return [float(value) for value in own.mean(-1)]
