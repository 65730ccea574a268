"""The end of a decode step: a token from each row's logits, and the row's state moved on by it.

`choose` is the plain form, for any device and any filter; it neither waits for the device nor
branches on values, so it can be captured. Rows whose logits are not finite draw nothing.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from repro.rollout.draw import draw
from repro.rollout.state import RowState
from repro.spec.config import SamplingConfig


def choose(logits: Tensor, state: RowState, sampling: SamplingConfig) -> None:
    """Draw for slots 0 to M - 1 and advance them.

    Parameters
    ----------
    logits : Tensor, (M, V), float32
    state
        Its `temperature` is used, so that one captured step serves every temperature above 0.
    sampling
        Filters, and whether the temperature is 0.
    """
    M = logits.shape[0]
    faulty = ~torch.isfinite(logits).all(dim=-1)  # (M,)
    sound = logits.masked_fill(faulty.unsqueeze(1), 0.0)
    column = state.counts[:M].clamp(max=state.uniforms.shape[1] - 1).long().unsqueeze(1)  # (M, 1)
    numbers = state.uniforms[:M].gather(1, column).squeeze(1)  # (M,)
    if sampling.temperature > 0:
        sound = sound / state.temperature
        sampling = dataclasses.replace(sampling, temperature=1.0)
    ids, logprobs = draw(sound, numbers, sampling)
    state.advance(ids, logprobs, faulty)
